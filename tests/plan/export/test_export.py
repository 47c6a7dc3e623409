"""Exported files: what they say, what is refused, what is never overwritten."""

import ast
import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench import __version__
from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.export import KINDS
from fsdp_bench.plan.export.files import write
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.setup import FIELDS, TrainSetup
from fsdp_bench.spec.units import format_gib
from tests.conftest import message_of
from tests.other_values import MEANS_SOMETHING_WITH, another_value
from tests.plan.export.settings import COMMAND, CONFIG, chosen, chosen_on_servers, export


def test_every_file_begins_with_what_was_predicted_and_of_what() -> None:
    one = chosen_on_servers(2, api="fsdp2", wrap="block-and-ends", checkpointing="full", max_grad_norm=1.0)
    for file in export(KINDS, one):
        comment = " ".join(line.lstrip("# ") for line in file.text.split("\n") if line.startswith("# "))
        assert f"fsdp-bench {__version__}" in comment
        assert "Llama-3.1-8B" in comment
        assert "2 x p5.48xlarge, 16 H100-SXM" in comment
        trained = one.in_code("torchtitan") if file.kind == "torchtitan" else one
        assert f"{format_gib(trained.prediction.needed_bytes)} reserved" in comment
        assert "alone; no bound" in comment  # of the code around it, such as the Trainer's, nothing is predicted
        assert f"{trained.tokens_per_second_per_gpu:,.0f} tokens/s per GPU" in comment
        assert COMMAND in comment
        for note in file.notes:
            assert note.replace(" ", "") in comment.replace(" ", "")


SCRIPTS: list[dict[str, Any]] = [
    {"api": "fsdp2", "strategy": "HYBRID_SHARD", "checkpointing": "selective", "wrap": "block-and-ends"},
    {"api": "fsdp2", "gradient_accumulation_steps": 4, "sync_every_micro_batch": False, "max_grad_norm": 1.0},
    {"api": "fsdp2", "strategy": "SHARD_GRAD_OP", "loss": "chunked", "optimizer": "adamw-fused", "offload": "params"},
    {"api": "fsdp2", "wrap": "block-and-ends", "fp32_head": True, "forward_prefetch": True, "optimizer": "adamw-8bit"},
    {"api": "fsdp2", "offload": "optimizer", "reshard_after_forward": 4, "reshard_last_block": False},
    {"api": "fsdp2", "strategy": "NO_SHARD", "precision": "bf16-mixed-bf16-reduce", "compile": True},
    {"api": "fsdp1", "strategy": "HYBRID_SHARD", "precision": "fp16-mixed", "loss": "compiled", "max_grad_norm": 1.0},
    {"api": "fsdp1", "gradient_accumulation_steps": 4, "sync_every_micro_batch": False, "loss": "liger"},
    {"api": "fsdp1", "wrap": "size", "min_num_params": 100_000, "backward_prefetch": "none", "optimizer": "sgd"},
    {"api": "fsdp1", "wrap": "block-and-ends", "fp32_head": True, "activation_offload": True, "checkpointing": "full"},
    {"api": "fsdp1", "checkpointing": "full", "reentrant": "around"},
    {"api": "fsdp2", "strategy": "NO_SHARD", "checkpointing": "full", "reentrant": "inside"},
]


@pytest.mark.parametrize("fields", SCRIPTS, ids=str)
def test_the_script_is_python_that_uses_what_it_imports(fields: dict[str, Any]) -> None:
    (file,) = export(["pytorch"], chosen(**fields))
    assert_uses_what_it_imports(file.text)


def assert_uses_what_it_imports(text: str) -> None:
    tree = ast.parse(text)
    bound = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom | ast.Import) for a in n.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {name.partition(".")[0] for name in bound} <= used
    assert all(len(line) <= 120 for line in text.split("\n"))


@pytest.mark.parametrize("name", [name for name, one in FIELDS.items() if one.option is not None])
def test_every_field_is_in_the_script_or_refused(name: str) -> None:
    """A field that no exported script has says so where it is declared (``not_exported``)."""
    without = {"api": "fsdp2", **MEANS_SOMETHING_WITH.get(name, {})}
    changed = without | {name: another_value(FIELDS[name])}
    if impossible(TrainSetup(**{"world_size": 8, "precision": "bf16-mixed", **changed}), "cuda"):
        without, changed = without | {"api": "fsdp1"}, changed | {"api": "fsdp1"}
    if FIELDS[name].not_exported is not None:
        with pytest.raises(SpecError, match=f"{name} is not exported"):
            _statements(changed)
    else:
        assert _statements(changed) != _statements(without)


def _statements(fields: dict[str, Any]) -> list[str]:
    (file,) = export(["pytorch"], chosen(**fields))
    return [line for line in file.text.split("\n") if not line.startswith("# ")]


