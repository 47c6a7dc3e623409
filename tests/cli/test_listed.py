"""What commands list: servers and models of the catalogue, with sources, and the trials that a sweep would run."""

from pathlib import Path

import pytest

from fsdp_bench.catalog.loader import gpus, models, servers
from tests.conftest import TINY_MODEL, json_of, stdout_of


def test_servers_lists_every_server_and_every_gpu() -> None:
    printed = stdout_of("servers")
    for entry in (*servers(), *gpus()):
        assert any(line.split("  ")[0] == entry.name for line in printed.splitlines()), entry.name
    assert "unknown" in printed


def test_a_server_is_shown_with_its_links_its_gpu_and_their_sources() -> None:
    text = " ".join(stdout_of("servers", "DGX B200").split())
    for part in (
        *("host memory unknown", "nvswitch, NVLink 5, 900 GB/s per GPU and direction", "GPU to host unknown"),
        *("infiniband, NDR, interfaces: 8, 400 GB/s per node and direction", "usable by a process"),
        *("(2024-03-18)", "NVIDIA HGX B200 datasheet (2024-03)"),
    ):
        assert part in text


def test_a_servers_power_limit_is_shown_with_its_source_or_as_not_documented() -> None:
    for name, *parts in (
        ("p4d.24xlarge", "GPU power limit 400 W source mludvig/aws-ethereum-miner pull request 5"),
        ("p5.48xlarge", "GPU power limit not documented; the GPU's default is assumed: 700 W", "700 W, 200 W at least"),
        ("ND-MI300X-v5", "GPU power limit not documented host memory", "default power limit unknown"),
        ("B200", "1000 W; what less would cost is unknown"),
    ):
        text = " ".join(stdout_of("servers", name).split())
        assert all(part in text for part in parts), name


def test_a_gpu_is_shown_by_its_own_name() -> None:
    printed = stdout_of("servers", "mi300x")
    assert "AMD Instinct MI300X" in printed
    assert "host memory" not in printed


def test_servers_as_json_is_one_document_with_units_in_its_names() -> None:
    document = json_of("servers")
    assert len(document["servers"]) == len(servers())
    assert len(document["gpus"]) == len(gpus())
    p5 = json_of("servers", "p5.48xlarge")
    assert p5["inter_node"]["bandwidth_bytes_per_second"] == 400e9  # 3200 Gbps
    assert p5["host_memory_bytes"] == 2048 * 2**30
    assert p5["source"]["date"]


def test_models_lists_every_model_and_all_can_be_planned() -> None:
    printed = stdout_of("models")
    assert "in all rows: predicted yes" in printed
    assert {entry.name for entry in models()} <= {line.split()[0] for line in printed.splitlines()}


def test_a_model_that_is_not_benchmarked_is_shown_with_its_published_count_and_why() -> None:
    text = " ".join(stdout_of("models", "qwen3-8b").split())
    assert "8,190,735,360 (published)" in text
    assert "with Hugging Face's code; Qwen 3 normalises queries and keys" in text


def test_models_as_json_holds_the_reason_too() -> None:
    document = json_of("models")
    by_name = {entry["name"]: entry for entry in document["models"]}
    # By hand: (50257 + 1024) x 768 embeddings, 12 blocks of 12 x 768^2 + 13 x 768, and a norm of 2 x 768.
    assert by_name["gpt2"]["num_parameters"] == by_name["gpt2"]["published_num_parameters"] == 124_439_808
    assert by_name["t5-base"]["num_parameters"] is None
    assert "encoder-decoder" in by_name["t5-base"]["unsupported_because"]


ON_A_GPU = "[run]\ndevice = 'cuda'\nemulate = true\n"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def lines_of(*words: object) -> list[str]:
    printed = stdout_of("sweep", *words, "--list")
    return printed.replace("\n  ", " ").splitlines()  # a long line goes on in the next


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("h200", "152 trials, 152 to run or recorded, 0 skipped"),  # 154 cells, of which two stand twice
        ("throughput", "8 trials, 8 to run or recorded, 0 skipped"),
        ("a10g-emulated", "14 cells, 14 to search, 0 of them found, 0 skipped"),
    ],
)
def test_a_sweep_is_listed_without_its_gpu_and_no_two_lines_are_alike(name: str, last: str, tmp_path: Path) -> None:
    *trials, end = lines_of(f"sweeps/{name}.toml", "--results", tmp_path)
    assert end == last
    described = [line.split("  ", 2)[-1] for line in trials]
    assert len(set(described)) == len(described)
    assert not list(tmp_path.iterdir())


def test_trials_that_depend_on_the_gpu_are_counted_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "mixed.toml"
    file.write_text(
        ON_A_GPU + "[grid]\nparams = ['10M', '40% of GPU']\nworld_size = [8, 'gpus']\n"
        "[[exclude]]\nparams = '40% of GPU'\nreason = 'large'\n" + TINY_MODEL
    )
    trial, end, note = lines_of(file)
    assert "world 8 emulated" in trial
    assert end.startswith("1 trials")
    assert note.startswith("not listed, because their sizes depend on the GPU, which is not here: ")
    sizes = ('world_size = "gpus"', 'params in "% of GPU" (--gpu-memory SIZE', 'params in "% of GPU" and world_size')
    for part in (f"1 with {size}" for size in sizes):
        assert part in note
    *trials, _, note = lines_of(file, "--gpu-memory", "24GiB")
    assert len(trials) == 2
    assert "--gpu-memory" not in note
