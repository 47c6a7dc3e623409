"""A rehearsal in a fork of a process that has imported torch gives the report of one in a new process."""

from pathlib import Path

import pytest

from tests.on_stand_in.interpreters import TORCHES, run_on_stand_in
from tests.on_stand_in.rehearsing import KINDS, command_of, rehearse, rehearse_in_own_process

SERVER = ("--steps", "3", "--server", "p5.48xlarge")
ONE_GPU = ("--steps", "3", "--gpu", "H100-SXM", "--gpu-memory", "40GiB", "--world-size", "64")
"""Another GPU count and memory size, which a fork must read anew."""

QUICK = [("accelerate", SERVER), ("fsdp2", ("--time", *SERVER))]
"""A script that imports transformers, and one that does not."""
EVERY = [(kind, given) for given in (SERVER, ("--time", *SERVER), ONE_GPU) for kind in KINDS]


@pytest.mark.parametrize(
    ("kind", "given"),
    [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow, id=f"{one[0]}-{one[1][0]}") for one in EVERY],
)
def test_a_fork_and_a_new_process_give_the_same_report(kind: str, given: tuple[str, ...], tmp_path: Path) -> None:
    """But for host memory: the forking process has imported more. A fork with other settings runs first."""
    command, words = command_of(*KINDS[kind])
    rehearse(*ONE_GPU, "--", *words, command=command, folder=tmp_path)
    forked = rehearse(*given, "--", *words, command=command, folder=tmp_path)
    alone = rehearse_in_own_process(*given, "--", *words, command=command, folder=tmp_path)
    assert {**forked.document, "host": None} == {**alone.document, "host": None}
    assert forked.document["host"]["peak_bytes"] > 0.97 * alone.document["host"]["peak_bytes"]


def test_a_failing_script_shows_its_error_and_the_next_script_runs() -> None:
    with pytest.raises(AssertionError, match="KeyError: 'no such thing'"):
        run_on_stand_in(TORCHES[0], "raise KeyError('no such thing')")
    assert run_on_stand_in(TORCHES[0], "print('there')") == "there\n"