def _with_adapters(lora: LoRA, **fields: Any) -> Chosen:
    """Return a setting whose model is said to have adapters; what it needs with them is not predicted."""
    one = chosen(**fields)
    model = one.question.model
    code = replace(model.code, origin=replace(model.code.origin, lora=lora))
    return dataclasses.replace(one, question=dataclasses.replace(one.question, model=replace(model, code=code)))


ADAPTERS = LoRA(rank=4, targets=("q_proj", "v_proj"), dropout=0.1, modules_to_save=("lm_head",), base="bf16")
BARE = {"api": "fsdp2", "strategy": "NO_SHARD", "world_size": 1}


@pytest.mark.parametrize(
    ("kind", "lora", "fields"),
    [
        ("pytorch", ADAPTERS, {"api": "fsdp2"}),
        ("pytorch", ADAPTERS, {"api": "fsdp1", "wrap": "block-and-adapters"}),
        ("pytorch", LoRA(rank=4, base="nf4"), {"api": "fsdp2", "checkpointing": "full"}),
        ("pytorch", LoRA(rank=4, base="nf4"), BARE),
        ("pytorch", LoRA(rank=4), {"api": "fsdp1", "precision": "bf16-true"}),
        ("huggingface", ADAPTERS, BARE),
    ],
    ids=str,
)
def test_a_script_with_adapters_trains_nothing_else(kind: str, lora: LoRA, fields: dict[str, Any]) -> None:
    (file,) = export([kind], _with_adapters(lora, **fields))
    assert_uses_what_it_imports(file.text)
    assert "LoraConfig(**ADAPTERS)" in file.text
    assert '"r": 4' in file.text
    assert ("(trained(model), lr=" in file.text) is (kind == "pytorch")
    assert ("autocast_adapter_dtype=False" in file.text) is ("precision" in fields)  # PEFT makes them in fp32
    assert ("= quantize(model" in file.text) is lora.is_quantized


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("accelerate", {"api": "fsdp2", "strategy": "NO_SHARD"}, "DistributedDataParallel"),
        ("accelerate", {"checkpointing": "selective"}, "--checkpointing full"),
        ("accelerate", {"checkpointing": "full", "checkpointing_policy": "every-2-blocks"}, "every block"),
        ("accelerate", {"checkpointing": "full", "reentrant": "inside"}, "not reentrant"),
        ("huggingface", {"checkpointing": "full", "reentrant": "around"}, "--reentrant inside"),
        ("torchtitan", {"api": "fsdp2", "checkpointing": "full", "reentrant": "inside"}, "not reentrant"),
        ("accelerate", {"compile": True}, "compile"),
        ("accelerate", {"precision": "fp16-mixed"}, "bf16-mixed"),
        ("accelerate", {"api": "fsdp2", "reshard_after_forward": 4}, "fewer ranks"),
        ("accelerate", {"api": "fsdp1", "strategy": "HYBRID_SHARD", "shard_size": 4}, "8 GPUs of a node"),
        ("huggingface", {"loss": "chunked"}, "own loss"),
        ("huggingface", {"optimizer": "adamw-for-loop"}, "adamw-for-loop"),
        ("torchtitan", {"api": "fsdp1"}, "--api fsdp2"),
        ("torchtitan", {"api": "fsdp2", "checkpointing": "selective"}, "every-second-product"),
        ("torchtitan", {"api": "fsdp2", "loss": "chunked"}, "include the head"),
        ("torchtitan", {"api": "fsdp2", "precision": "bf16-true"}, "reduces in fp32"),
        *(
            (kind, {"optimizer": "muon", "api": "fsdp2", "strategy": "NO_SHARD"}, "muon is not exported")
            for kind in ("pytorch", "huggingface")
        ),
        ("pytorch", {"optimizer_in_backward": True}, "optimizer_in_backward"),
        ("pytorch", {"api": "fsdp2", "wrap": "size"}, "--api fsdp1"),
        ("accelerate", {"api": "fsdp2", "lora": ADAPTERS}, "--export pytorch has them"),
        ("torchtitan", {"api": "fsdp2", "lora": ADAPTERS}, "--export pytorch has them"),
        ("huggingface", {"api": "fsdp2", "lora": ADAPTERS}, "several GPUs"),
        ("huggingface", BARE | {"lora": LoRA(base="nf4")}, "checkpoint"),
        ("pytorch", {"api": "fsdp2", "offload": "params", "lora": ADAPTERS}, "--offload"),
    ],
    ids=str,
)
def test_what_a_target_does_not_have_is_refused_in_one_line(kind: str, fields: dict[str, Any], says: str) -> None:
    make = _with_adapters if "lora" in fields else chosen
    assert says in message_of(lambda: export([kind], make(**fields)))


