"""gate(): whether a script still fits and needs no more memory than its baseline and a limit."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from fsdp_bench.plan.compare.difference import Difference
from fsdp_bench.plan.compare.scripts import ScriptComparison, ScriptSide
from fsdp_bench.spec.errors import ExitCode, SpecError, shown
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOutcome
from fsdp_bench.spec.units import parse_bytes

DEFAULT_LIMIT = "1%"


def limit_bytes(limit: str, baseline_bytes: float = 0) -> float:
    """Return by how much a peak may grow: a size, or a percentage of the baseline.

    Raises SpecError for another text.
    """
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
