"""Several ranks whose steps wait for each other, against schedules of pipelines worked out by hand."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.replay.schedule import StepTime
from fsdp_bench.replay.step_parts import StepPart
from fsdp_bench.replay.together import Meeting, RankLog, run_together
from fsdp_bench.simulate.events import Event, Kind, Work


@dataclass
class BytesAreSeconds:
    """Everything takes as many seconds as it has bytes; the host launches at once."""

    source: str = "test"
    blocks_host: bool = False
    launch_seconds: float = 0.0

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float:
        return float(work.num_bytes)

    collective = copy = host = run


@dataclass
class Rank:
    """Writes the step of one rank."""

    number: int
    events: list[Event] = field(default_factory=list)
    meetings: list[list[Meeting]] = field(default_factory=list)
    num_started: int = 0

    def compute(self, seconds: int) -> None:
        self.events.append(Event(Kind.KERNEL, -1, work=Work("op", seconds)))

    def batch(
        self, *messages: tuple[str, int, object], seconds: int = 0, group: str = "pp", waits: bool = True
    ) -> None:
        """Send and receive (``send`` or ``recv``, the other rank, a name), and wait for all."""
        found = [Meeting(name, frozenset({self.number, other})) for _, other, name in messages]
        work = Work("send_recv", seconds, tuple(other for _, other, _ in messages), group=group)
        self.events.append(Event(Kind.START_COLLECTIVE, len(self.meetings), work=work))
        self.meetings.append(found)
        self.num_started += 1
        if waits:
            self.events.append(Event(Kind.WAIT_COLLECTIVES, self.num_started - 1))

    def collective(self, seconds: int, ranks: set[int], name: str) -> None:
        self.events.append(Event(Kind.COLLECTIVE, len(self.meetings), work=Work("all_reduce", seconds, group="world")))
        self.meetings.append([Meeting(name, frozenset(ranks))])


def run_ranks(ranks: list[Rank]) -> dict[int, StepTime] | None:
    return run_together({one.number: RankLog(one.events, one.meetings, BytesAreSeconds()) for one in ranks})


def step_seconds(ranks: list[Rank]) -> float:
    found = run_ranks(ranks)
    assert found is not None
    seconds = {time.step_seconds for time in found.values()}
    assert len(seconds) == 1
    return seconds.pop()


def test_a_receive_waits_until_the_other_rank_has_sent() -> None:
    first, second = Rank(0), Rank(1)
    first.compute(3)
    first.batch(("send", 1, "x"), seconds=2)
    second.compute(1)
    second.batch(("recv", 0, "x"), seconds=2)
    second.compute(4)
    assert step_seconds([first, second]) == 3 + 2 + 4


def test_a_collective_begins_when_the_last_rank_has_come_to_it() -> None:
    ranks = [Rank(number) for number in range(3)]
    for one in ranks:
        one.compute(1 + one.number)
        one.collective(2, {0, 1, 2, 3}, "norm")  # rank 3 is as early as the others
    assert step_seconds(ranks) == 3 + 2


def test_two_ranks_that_send_to_each_other_in_one_batch_do_not_wait_for_ever() -> None:
    ranks = [Rank(0), Rank(1)]
    for one in ranks:
        other = 1 - one.number
        one.batch(("send", other, ("from", one.number)), ("recv", other, ("from", other)), seconds=5)
    assert step_seconds(ranks) == 5


def test_ranks_that_wait_for_each_other_for_ever_have_no_time() -> None:
    first, second = Rank(0), Rank(1)
    first.batch(("recv", 1, "a"))
    first.batch(("send", 1, "b"))
    second.batch(("recv", 0, "b"))
    second.batch(("send", 0, "a"))
    assert run_ranks([first, second]) is None


def test_messages_to_ranks_that_are_not_looked_at_take_their_own_time() -> None:
    alone = Rank(0)
    alone.batch(("recv", 1, "x"), seconds=2)
    alone.compute(1)
    assert step_seconds([alone]) == 3


# -- pipelines: torch/distributed/pipelining/schedules.py issues the batches in this order -----------------------------


def gpipe(stage: int, stages: int, micro_batches: int, forward: int, backward: int) -> Rank:
    """All forwards, then all backwards."""
    one = Rank(stage)
    for number in range(micro_batches):
        if stage:
            one.batch(("recv", stage - 1, ("F", stage, number)))
        one.compute(forward)
        if stage < stages - 1:
            one.batch(("send", stage + 1, ("F", stage + 1, number)), waits=False)
    for number in range(micro_batches):
        if stage < stages - 1:
            one.batch(("recv", stage + 1, ("B", stage, number)))
        one.compute(backward)
        if stage:
            one.batch(("send", stage - 1, ("B", stage - 1, number)), waits=False)
    return one


def one_f_one_b(stage: int, stages: int, micro_batches: int, forward: int, backward: int) -> Rank:
    """Schedule1F1B: as many forwards as stages follow, then one backward and one forward in turn."""
    one, warm_up = Rank(stage), min(micro_batches, stages - stage)

    def message(kind: str, way: str, number: int) -> list[tuple[str, int, object]]:
        to = stage + 1 if (kind, way) in (("F", "send"), ("B", "recv")) else stage - 1
        named = to if way == "send" else stage
        return [(way, to, (kind, named, number))] if 0 <= to < stages else []

    def batch(*messages: list[tuple[str, int, object]]) -> None:
        if joined := [each for some in messages for each in some]:
            one.batch(*joined)

    for number in range(warm_up):
        batch(message("F", "recv", number))
        one.compute(forward)
        if number < warm_up - 1:
            batch(message("F", "send", number))
    forwards = warm_up
    for number in range(micro_batches):
        batch(
            message("F", "send", forwards - 1) if number <= micro_batches - warm_up else [],
            message("B", "recv", number),
        )
        one.compute(backward)
        has_forward = forwards < micro_batches
        batch(message("B", "send", number), message("F", "recv", forwards) if has_forward else [])
        if has_forward:
            one.compute(forward)
            forwards += 1
    return one


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 2), (4, 4), (4, 8), (3, 7)])
def test_the_bubble_of_equal_stages_is_that_of_the_papers(schedule: object, stages: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1) of the step: Huang and others, GPipe, 2019; Narayanan and others, PipeDream-2BW, 2021."""
    forward, backward = 3, 5
    ranks = [schedule(stage, stages, micro_batches, forward, backward) for stage in range(stages)]  # type: ignore[operator]
    found = step_seconds(ranks)
    work = micro_batches * (forward + backward)
    bubble = (stages - 1) / (micro_batches + stages - 1)
    assert 1 - work / found == pytest.approx(bubble)
    times = run_ranks(ranks)
    assert times is not None
    for time in times.values():
        assert time.parts.get(StepPart.WAITING_FOR_RANKS, 0.0) == pytest.approx(bubble * found)


