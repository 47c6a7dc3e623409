"""Mutated input: a run of mutations.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks import count_and_seed, mutations
from tests.attacks.mutations import CONFIGS, KINDS, broken_promise, perform, run_call, workplace
from tests.profiles import draws, validating

COUNT, SEED = count_and_seed(120, 3000)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    few = {model_type: CONFIGS[model_type] for model_type in ("llama", "mistral", "gpt2")}
    with workplace(most_recordings=draws(0, 30)) as folder, pytest.MonkeyPatch.context() as patch:
        if not validating():  # to read the recordings of all takes ten seconds
            patch.setattr(mutations, "CONFIGS", few)
        yield folder


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.timeout(COUNT * 6)
def test_mutated_input_ends_in_one_line_and_a_documented_exit_code(kind: str, place: Path) -> None:
    print(f"seed {SEED}")
    _, share = KINDS[kind]
    calls = [perform(kind, index, SEED, place) for index in range(max(COUNT * share // 100, 10))]
    assert not [found for found in calls if found is not None]


def test_a_broken_promise_is_found() -> None:
    words = ["predict"]
    assert broken_promise(words, 2, "", "fsdp-bench: no such thing\n") is None
    assert "traceback" in str(broken_promise(words, 1, "", "Traceback (most recent call last):\n"))
    assert "exit code 1" in str(broken_promise(words, 1, "", "fsdp-bench: it crashed\n"))
    assert "prints" in str(broken_promise(words, 0, "a\x1b[2Jb", ""))
    assert "not one line" in str(broken_promise(words, 2, "", "fsdp-bench: two\nlines\n"))
    assert "5000 characters" in str(broken_promise(words, 2, "", f"fsdp-bench: {'x' * 4988}\n"))
    assert "no JSON document" in str(broken_promise([*words, "--json"], 2, "", "fsdp-bench: no such thing\n"))


def test_unmutated_commands_are_accepted(place: Path) -> None:
    assert run_call(["predict", "--params", "10M", "--seq", "64"], place)[0] == 0
    assert run_call(["doctor"], place)[0] == 0  # where work would begin
