"""One cell of a frontier sweep: its prediction, the outcomes of its trials, and which candidate to try next.

Two limits are searched: first ``fits`` (the largest without allocation retries), then ``runs`` (the largest without
running out of memory). If the candidate above ``fits`` ran out of memory, as always on a CPU, both limits are the same
and the second search needs no trials. If that candidate ended with retries, larger candidates are searched in the same
way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from fsdp_bench.plan.search.fit import FitCheck
from fsdp_bench.plan.search.search import find_largest
from fsdp_bench.simulate.operators.kernels import CPU_EMULATED, CPU_GLOO
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.frontier import (
    FRONTIER_SCHEMA_VERSION,
    FirstFailure,
    FrontierCell,
    FrontierRecord,
    LargestValues,
    QuantityRange,
    Status,
)
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.sweep_file import SweepFile
from fsdp_bench.sweep.config.trial import SweepPlan
from fsdp_bench.sweep.frontier.file import Search


class SearchedCell:
    """One cell during its search: what is searched, the prediction, and the records of its trials so far."""

    def __init__(self, search: Search, predicted: Forecast, records: dict[int, TrialRecord]) -> None:
        self.search = search
        self.predicted = predicted
        self.records = records

    @property
    def next_index(self) -> int | None:
        """The candidate to try next. None if both limits are known, or cannot be found."""
        index = self._undecided
        return None if index in self.records else index

    @property
    def _undecided(self) -> int | None:
        """The candidate that the search needs next. It is not tried yet, or its trial gave no answer."""
        if self.search.skip_reason is not None:
            return None
        index, above = self._for_fits.next_index, self._for_runs
        return index if index is not None or above is None else above.next_index

    @property
    def _for_fits(self) -> Bracket:
        answers = {index: record.fits for index, record in self.records.items() if _is_answer(record)}
        return Bracket(len(self.search.quantity), self.predicted.fits, answers)

    @property
    def _for_runs(self) -> Bracket | None:
        """The second search. None unless the candidate above ``fits`` ended ``ok``, with allocation retries."""
        first, predicted = self.fits + 2, self.predicted.runs
        retried = self.records.get(first - 1)
        if retried is None or retried.outcome is not Outcome.OK:
            return None
        answers = {
            index: record.outcome is Outcome.OK
            for index, record in self.records.items()
            if _is_answer(record) and index >= first
        }
        predicted = None if predicted is None else max(predicted, first - 1)
        return Bracket(max(len(self.search.quantity), first), predicted, answers, first)

    @property
    def fits(self) -> int:
        """The largest index that is known to fit; -1 if none."""
        return self._for_fits.bounds[0]

    @property
    def runs(self) -> int:
        """The largest index that is known to run; -1 if none."""
        above = self._for_runs
        return self.fits if above is None else above.bounds[0]

    @property
    def smallest_oom_index(self) -> int | None:
        """The smallest candidate that ran out of memory. All larger ones are skipped."""
        return min((index for index, record in self.records.items() if _ran_out(record)), default=None)

    @property
    def status(self) -> Status:
        """The state of the search, as in FrontierCell."""
        if self.search.skip_reason is not None:
            return "skipped"
        index = self._undecided
        if index is None:
            return "found"
        return "unknown" if index in self.records else "not searched"

    @property
    def reason(self) -> str | None:
        """Why the answer is not found, or which candidates are skipped."""
        if self.search.skip_reason is not None:
            return self.search.skip_reason
        index = self._undecided
        if index is not None and index in self.records:
            record = self.records[index]
            why = " ".join((record.reason or "no reason").split())
            return f"{self.print(index)} ended {record.outcome.value}, which is no answer: {why}"
        if self.smallest_oom_index is None or self.smallest_oom_index + 1 == len(self.search.quantity):
            return self.predicted.why_not
        count = len(self.search.quantity) - self.smallest_oom_index - 1
        values = "1 value" if count == 1 else f"{count} values"
        return f"{values} skipped: larger than {self.print(self.smallest_oom_index)}, which ran out of memory"

    def print(self, index: int) -> str:
        """Return a candidate's value as text; ``none`` for -1."""
        if self.search.quantity.is_model_size and index >= 0:
            return self.search.quantity[index].model.name
        return self.quantity_range.print(self.value(index))

    def value(self, index: int) -> int:
        """Return the value at an index; 0 for -1."""
        return self.search.quantity.values[index] if index >= 0 else 0

    @property
    def quantity_range(self) -> QuantityRange:
        """The range of values, for the record."""
        values = self.search.quantity.values
        return QuantityRange(
            name=self.search.quantity.name, smallest=values[0], largest=values[-1], num_steps=len(values)
        )

    @property
    def start(self) -> str:
        """The beginning of the search, as text: ``from the middle``."""
        if self.predicted.fits is None:
            return f"from the middle ({self.predicted.why_not})"
        if self.predicted.fits < 0:
            return "from the smallest: not even that is predicted to fit"
        return f"from {self.print(self.predicted.fits)}, the largest that is predicted to fit"

    def record(self) -> FrontierCell:
        """Return the cell as ``frontier.json`` stores it."""
        search, status = self.search, self.status
        predicted = self.predicted
        return FrontierCell(
            label=search.label,
            setup=search.setup,
            quantity=self.quantity_range,
            family=search.model.family,
            vocab_size=search.model.vocab_size,
            model=None if search.quantity.is_model_size else search.model,
            status=status,
            reason=self.reason,
            predicted=None
            if predicted.fits is None or predicted.runs is None
            else self._largest_values(predicted.fits, predicted.runs, predicted.limited_by),
            measured=self._largest_values(self.fits, self.runs, self._first_failure()) if status == "found" else None,
            steps_apart=self.fits - predicted.fits if status == "found" and predicted.fits is not None else None,
            trials=tuple(self.records[index].id for index in sorted(self._for_fits.answers)),
            most_trials=self._for_fits.most_trials,
        )

    def _largest_values(self, fits: int, runs: int, limited_by: FirstFailure | None) -> LargestValues:
        return LargestValues(
            fits=self.value(fits),
            runs=self.value(runs),
            num_parameters=self.search.quantity[fits].model.num_parameters if fits >= 0 else 0,
            limited_by=limited_by,
        )

    def _first_failure(self) -> FirstFailure | None:
        """Return the memory that the candidate above ``fits`` exceeded, from its trial."""
        record = self.records.get(self.fits + 1)
        if record is None:
            return None
        failures = [rank.failure for rank in record.ranks if rank.failure and rank.outcome.is_oom]
        first = min(failures, key=lambda failure: failure.at, default=None)
        place = {"device": "gpu", "budget": "budget"}.get(first.limit or "" if first else "", "host")
        phase = first.phase if first else "unknown"
        if not _ran_out(record):
            memory = record.worst_rank_memory
            place, phase = "gpu", memory.peak_phase if memory else "unknown"
        return FirstFailure(
            value=self.value(self.fits + 1), place=place, phase=phase, ran_out=_ran_out(record), trial_id=record.id
        )


