"""``fsdp-bench rehearse``: what is refused before a script starts, in one line each."""

from __future__ import annotations

import pytest

from tests.conftest import run_command

GPU = ("--gpu", "H100-SXM")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*GPU,), "command: nothing to run"),
        ((*GPU, "--", "bash", "run.sh"), "give the python, torchrun or accelerate command"),
        ((*GPU, "--", "deepspeed", "train.py"), "deepspeed"),
        ((*GPU, "--", "python", "no_such_file.py"), "no_such_file.py"),
        (("--", "python", "-c", "pass"), "no GPU is named; --server NAME or --gpu NAME"),
        (("--gpu", "H1000", "--", "python", "-c", "pass"), "H1000"),
        ((*GPU, "--steps", "none", "--", "python", "-c", "pass"), "steps: 'none' is not allowed; a whole number"),
        ((*GPU, "--steps", "0", "--", "python", "-c", "pass"), "steps: '0' is not allowed"),
        ((*GPU, "--rank", "1", "--ranks", "0,1", "--", "python", "-c", "pass"), "keep one"),
        ((*GPU, "--world-size", "8", "--ranks", "0,8", "--", "python", "-c", "pass"), "0 to 7, by the world size"),
        ((*GPU, "--ranks", "all", "--", "python", "-c", "pass"), "all needs --world-size or --server"),
        ((*GPU, "--gpu-memory", "900GiB", "--", "python", "-c", "pass"), "gpu-memory"),
        ((*GPU, "--chart", "memory.pdf", "--", "python", "-c", "pass"), "ends in .png or .svg"),
        ((*GPU, "--snapshot", "no/such/folder/s.pickle", "--", "python", "-c", "pass"), "is no folder"),
        ((*GPU, "--time", "--steps", "1", "--", "python", "-c", "pass"), "steps: '1' is not allowed with --time"),
        ((*GPU, "--tokens-per-step", "8", "--", "python", "-c", "pass"), "tokens-per-step: it counts for --time alone"),
        (
            (*GPU, "--time", "--tokens-per-step", "0", "--", "python", "-c", "pass"),
            "tokens-per-step: '0' is not allowed",
        ),
        (("--gpu", "MI300X", "--", "python", "-c", "pass"), "cannot be rehearsed"),
    ],
)
def test_bad_input_is_one_line_and_ends_with_2(words: tuple[str, ...], said: str) -> None:
    done = run_command("rehearse", *words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
    assert "Traceback" not in done.stderr
