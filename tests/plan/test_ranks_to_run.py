"""Which ranks are run, and again: those asked for, and those whose messages they need."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.plan.rehearse_command import CommandToRehearse, RanksToRun, command_to_rehearse
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOutcome, RehearsalReport
from tests.report.test_rehearsal_text import REPORT

Script = list[tuple[str, int]]
"""What a rank does: ("send" or "recv", the other rank)."""


def asked(ranks: Any = 0, world_size: int = 8) -> CommandToRehearse:
    return command_to_rehearse("python -c pass", gpu="H100-SXM", world_size=world_size, ranks=ranks)


def run_script(rank: int, script: Script, messages: dict[str, tuple[str, ...]]) -> RehearsalReport:
    """Run a rank up to the first message that is not known, as inside/replace/collectives.py does."""
    unread, sent, peers = Counter({int(sender): len(texts) for sender, texts in messages.items()}), {}, set()
    waits_for = None
    for way, other in script:
        peers.add(other)
        if way == "send":
            sent[str(other)] = (*sent.get(str(other), ()), "00")
        elif unread[other]:
            unread[other] -= 1
        else:
            waits_for = other
            break
    return replace(REPORT, rank=rank, sent=sent, peers=tuple(sorted(peers)), waits_for=waits_for)


def run_all(scripts: dict[int, Script], ranks: Any = 0) -> tuple[dict[int, RehearsalReport], list[int]]:
    """Return the final reports, and the ranks in the order in which they ran."""
    to_run, found, order = RanksToRun(asked(ranks)), {}, list[int]()
    while (rank := to_run.next()) is not None:
        order.append(rank)
        for report in to_run.add(run_script(rank, scripts.get(rank, []), to_run.options(rank).messages)):
            assert report.rank not in found
            found[report.rank] = report
    assert to_run.is_done
    return found, order


def test_ranks_run_in_the_order_in_which_they_are_asked_for() -> None:
    assert run_all({}, "7,0,3")[1] == [7, 0, 3]


def test_a_rank_that_needs_a_message_runs_again_once_its_sender_has_run() -> None:
    scripts: dict[int, Script] = {0: [("recv", 2)], 2: [("send", 0)]}
    found, order = run_all(scripts)
    assert order == [0, 2, 0]
    assert {rank: report.outcome for rank, report in found.items()} == dict.fromkeys((0, 2), RehearsalOutcome.STOPPED)


def test_stages_are_all_with_whom_messages_are_exchanged() -> None:
    scripts: dict[int, Script] = {0: [("send", 2)], 2: [("send", 4)], 4: [("send", 6)], 6: []}
    assert run_all(scripts)[1] == [0]
    assert run_all(scripts, "stages")[1] == [0, 2, 4, 6]


def test_a_message_that_nobody_sends_is_a_failure_that_names_both_ranks() -> None:
    scripts: dict[int, Script] = {0: [("recv", 1)], 1: []}
    found, _ = run_all(scripts)
    assert found[1].outcome is RehearsalOutcome.STOPPED
    assert found[0].outcome is RehearsalOutcome.FAILED
    assert found[0].failure is not None
    assert found[0].failure.message == "rank 0 waits for a message of rank 1, which ended without sending it"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda pair: pair[0] != pair[1]), max_size=12))
def test_messages_in_any_order_that_real_ranks_could_follow_arrive(pairs: list[tuple[int, int]]) -> None:
    scripts: dict[int, Script] = {rank: [] for rank in range(4)}
    for sender, receiver in pairs:
        scripts[sender].append(("send", receiver))
        scripts[receiver].append(("recv", sender))
    found, _ = run_all(scripts, "0,1,2,3")
    assert {report.outcome for report in found.values()} == {RehearsalOutcome.STOPPED}
    assert found.keys() == scripts.keys()


def test_a_word_that_is_no_rank_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(SpecError, match="'some' is not allowed; 0 to 7, by the world size, all, or stages"):
        asked("some")
