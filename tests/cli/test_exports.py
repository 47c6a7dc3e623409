"""``--export`` of predict and plan: what is written, what is said, and when nothing is written."""

import json
from pathlib import Path

import pytest

from fsdp_bench.spec.units import format_gib
from tests.cli.answered_once import answered_once
from tests.conftest import json_of, run_command, stdout_of

PREDICT = ("predict", "--model", "Llama-3.1-8B", "--server", "p5.48xlarge")
PLAN = ("plan", "--model", "Llama-3.2-1B", "--server", "p5.48xlarge", "--strategy", "FULL_SHARD", "--api", "fsdp1")
SETTING = ("--checkpointing", "full", "--loss", "plain", "--nodes", "2")


def test_predict_says_behind_its_answer_what_was_written_and_how_it_starts(tmp_path: Path) -> None:
    words = (*PREDICT, "--code", "benchmark", "--export", "pytorch,slurm", "--export", "accelerate")
    printed = stdout_of(*words, cwd=tmp_path)
    answer, _, exported = printed.partition("\nexported")
    assert answer.startswith("fits (predicted)")
    for name in ("train_fsdp.py", "train.sbatch", "accelerate.yaml", "train_accelerate.py"):
        assert name in exported
        assert (tmp_path / name).is_file()
    assert "torchrun --standalone --nproc-per-node 8 train_fsdp.py" in " ".join(exported.split())
    assert "--code huggingface answers for it" in " ".join(exported.split())  # predicted was the benchmark's code
    said = (tmp_path / "train_fsdp.py").read_text()
    assert "# command    fsdp-bench predict --model Llama-3.1-8B --server p5.48xlarge --code benchmark --export" in said


@pytest.mark.parametrize("words", [PREDICT, (*PLAN, "--loss", "plain", "--nodes", "2")])
def test_an_export_does_not_change_the_answer(words: tuple[str, ...], tmp_path: Path) -> None:
    words = (*words, "--checkpointing", "full", "--batch", "1")
    exported = json_of(*words, "--export", "pytorch", cwd=tmp_path)
    assert exported.pop("exports")
    assert exported == json_of(*words, cwd=tmp_path)


def test_an_exported_file_says_what_the_code_that_it_trains_takes(tmp_path: Path) -> None:
    words = (*PREDICT, "--api", "fsdp1", "--checkpointing", "full")
    run_command(*words, "--export", "pytorch", cwd=tmp_path)
    said = " ".join((tmp_path / "train_fsdp.py").read_text().split())
    for code, text in (
        ("huggingface", "{} reserved of"),  # what the file trains
        ("benchmark", "reserved instead of # {}"),  # what was asked for
    ):
        found = json.loads(run_command(*words, "--code", code, "--json", cwd=tmp_path).stdout)
        needed = format_gib(found["memory"]["needed_bytes"])
        assert text.format(needed) in said or text.replace("# ", "").format(needed) in said


def test_plan_exports_its_winner_with_all_of_its_micro_batches(tmp_path: Path) -> None:
    words = (*PLAN, *SETTING, "--batch", "1", "--global-batch", "1M", "--tokens", "1B", "--export", "pytorch")
    found = json_of(*words, "--export-dir", "job", cwd=tmp_path)
    assert [file["path"] for file in found["exports"]] == ["job/train_fsdp.py"]
    assert found["exports"][0]["start"].startswith("torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d")
    text = (tmp_path / "job" / "train_fsdp.py").read_text()
    steps = found["winner"]["setup"]["gradient_accumulation_steps"]
    assert steps > 3  # of which three are simulated
    assert f"MICRO_BATCHES = {steps}  #" in text


def test_a_plan_is_not_lost_where_it_cannot_be_exported(tmp_path: Path) -> None:
    (tmp_path / "train_fsdp.py").write_text("mine")
    words = (*PLAN, *SETTING, "--tokens", "1B", "--export", "pytorch", "--json")
    printed = stdout_of(*words, cwd=tmp_path, code=2)
    document = json.loads(printed)
    assert document["winner"]["num_nodes"] == 2
    assert document["exports"] == []
    assert "train_fsdp.py" in document["error"]
    assert (tmp_path / "train_fsdp.py").read_text() == "mine"


def test_a_kind_that_cannot_express_the_setting_does_not_stop_the_others(tmp_path: Path) -> None:
    words = (*PREDICT, "--code", "huggingface", "--checkpointing", "full", "--api", "fsdp1")
    words += ("--export", "torchtitan,pytorch,slurm")
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "export torchtitan: torchtitan has fully_shard alone" in line
    assert "exported          train_fsdp.py, train.sbatch into" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"train_fsdp.py", "train.sbatch"}
    assert "train_fsdp.py" in (tmp_path / "train.sbatch").read_text().split("srun")[1]
    as_json = run_command(*words, "--json", "--export-dir", "other", cwd=tmp_path)
    document = json.loads(as_json.stdout)
    assert as_json.returncode == 2
    assert [file["kind"] for file in document["exports"]] == ["pytorch", "slurm"]
    assert document["fits"] is True
    assert "torchtitan" in document["error"]


def test_a_setting_that_does_not_fit_is_not_exported(tmp_path: Path) -> None:
    words = ("predict", "--model", "Llama-2-70B", "--server", "p5.48xlarge", "--export", "pytorch")
    with answered_once():
        done, as_json = run_command(*words, cwd=tmp_path), run_command(*words, "--json", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout.endswith("\nnothing exported: it does not fit\n")
    assert json.loads(as_json.stdout)["exports"] == []
    done = run_command(*PLAN, *SETTING, "--tokens", "1T", "--deadline", "1h", "--export", "pytorch", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout.endswith("\nnothing exported: there is no plan\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("pytorch", "--code", "benchmark", "--kernels", "cpu"), "--kernels cpu"),
        (("accelerate", "--checkpointing", "selective"), "--checkpointing full"),
        (("pytorch",), "exists and differs"),
        # fits in the benchmark's code, which is asked for, and not in the code that is trained
        (("pytorch", "--nodes", "6", "--strategy", "zero2", "--loss", "chunked", "--batch", "2"), "does not fit"),
    ],
)
def test_an_export_that_cannot_be_written_is_one_line_behind_the_answer(
    words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    (tmp_path / "train_fsdp.py").write_text("mine")
    done = run_command(*PREDICT, "--export", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stdout.startswith("fits (predicted)") or "--kernels" in words
    (line,) = done.stderr.splitlines()
    assert says in line
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_size_of_the_ladder_has_a_config(tmp_path: Path) -> None:
    words = ("predict", "--params", "1B", "--gpu", "H100-SXM", "--world-size", "8", "--export", "huggingface")
    words += ("--api", "fsdp1")
    for code in ("huggingface", "benchmark"):
        done = run_command(*words, "--code", code, "--export-dir", code, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, other = ((tmp_path / code / "train_huggingface.py").read_text() for code in ("huggingface", "benchmark"))
    assert '"model_type": "llama"' in one
    assert one[one.index("CONFIG =") :] == other[other.index("CONFIG =") :]
