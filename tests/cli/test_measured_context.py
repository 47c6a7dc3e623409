"""A CUDA context that a calibration measured: the GPU's usable memory excludes it, and its size is known."""

from functools import partial
from pathlib import Path

import pytest

from fsdp_bench.catalog import loader
from fsdp_bench.spec.calibration_profile import Profile, RankProfile, write_profile
from fsdp_bench.spec.units import GIB, MIB
from tests.conftest import json_of, refused, run_command

CONTEXT = 600 * MIB
SETTING = ("--model", "Llama-3.1-8B", "--precision", "bf16-mixed", "--seq", "4096", "--checkpointing", "full")


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """A calibration of an H100 by hand, with two numbers of ranks; one of them could not read its context."""
    ranks = [
        RankProfile(num_ranks=count, threads_per_rank=1, launch_seconds=1e-6, hook_seconds={}, context_bytes=context)
        for count, context in ((1, CONTEXT), (8, None))
    ]
    profile = Profile(
        machine="by hand",
        device="cuda",
        device_name=loader.gpu("H100-SXM").product_names[0],
        measured_on="2026-11-21",
        versions={"torch": "2.13.0"},
        ranks=tuple(ranks),
    )
    write_profile(profile, tmp_path / "card.toml")
    return tmp_path / "card.toml"


answer = partial(json_of, "predict", *SETTING)


def test_the_process_takes_what_is_reserved_the_context_and_nccl(calibration: Path) -> None:
    before, found = answer("--server", "p5.48xlarge"), answer("--server", "p5.48xlarge", "--calibration", calibration)
    assert before["memory"]["peak_device_bytes"] is None
    assert before["server"]["context_bytes"] is None
    assert found["server"]["context_bytes"] == CONTEXT
    assert found["server"]["gpu_memory_bytes"] == before["server"]["gpu_memory_bytes"] - CONTEXT
    assert found["headroom_bytes"] == before["headroom_bytes"] - CONTEXT
    memory = found["memory"]
    together = memory["peak_reserved_bytes"] + CONTEXT + memory["communicators_bytes"]["high"]
    assert memory["peak_device_bytes"] == together
    assert before["memory"]["peak_reserved_bytes"] == memory["peak_reserved_bytes"]


def test_a_card_that_the_context_fills_is_refused_in_one_line(calibration: Path) -> None:
    words = ("--server", "p5.48xlarge", "--gpu-memory", "500MiB", "--calibration", calibration)
    assert refused("predict", *SETTING, *words) == (
        "fsdp-bench: gpu-memory: 500.0 MiB is not allowed; more than the CUDA context of 600.0 MiB that was measured"
        " on by hand"
    )


def test_where_nccl_is_unknown_so_is_what_the_process_takes_and_another_cards_context_is_not_taken(
    calibration: Path,
) -> None:
    found = answer("--gpu", "H100-SXM", "--world-size", "64", "--calibration", calibration)
    assert found["server"]["context_bytes"] == CONTEXT
    assert found["memory"]["peak_device_bytes"] is None
    other = answer("--server", "p4d.24xlarge", "--headroom", "1MiB", "--calibration", calibration)["server"]
    usable = loader.gpu("A100-SXM-40GB").usable_memory_bytes
    assert (other["context_bytes"], other["gpu_memory_bytes"]) == (None, usable)


def test_the_text_no_longer_says_that_the_context_is_not_predicted(calibration: Path) -> None:
    words = ("predict", *SETTING, "--server", "p5.48xlarge")
    before, after = (
        " ".join(run_command(*words, *more).stdout.split()) for more in ((), ("--calibration", calibration))
    )
    assert "kept free, for CUDA and NCCL (an assumption" in before
    assert "not predicted CUDA context (memory beyond reserved)" in before
    assert "614.0 MiB of each GPU kept free, NCCL's derived buffers; --headroom" in after
    assert "CUDA context (memory beyond" not in after
    assert "less a CUDA context of 600.0 MiB on by hand" in " ".join(after.split())


def test_a_cards_memory_can_be_said_where_nobody_documents_it() -> None:
    """The memory of an A10 that a process can use is not documented."""
    words = ("--model", "gpt2", "--gpu", "A10", "--world-size", "2")
    unknown, said = (run_command("predict", *words, *more) for more in ((), ("--gpu-memory", "22GiB")))
    assert unknown.stdout.startswith("unknown whether it fits")
    assert "nobody documents how much of a A10" in " ".join(unknown.stdout.split())
    assert said.stdout.startswith("fits (predicted)")
    assert "of 22.0 GiB usable" in " ".join(said.stdout.split())
    small = run_command("predict", *words, "--gpu-memory", "1GiB")
    assert (small.returncode, small.stdout[:13]) == (3, "does not fit ")
    assert run_command("predict", *words, "--gpu-memory", "25GiB").returncode == 2


def test_a_measured_context_reduces_the_usable_memory_also_of_a_stated_limit(calibration: Path) -> None:
    """The context is large enough to matter: 40 of 80 GiB."""
    text = calibration.read_text()
    assert str(CONTEXT) in text
    calibration.write_text(text.replace(str(CONTEXT), str(40 * GIB)))
    words = ("--gpu", "H100-SXM", "--world-size", 8, "--strategy", "FULL_SHARD", "--checkpointing", "full", "--no-time")
    measured, stated = ("--calibration", calibration), ("--gpu-memory", "60GiB")
    every = ((), measured, stated, (*stated, *measured))
    alone, beside, limited, both = (json_of("max-size", *words, *more) for more in every)
    sizes = [found["cells"][0]["max_parameters"] for found in (alone, limited, beside, both)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    assert both["server"]["gpu_memory_bytes"] == 20 * GIB


def test_a_card_holds_the_peak_only_beside_what_is_kept_free() -> None:
    """A GPU has 100 MiB more than the peak of live bytes, but 1.5 GiB and 614 MiB for NCCL are kept free."""
    memory = answer("--server", "p5.48xlarge")["memory"]
    words = ("predict", *SETTING, "--server", "p5.48xlarge", "--gpu-memory")
    between, above = (run_command(*words, f"{memory['peak_allocated_bytes'] + more * MIB}B") for more in (100, 2200))
    assert (between.returncode, above.returncode) == (3, 3)
    assert "would hold the peak" not in " ".join(between.stdout.split())
    assert "would hold the peak" in " ".join(above.stdout.split())