def _is_answer(record: TrialRecord) -> bool:
    return record.outcome is Outcome.OK or _ran_out(record)


def _ran_out(record: TrialRecord) -> bool:
    """Return whether a trial ran out of the memory whose limit is searched.

    On a CPU this is only the memory limit. If the host's memory ran out first, the limit remains untested.
    """
    if record.hardware != "cpu":
        return record.outcome.is_oom
    limits = [rank.failure.limit for rank in record.ranks if rank.failure]
    return record.outcome is Outcome.OOM_HOST and "budget" in limits


@dataclass(frozen=True)
class Bracket:
    """One search, as far as it is, for the largest index that fits (or runs); ``first - 1`` if none does."""

    num_candidates: int
    predicted: int | None
    """The predicted index. None: no prediction, the search begins in the middle."""
    answers: Mapping[int, bool]
    """By index: whether a candidate fits."""
    first: int = 0
    """The smallest index that is searched."""

    @property
    def most_trials(self) -> int:
        """The number of trials of a bisection: both ends, then the halvings."""
        return 2 + (self.num_candidates - 1).bit_length()

    @property
    def bounds(self) -> tuple[int, int]:
        """The largest index that is known to fit, and the smallest index that is known not to fit.

        An index that fits above one that does not is ignored.
        """
        high = min((index for index, fits in self.answers.items() if not fits), default=self.num_candidates)
        low = max((index for index, fits in self.answers.items() if fits and index < high), default=self.first - 1)
        return low, high

    @property
    def next_index(self) -> int | None:
        """The index to try next. None if the answer is known."""
        low, high = self.bounds
        if high - low <= 1:
            return None
        wanted = None
        if self.predicted is not None and low < self.predicted < high:
            wanted = self.predicted
        elif self.predicted is not None and low >= self.predicted and high == self.num_candidates:
            wanted = 2 * low - self.predicted + 1
        elif self.predicted is not None and high <= self.predicted and low == self.first - 1:
            wanted = 2 * high - self.predicted - 1
        return wanted if wanted is not None and low < wanted < high else (low + high) // 2


