"""Effects of a cell's records on its search: retries, crashes, remembered sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.plan.question import Question
from fsdp_bench.plan.search.quantity import Quantity
from fsdp_bench.spec.rank_report import Failure, MemoryReading, Outcome, RankReport
from fsdp_bench.spec.record import Device, RunPlan, TrialRecord
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.sweep.frontier.cell import Bracket, Forecast, SearchedCell
from fsdp_bench.sweep.frontier.file import Search
from tests.shapes import shape
from tests.spec.test_record import record_with

SHAPE = shape(name="tiny", num_hidden_layers=1, max_position_embeddings=1024)
STEPS = 32


def a_search(device: Device = "cuda", skip_reason: str | None = None) -> Search:
    """Return a search of 1 to 32 layers."""
    setup = TrainSetup(sequence_length=16)
    layers = Quantity(
        "num_hidden_layers",
        range(1, STEPS + 1),
        lambda count: Question(replace(SHAPE, num_hidden_layers=count), setup, None),
    )
    return Search("a cell", layers, SHAPE, setup, RunPlan(), device, skip_reason)


def record_of(search: Search, index: int, outcome: Outcome, retries: int = 0, limit: str = "device") -> TrialRecord:
    """Return a record as a trial of that step would leave it."""
    spec = search.trial(index).spec
    memory = MemoryReading(
        peak_allocated_bytes=1, peak_phase="backward", phases={"backward": 1}, num_alloc_retries=retries
    )
    failure = None if outcome is Outcome.OK else Failure(message="m", phase="optimizer", at=1.0, limit=limit)
    return record_with(
        id=spec.id,
        device=spec.device,
        model=spec.model,
        num_parameters=spec.model.num_parameters,
        setup=spec.setup,
        run=spec.run,
        outcome=outcome,
        reason=None if outcome is Outcome.OK else "why",
        ranks=(RankReport(rank=0, outcome=outcome, memory=memory, failure=failure),),
    )


def answer(searched: SearchedCell, fits: int, runs: int) -> list[int]:
    """Search with a card on which ``fits`` and ``runs`` are the truth; return what was tried."""
    tried = []
    while (index := searched.next_index) is not None:
        outcome = Outcome.OK if index <= runs else Outcome.OOM_GPU
        searched.records[index] = record_of(searched.search, index, outcome, retries=0 if index <= fits else 7)
        tried.append(index)
    return tried


def test_trials_with_retries_run_but_do_not_fit_and_each_limit_takes_its_prediction_and_the_step_above() -> None:
    searched = SearchedCell(a_search(), Forecast(10, 14, None), {})
    assert answer(searched, 10, 14) == [10, 11, 14, 15]
    cell = searched.record()
    assert (cell.measured.fits, cell.measured.runs, cell.steps_apart) == (11, 15, 0)
    assert (cell.measured.limited_by.phase, cell.measured.limited_by.ran_out) == ("backward", False)
    assert cell.measured.num_parameters == searched.search.quantity[10].model.num_parameters


def test_where_the_step_above_runs_out_both_limits_are_the_same_without_further_trials() -> None:
    searched = SearchedCell(a_search(), Forecast(10, 14, None), {})
    assert answer(searched, 10, 10) == [10, 11]
    cell = searched.record()
    assert (cell.measured.fits, cell.measured.runs) == (11, 11)
    assert (cell.measured.limited_by.place, cell.measured.limited_by.phase) == ("gpu", "optimizer")
    assert cell.reason == "20 values skipped: larger than 12 layers, which ran out of memory"


@pytest.mark.parametrize("truth", [(-1, -1), (-1, 3), (0, 0), (31, 31), (5, 31), (20, 22)])
@pytest.mark.parametrize("predicted", [(None, None), (-1, -1), (3, 9), (31, 31)])
def test_both_limits_are_found_whatever_was_predicted(
    truth: tuple[int, int], predicted: tuple[int | None, int | None]
) -> None:
    searched = SearchedCell(a_search(), Forecast(*predicted, None), {})
    tried = answer(searched, *truth)
    assert (searched.fits, searched.runs) == truth
    assert len(tried) == len(set(tried))
    assert searched.status == "found"


def test_a_recorded_size_is_never_tried_again() -> None:
    first = SearchedCell(a_search(), Forecast(10, 12, None), {})
    answer(first, 10, 12)
    again = SearchedCell(a_search(), Forecast(10, 12, None), dict(first.records))
    assert again.next_index is None
    assert again.record() == first.record()


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.TIMEOUT])
def test_a_crash_or_a_hang_is_no_answer_and_stops_the_cell_with_the_reason(outcome: Outcome) -> None:
    search = a_search()
    searched = SearchedCell(search, Forecast(10, 10, None), {10: record_of(search, 10, outcome)})
    assert searched.next_index is None
    cell = searched.record()
    assert (cell.status, cell.measured, cell.trials) == ("unknown", None, ())
    assert cell.reason == f"11 layers ended {outcome.value}, which is no answer: why"


def test_on_a_cpu_the_hosts_own_memory_is_not_the_budget() -> None:
    search = a_search("cpu")
    for limit, status in (("budget", "not searched"), ("host", "unknown")):
        record = record_of(search, 10, Outcome.OOM_HOST, limit=limit)
        assert SearchedCell(search, Forecast(10, 10, None), {10: record}).status == status


def test_on_a_card_the_hosts_memory_that_offload_fills_is_a_limit_and_named() -> None:
    search = a_search("cuda")
    records = {10: record_of(search, 10, Outcome.OK), 11: record_of(search, 11, Outcome.OOM_HOST, limit="host")}
    cell = SearchedCell(search, Forecast(10, 10, None), records).record()
    assert cell.measured.limited_by.place == "host"


def test_a_cell_that_cannot_run_is_skipped_with_its_reason() -> None:
    searched = SearchedCell(a_search(skip_reason="no way"), Forecast(10, 10, None), {})
    assert searched.next_index is None
    assert (searched.record().status, searched.record().reason) == ("skipped", "no way")


def search(count: int, predicted: int | None, truth: int, answers: dict[int, bool] | None = None) -> list[int]:
    """Return the indices that were tried; the answer must be the truth."""
    known, tried = dict(answers or {}), []
    while (index := Bracket(count, predicted, known).next_index) is not None:
        assert index not in known
        known[index] = index <= truth
        tried.append(index)
    assert Bracket(count, predicted, known).bounds == (truth, truth + 1)
    return tried


@given(count=st.integers(1, 120), data=st.data())
@settings(max_examples=300)
def test_the_answer_is_right_whatever_was_predicted_and_soon_found(count: int, data: st.DataObject) -> None:
    indices = st.integers(-1, count - 1)
    truth, predicted = data.draw(indices), data.draw(st.none() | indices)
    tried = search(count, predicted, truth)
    assert len(tried) <= 2 * count.bit_length() + 2  # strides that double, then halvings


@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("predicted", [-1, 0, 1, 2, 7, 12, 26, 27, 28])
def test_a_prediction_that_is_right_takes_at_most_2_trials_and_one_that_is_a_step_off_4(
    predicted: int, off: int
) -> None:
    if -1 <= (truth := predicted + off) < 29:
        assert len(search(29, predicted, truth)) <= (4 if off else 2)


def test_nothing_above_a_step_that_failed_is_tried_or_believed() -> None:
    answers = {20: True, 10: False}  # 20 was tried before 10 was found to fail
    tried = search(30, 25, 4, answers)
    assert max(tried) < 10