def test_what_a_target_changes_is_predicted_anew_and_said() -> None:
    asked = chosen_on_servers(1, api="fsdp2", checkpointing="full")
    same = chosen_on_servers(1, api="fsdp2", checkpointing="full", wrap="block-and-ends")
    file = export(["accelerate"], asked)[0]
    now, was = format_gib(same.prediction.needed_bytes), format_gib(asked.prediction.needed_bytes)
    assert f"--wrap block-and-ends: {now} reserved instead of {was} (predicted)" in file.notes[0]
    assert "instead of" not in str(export(["accelerate"], same)[0].notes)


def test_accelerate_is_refused_where_the_whole_models_of_a_node_exceed_its_host_memory() -> None:
    """Llama-3.1-8B has 8,030,261,248 parameters, of which 8 ranks hold 4 bytes each: 239.3 GiB of a p5's 2 TiB."""
    one = chosen_on_servers(1, checkpointing="full")
    assert "239.3 GiB on a node" in export(["accelerate"], one)[0].text
    cluster = one.question.hardware
    small = Hardware(server=replace(cluster.server, host_memory_bytes=200 << 30), gpu=cluster.gpu, gpus_per_node=8)
    with pytest.raises(SpecError, match=r"239\.3 GiB on a node of 200\.0 GiB; --export pytorch"):
        export(["accelerate"], dataclasses.replace(one, question=dataclasses.replace(one.question, hardware=small)))


def test_expandable_segments_are_in_the_note_and_the_command() -> None:
    for file in export(["pytorch", "huggingface", "slurm"], chosen(expandable_segments=True)):
        assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in file.text
        assert file.kind == "slurm" or str(file.start).startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ")


def test_an_embedding_that_is_the_head_is_not_put_into_units_that_are_not_predicted() -> None:
    tied = chosen({**CONFIG, "tie_word_embeddings": True}, api="fsdp2")
    with pytest.raises(SpecError, match="--api fsdp1"):
        export(["accelerate"], tied)
    (file,) = export(["pytorch"], tied)
    assert "model.tie_weights()" in file.text


@pytest.mark.parametrize("kinds", [["slurm"], ["slurm", "pytorch"], ["slurm", "accelerate"], ["slurm", "torchtitan"]])
def test_the_slurm_job_asks_for_the_servers_and_starts_the_script(kinds: list[str], tmp_path: Path) -> None:
    one = chosen_on_servers(2, api="fsdp2", wrap="block-and-ends", checkpointing="full")
    *others, job = export(kinds, one)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", job.text, re.MULTILINE))
    assert (asked["nodes"], asked["gpus-per-node"], asked["ntasks-per-node"]) == ("2", "8", "1")
    started = {file.name.removesuffix(".py") for file in others if file.name.endswith(".py")} or {"train_fsdp"}
    assert any(name in job.text.split("srun")[1] for name in started)
    path = tmp_path / job.name
    path.write_text(job.text)
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert job.text.startswith("#!/bin/bash\n")
    first_command = next(line for line in job.text.split("\n") if line and not line.startswith("#"))
    assert job.text.index("#SBATCH --output") < job.text.index(first_command)  # Slurm reads none behind a command


def test_a_file_that_differs_is_not_overwritten_and_nothing_is_written(tmp_path: Path) -> None:
    files = export(["pytorch", "accelerate"], chosen())
    folder = tmp_path / "made" / "here"
    paths = write(files, folder)
    assert [path.read_text() for path in paths] == [file.text for file in files]
    assert write(files, folder) == paths  # the same once more
    paths[1].write_text("mine")
    paths[0].unlink()
    with pytest.raises(SpecError, match=r"accelerate\.yaml.* exists and differs, so nothing was written"):
        write(files, folder)
    assert paths[1].read_text() == "mine"
    assert not paths[0].exists()


def test_a_model_name_or_command_cannot_leave_the_comment() -> None:
    one = chosen()
    object.__setattr__(one, "command", "fsdp-bench predict --catalog 'a\nimport os\nb'")
    for file in export(KINDS[:3], one):
        assert "\nimport os\nb" not in file.text


@pytest.mark.parametrize("reduces_each", [True, False])
def test_gradients_are_reduced_in_every_micro_batch_where_the_setting_says_so(reduces_each: bool) -> None:
    """accelerate's sync_each_batch is False by default: no_sync is around all micro-batches but the last."""
    fields = {"gradient_accumulation_steps": 4, "sync_every_micro_batch": reduces_each, "wrap": "block-and-ends"}
    files = export(["pytorch", "accelerate", "huggingface"], chosen(api="fsdp2", checkpointing="full", **fields))
    texts = {file.name: file.text for file in files}
    assert f"sync_each_batch={reduces_each})" in texts["train_accelerate.py"]
    assert ('"sync_each_batch": True' in texts["train_huggingface.py"]) is reduces_each
    assert ("set_requires_gradient_sync(is_last)" not in texts["train_fsdp.py"]) is reduces_each
