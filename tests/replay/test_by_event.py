"""Random logs run by replay/streams.py as by a second scheduler, which goes from event to event (by_event.py)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_bench.replay.schedule import run
from fsdp_bench.simulate.events import Category, Event, Kind, Queue, Stream, Work
from fsdp_bench.simulate.tape import Tape
from tests.replay.by_event import ByEvent
from tests.replay.test_contention import Halved

SECONDS = st.sampled_from((0, 1, 2, 3, 5, 7))
STREAMS = st.one_of(st.just(Stream.COMPUTE), st.sampled_from(list(Stream)))
GROUPS = st.sampled_from(("shard", "replicate", "world"))
QUEUES = st.sampled_from([queue for queue in Queue if queue != Queue.RESHARD])


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Draw a log in which every wait has something to wait for."""
    tape, recorded = Tape(), Counter[Queue]()
    for _ in range(draw(st.integers(1, 40))):
        what, stream = draw(st.sampled_from(list(Kind))), draw(STREAMS)
        if what in (Kind.COLLECTIVE, Kind.START_COLLECTIVE):
            tape._issue(what, Work("all_reduce", draw(SECONDS), group=draw(GROUPS)), stream)
        elif what is Kind.RECORD_EVENT:
            queue = draw(QUEUES)
            tape.record_event(stream, queue)
            recorded[queue] += 1
        elif what in (Kind.WAIT_EVENT, Kind.HOST_WAIT):
            if left := [queue for queue in recorded if recorded[queue]]:
                queue = draw(st.sampled_from(left))
                recorded[queue] -= 1
                tape.events.append(Event(what, queue, 0, Category.TEMPORARY, stream))
        else:
            _note(tape, what, stream, draw(SECONDS), draw(STREAMS))
    return tape.events


def _note(tape: Tape, what: Kind, stream: Stream, seconds: int, other: Stream) -> None:
    """Add what refers to no event before it."""
    if what is Kind.KERNEL:
        tape.kernel("aten::mul", seconds, 4, stream)
    elif what is Kind.COPY:
        tape.copy("to_host", seconds, stream)
    elif what is Kind.HOST_WORK:
        tape.host_work("hook")
    elif what is Kind.WAIT_COLLECTIVES:
        tape.events.append(Event(what, -1, 0, Category.TEMPORARY, stream))
    elif what is Kind.WAIT_STREAM:
        tape.wait_stream(stream, other)
    elif what is Kind.SYNCHRONIZE:
        tape.synchronize(stream)


@settings(max_examples=300, deadline=None)
@given(logs(), st.sampled_from((0.0, 0.5)))
def test_both_schedulers_agree(events: list[Event], launch: float) -> None:
    rates = Halved(memory=1.0, network=1.0, launch_seconds=launch, hook_seconds=0.25)
    spans = [(span.begin, span.end) for span in run(events, rates, with_spans=True).spans]
    assert spans == [pytest.approx(span, abs=1e-6) for span in ByEvent(launch, 0.25).run(events)]


def test_a_copy_on_the_compute_stream_is_not_slowed_down() -> None:
    """Five seconds beside a collective are five seconds: a copy engine needs no multiprocessor."""
    tape = Tape()
    tape.collective("all_gather", "shard", 4, Stream.ALL_GATHER)
    tape.copy("to_host", 5, Stream.COMPUTE)
    assert run(tape.events, Halved(memory=1.0, network=1.0)).step_seconds == 5.0


def test_a_wait_is_for_the_collectives_that_were_started_before_it() -> None:
    """The first of two starts behind a copy and ends last: the wait between both is for it, not for whichever ends."""
    tape = Tape()
    tape.copy("to_host", 5, Stream.ALL_REDUCE)
    tape._issue(Kind.START_COLLECTIVE, Work("all_reduce", 2, group="world"), Stream.ALL_REDUCE)
    tape.wait_for_collectives()
    tape._issue(Kind.START_COLLECTIVE, Work("all_reduce", 2, group="shard"), Stream.ALL_GATHER)
    tape.kernel("aten::mul", 1, 4)
    spans = run(tape.events, Halved(memory=1.0, network=1.0), with_spans=True).spans
    assert [(span.begin, span.end) for span in spans] == [(0, 5), (5, 7), (0, 2), (7, 8)]
