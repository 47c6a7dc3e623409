"""ScriptComparison: two rehearsals, in bytes by line and seconds by operator. Gate: a script against its baseline."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fsdp_bench.plan.compare.difference import Difference, FieldDifference, differences, in_bytes, in_seconds, numbers
from fsdp_bench.plan.compare.lines import LineDifference, line_differences, portable
from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.plan.rehearsal_document import RehearsalDocument, is_rehearsal, read_rehearsals, rehearsal_document
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import ExitCode, SpecError, shown
from fsdp_bench.spec.files import read_document
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOutcome
from fsdp_bench.spec.units import parse_bytes

_OF_SERVER = ("gpu", "num_nodes", "gpus_per_node", "gpu_memory_bytes", "stated_power_watts")
_OF_RUN = ("command", "world_size", "rank", "num_steps", "torch", "cuda", "allocator_settings")


@dataclass(frozen=True)
class ScriptSide:
    """One of two rehearsals."""

    name: str
    found: RehearsalDocument
    """Files are as seen from the command's folder, so that those of two checkouts are the same."""

    @property
    def conditions(self) -> dict[str, Any]:
        """The conditions of the numbers beside the script."""
        server = {name: getattr(self.found.server, name) for name in _OF_SERVER}
        return {"server": self.found.server.name, **server, **{name: getattr(self.found, name) for name in _OF_RUN}}


@dataclass(frozen=True)
class ScriptComparison:
    """Two rehearsals of scripts, and their differences: B less A, the largest first."""

    a: ScriptSide
    b: ScriptSide

    @cached_property
    def fields(self) -> tuple[FieldDifference, ...]:
        """The conditions that differ."""
        a, b = self.a.conditions, self.b.conditions
        return tuple(FieldDifference(name, a[name], b[name]) for name in a if a[name] != b[name])

    @cached_property
    def peaks(self) -> tuple[Difference, ...]:
        """Peak allocated and reserved bytes."""
        sizes = [(one.found.memory.peak_allocated_bytes, one.found.memory.peak_reserved_bytes) for one in self._sides]
        return tuple(
            Difference(name, a, b)
            for name, a, b in zip(("allocated", "reserved"), *sizes, strict=True)
            if a is not None and b is not None
        )

    @cached_property
    def lines(self) -> tuple[LineDifference, ...]:
        """Bytes at the peak by line. Empty if one side's are unknown."""
        a, b = (one.found.memory.lines_at_peak for one in self._sides)
        return () if a is None or b is None else line_differences(a, b)

    @property
    def rest_bytes(self) -> int | None:
        """The part of the allocated peak's difference that no line holds: rounding by the allocator."""
        return int(self.peaks[0].difference - sum(one.difference for one in self.lines)) if self.lines else None

    @cached_property
    def phases(self) -> tuple[Difference, ...]:
        """Peak allocated by phase."""
        a, b = (one.found.memory.phases for one in self._sides)
        return tuple(Difference(name, size, b[name]) for name, size in a.items() if name in b)

    @cached_property
    def step(self) -> Difference | None:
        """Seconds of a step. None if one side's are unknown."""
        a, b = (one.found.time and one.found.time.step_seconds for one in self._sides)
        return Difference("step_seconds", a, b) if a and b else None

    @cached_property
    def parts(self) -> tuple[Difference, ...]:
        """Seconds of a step by operator, collective or copy; they may run at the same time."""
        a, b = (one.found.time for one in self._sides)
        if a is None or b is None:
            return ()
        return differences(*({part.name: part.seconds for part in time.parts} for time in (a, b)))

    @property
    def _sides(self) -> tuple[ScriptSide, ScriptSide]:
        return self.a, self.b

    @property
    def is_equal(self) -> bool:
        """Whether nothing that both sides know differs."""
        numbers = (*self.peaks, *self.phases, *self.lines, *self.parts)
        return not self.fields and not any(one.difference for one in numbers)


Script = str | Path | Rehearsal | RehearsalDocument


def is_script(value: object) -> bool:
    """Whether something to compare is a rehearsal: a file, an answer, or its document."""
    if isinstance(value, str | Path):
        return is_rehearsal(read_document(Path(str(value).partition("#")[0]), "JSON"))
    return isinstance(value, Rehearsal | RehearsalDocument)