@dataclass(frozen=True)
class Forecast:
    """The predicted ``fits`` and ``runs`` of a cell. Both are None if nothing can be predicted."""

    fits: int | None
    runs: int | None
    limited_by: FirstFailure | None
    why_not: str | None = None
    """Why there is no prediction, in one line."""


@cache
def forecast(search: Search) -> Forecast:
    """Predict a cell's limits, with the memory limit of its trials. The answer is cached."""
    if search.skip_reason is not None:
        return Forecast(None, None, None)
    # a trial may fill the GPU: what context and NCCL take is not torch's to have
    check = FitCheck(headroom_bytes=0)
    if search.device == "cpu":
        kernels = CPU_EMULATED if search.run.emulate else CPU_GLOO
        check = FitCheck(kernels=kernels, budget_bytes=search.run.memory_limit_bytes)
    try:
        found = find_largest(search.quantity, check)
    except SpecError as error:
        return Forecast(None, None, None, f"no prediction: {error}")
    limit, above = found.limited_by, found.fits + 1
    if limit is None or above == len(search.quantity):
        return Forecast(found.fits, found.runs, None)
    place = "budget" if search.device == "cpu" else limit.place
    failure = FirstFailure(
        value=search.quantity.values[above], place=place, phase=limit.phase, ran_out=found.runs == found.fits
    )
    return Forecast(found.fits, found.runs, failure)


def cells_of(plan: SweepPlan[Search], records: Sequence[TrialRecord]) -> list[SearchedCell]:
    """Return every cell with its prediction and its records."""
    return [SearchedCell(search, forecast(search), _recorded(search, records)) for search in plan.cells]


def _recorded(search: Search, records: Sequence[TrialRecord]) -> dict[int, TrialRecord]:
    """Return the records of a cell's trials, by the index of their candidate."""
    indices = {value: index for index, value in enumerate(search.quantity.values)}
    found: dict[int, TrialRecord] = {}
    for record in records:
        index = indices.get(search.value_of(record.model, record.setup))
        if index is not None and search.trial(index).spec.id == record.id:
            found[index] = record
    return found


def frontier_record(file: SweepFile, cells: Sequence[SearchedCell], machine: str) -> FrontierRecord:
    """Return the record of a frontier sweep, frontier.json."""
    return FrontierRecord(
        schema_version=FRONTIER_SCHEMA_VERSION,
        sweep=file.name,
        source="rehearsed" if file.run.rehearsed_on else "measured",
        device=file.run.alone if file.run.alone == "rehearsed" else file.device,
        machine=machine,
        run=file.run,
        gpu_is_limited=file.gpu_is_limited,
        cells=tuple(cell.record() for cell in cells),
    )