@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_a_pipeline_takes_the_longest_path_of_what_depends_on_each_other(
    data: st.DataObject, stages: int, micro_batches: int
) -> None:
    """Each message has a communicator of its own here: nothing but the stages' order and their data is waited for."""
    seconds = data.draw(
        st.lists(st.integers(0, 9), min_size=2 * stages * micro_batches, max_size=2 * stages * micro_batches)
    )
    sent = data.draw(st.integers(0, 3))
    takes = iter(seconds)
    ranks, ends = [Rank(stage) for stage in range(stages)], dict[tuple[str, int, int], int]()
    free = [0] * stages

    def step(kind: str, stage: int, number: int) -> None:
        before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        one, begin, duration = ranks[stage], free[stage], next(takes)
        if 0 <= before < stages:
            one.batch(("recv", before, (kind, stage, number)), seconds=sent, group=f"{kind} {stage} {number}")
            begin = max(free[stage], ends[kind, before, number]) + sent
        one.compute(duration)
        free[stage] = ends[kind, stage, number] = begin + duration
        if 0 <= after < stages:
            one.batch(
                ("send", after, (kind, after, number)), seconds=sent, group=f"{kind} {after} {number}", waits=False
            )

    for number in range(micro_batches):
        for stage in range(stages):
            step("F", stage, number)
    for number in range(micro_batches):
        for stage in reversed(range(stages)):
            step("B", stage, number)
    assert step_seconds(ranks) == max(free)