def read_script(value: Script, name: str) -> ScriptSide:
    """Read a rehearsal; ``FILE#2`` is the second of a file's several ranks.

    Raises SpecError for another file, and for one of several ranks without a number.
    """
    if isinstance(value, Rehearsal):
        value = rehearsal_document(value)
    if isinstance(value, RehearsalDocument):
        return ScriptSide(name, _portable(value))
    file, has_number, number = str(value).partition("#")
    several = read_rehearsals(Path(file))
    if len(several) == 1 and not has_number:
        number = "1"
    if not number.isdecimal() or not 1 <= int(number) <= len(several):
        raise SpecError(f"{file}: holds {len(several)} rehearsals; name one: {file}#1 to {file}#{len(several)}")
    return ScriptSide(str(value), _portable(several[int(number) - 1]))


def _portable(found: RehearsalDocument) -> RehearsalDocument:
    def own(one: Any) -> Any:
        lines = {name: portable(getattr(one, name), found.folder) for name in ("line", "user_line")}
        return replace(one, **lines)

    held = found.memory.lines_at_peak
    memory = replace(found.memory, lines_at_peak=None if held is None else tuple(map(own, held)))
    return replace(found, memory=memory, failure=found.failure and own(found.failure))


def document(found: ScriptComparison, answer: str) -> dict[str, Any]:
    """Return the JSON form of a comparison, with its answer in one sentence; unknown values are null."""
    return {
        "answer": answer,
        "is_equal": found.is_equal,
        **{name: _side(one) for name, one in (("a", found.a), ("b", found.b))},
        "fields": [asdict(one) for one in found.fields],
        "memory": {
            "peaks": in_bytes(found.peaks),
            "lines": [
                {**sizes, "text": one.line and one.line.text, "before": to_builtins(one.before)}
                for one, sizes in zip(found.lines, in_bytes(found.lines), strict=True)
            ],
            "rest_bytes": found.rest_bytes,
            "phases": in_bytes(found.phases),
        },
        "time": {
            "step": None if found.step is None else numbers(found.step, "_seconds"),
            "parts": in_seconds(found.parts),
        },
    }


def _side(side: ScriptSide) -> dict[str, Any]:
    found = side.found
    own = {name: getattr(found, name) for name in ("source", "command", "outcome", "fits", "verdict")}
    return {"name": side.name, **own, "peak_phase": found.memory.peak_phase, "peak_step": found.memory.peak_step}


DEFAULT_LIMIT = "1%"


def limit_bytes(limit: str, baseline_bytes: float = 0) -> float:
    """Return how much a peak may grow: a size, or a percentage of the baseline. Raises SpecError for other text."""
    number, percent, rest = limit.partition("%")
    if not percent:
        return 0 if limit == "0" else parse_bytes(limit, "limit")
    if rest or not number.replace(".", "", 1).isdecimal():
        raise SpecError(f"limit: {shown(limit)} is not allowed; a percentage as 2%, or a size as 500MiB")
    return float(number) / 100 * baseline_bytes


class Status(StrEnum):
    """The verdict of a gate on one script, the worst first."""

    CRASHED = "crashed"
    DOES_NOT_FIT = "does not fit"
    """It does not fit, or only with allocation retries, and did before, or nothing is known of before."""
    UNKNOWN = "unknown"
    """It is not known any more whether it fits."""
    GREW = "grew"
    NEW = "new"
    """There is no baseline."""
    PASSES = "passes"

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a gate with this answer."""
        if self is Status.CRASHED:
            return ExitCode.CRASHED
        return ExitCode.DONE if self in (Status.NEW, Status.PASSES) else ExitCode.DOES_NOT_FIT


@dataclass(frozen=True)
class Gate:
    """A script now and, if there is one, its baseline."""

    now: ScriptSide
    before: ScriptSide | None
    limit: str = DEFAULT_LIMIT

    @cached_property
    def comparison(self) -> ScriptComparison | None:
        """The differences from the baseline."""
        return None if self.before is None else ScriptComparison(self.before, self.now)

    @cached_property
    def grown(self) -> tuple[Difference, ...]:
        """The peaks that grew by more than the limit. Peaks of a run that ran out of memory are not what it needs."""
        sides = self.now, self.before
        if any(one is None or one.found.outcome is RehearsalOutcome.OUT_OF_MEMORY for one in sides):
            return ()
        peaks = self.comparison.peaks if self.comparison else ()
        return tuple(one for one in peaks if one.difference > limit_bytes(self.limit, one.a))

    @property
    def status(self) -> Status:
        """The answer."""
        fits, fitted = self.now.found.fits, self.before.found.fits if self.before else None
        if self.now.found.outcome in (RehearsalOutcome.FAILED, RehearsalOutcome.TIMED_OUT):
            return Status.CRASHED
        if fits is False and not (self.before and fitted is False):
            return Status.DOES_NOT_FIT
        if fits is None and fitted is not None:
            return Status.UNKNOWN
        if self.grown:
            return Status.GREW
        return Status.PASSES if self.before else Status.NEW
