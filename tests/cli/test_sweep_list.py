"""``fsdp-bench sweep FILE --list``: the trials that would run, also on a machine without the GPU of the sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TINY_MODEL, stdout_of

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
