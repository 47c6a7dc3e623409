"""compare(): what differs between two setups or results, in the setup, in bytes and in seconds. All is B less A."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from fsdp_bench.plan.compare.difference import (
    Difference,
    FieldDifference,
    differences,
    in_bytes,
    in_seconds,
    largest_first,
    numbers,
)
from fsdp_bench.plan.compare.scripts import Script, ScriptComparison, is_script, read_script
from fsdp_bench.plan.compare.side import PARTS, Comparable, Side, read_side
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import FIELDS
from fsdp_bench.spec.units import format_gib, format_seconds

SHARD_GROUP_SIZE = "shard_group_size"
"""Compared instead of ``shard_size``, which may be left out."""
REST = "rest_seconds"
"""The time of a step beside operators and exposed communication."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two setups or results, and their differences: B less A, the largest first."""

    a: Side
    b: Side

    def __repr__(self) -> str:
        peaks = [f"{one.name} {format_gib(one.a)}, {format_gib(one.b)}" for one in self.peaks if one.a or one.b]
        times = [f"a step {format_seconds(self.step.a)}, {format_seconds(self.step.b)}"] if self.step else []
        sources = f"A {self.a.reached}, B {self.b.reached}"
        return f"Comparison({sources}: {'; '.join([*peaks, *times])})"

    @cached_property
    def fields(self) -> tuple[FieldDifference, ...]:
        """The fields that differ: model, hardware, setup."""
        a, b = _conditions(self.a), _conditions(self.b)
        names = dict.fromkeys((*a, *b))
        if self.a.shape is not None and self.a.shape == self.b.shape:
            names.pop("model")  # under two names
        return tuple(FieldDifference(n, a.get(n), b.get(n)) for n in names if a.get(n) != b.get(n))

    @cached_property
    def known_fields(self) -> tuple[FieldDifference, ...]:
        """The fields that differ and that both sides know."""
        return tuple(one for one in self.fields if one.name in SETUP or None not in (one.a, one.b))

    @cached_property
    def peaks(self) -> tuple[Difference, ...]:
        """Peaks of the kinds that both sides have, each compared with its own kind alone."""
        return tuple(Difference(kind, size, self.b.peaks[kind]) for kind, size in self.a.peaks.items()
                     if kind in self.b.peaks)  # fmt: skip

    @cached_property
    def categories(self) -> tuple[Difference, ...] | None:
        """Bytes at the peak by category; they add up to the difference of the peaks. None if one side's are unknown."""
        if self.a.breakdown is None or self.b.breakdown is None:
            return None
        return differences(self.a.breakdown, self.b.breakdown)

    @cached_property
    def phases(self) -> tuple[Difference, ...]:
        """Peak allocated by phase, in the order of the phases."""
        return tuple(Difference(n, size, self.b.phases[n]) for n, size in self.a.phases.items() if n in self.b.phases)

    @cached_property
    def step(self) -> Difference | None:
        """Seconds of a step. None if one side's are unknown."""
        a, b = (side.times.get("step_seconds") for side in (self.a, self.b))
        return None if a is None or b is None else Difference("step_seconds", a, b)

    @cached_property
    def parts(self) -> tuple[Difference, ...]:
        """Seconds by part of a step: operators, exposed communication, the rest; the parts add up to the step."""
        if self.step is None or not all(part in side.times for side in (self.a, self.b) for part in PARTS):
            return ()
        return differences(_parts(self.a), _parts(self.b))

    @cached_property
    def other_times(self) -> tuple[Difference, ...]:
        """Seconds of work that may run beside other work: all collectives, copies, the optimizer on the CPU."""
        names = [name for name in self.a.times if name in self.b.times and name != "step_seconds"]
        shown = [name for name in names if not (self.parts and name in PARTS)]
        found = (Difference(name, self.a.times[name], self.b.times[name]) for name in shown)
        return largest_first(one for one in found if one.a or one.b)

    @cached_property
    def tokens(self) -> Difference | None:
        """Tokens a second on a GPU. None if one side's are unknown."""
        a, b = self.a.tokens_per_second_per_gpu, self.b.tokens_per_second_per_gpu
        return None if a is None or b is None else Difference("tokens_per_second_per_gpu", a, b)

    @property
    def is_same_setup(self) -> bool:
        """Whether both are of one model and one setup, so that their numbers are of the same thing."""
        names = (*SETUP, SHARD_GROUP_SIZE, "model", "gpu", "kernels")
        return not any(one.name in names for one in self.known_fields)

    @property
    def is_equal(self) -> bool:
        """Whether nothing that both sides know differs."""
        numbers = (*self.peaks, *self.phases, *(self.categories or ()), *self.parts, *self.other_times)
        one_source = (self.a.source, self.a.peaks.keys()) == (self.b.source, self.b.peaks.keys())
        return one_source and not self.fields and not any(number.difference for number in numbers)


def compare(a: Comparable | Script, b: Comparable | Script) -> Comparison | ScriptComparison:
    """Compare two setups, results or scripts: ``compare(estimate(...), "a.json")``, ``compare("a.json", "b.json")``.

    Args:
        a: the path or content of a document of ``predict --json`` or ``dry-run --json``, of which ``FILE#2`` is the
            second of several; the path or content of a trial's record; or what ``estimate()`` returned. For a script
            the path of a document of ``rehearse --json``, or what ``rehearse_command()`` returned for one rank.
        b: the same.

    Raises:
        SpecError: for anything else, for what has no numbers to compare, and for a script against what is none.
    """
    scripts = [is_script(one) for one in (a, b)]
    if all(scripts):
        return ScriptComparison(*(read_script(one, name) for one, name in ((a, "A"), (b, "B"))))  # type: ignore[arg-type]
    if any(scripts):
        raise SpecError(f"{'AB'[scripts.index(False)]}: is no rehearsal of a script, and the other one is")
    return Comparison(*(read_side(one, name) for one, name in ((a, "A"), (b, "B"))))  # type: ignore[arg-type]


SETUP = tuple(name for name, one in FIELDS.items() if one.of_step and name != "shard_size")
"""Fields of the setup that both sides always know."""


def _conditions(side: Side) -> Mapping[str, Any]:
    fields = to_builtins(side.setup)
    setup = {name: fields[name] for name in SETUP}
    return {"model": side.model, **side.facts, **setup, SHARD_GROUP_SIZE: side.setup.shard_group_size}


def _parts(side: Side) -> dict[str, float]:
    parts = {name: side.times[name] for name in PARTS}
    return {**parts, REST: side.times["step_seconds"] - sum(parts.values())}


# -- The JSON form: bytes and seconds, all differences B less A; unknown values are null -------------------------------


def document(found: Comparison, answer: str, why: Sequence[Any]) -> dict[str, Any]:
    """Return the JSON form of a comparison, with its answer in one sentence, and the reasons (``reasons()``)."""
    return {
        "answer": answer,
        "is_equal": found.is_equal,
        "a": _side(found.a),
        "b": _side(found.b),
        "fields": [asdict(one) for one in found.fields],
        "memory": {
            "peaks": in_bytes(found.peaks),
            "categories": None if found.categories is None else in_bytes(found.categories),
            "phases": in_bytes(found.phases),
        },
        "time": {
            "step": None if found.step is None else in_seconds((found.step,))[0],
            "parts": in_seconds(found.parts),
            "others": in_seconds(found.other_times),
            "tokens_per_second_per_gpu": None if found.tokens is None else numbers(found.tokens, ""),
        },
        "why": [asdict(one) for one in why],
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        **{name: getattr(side, name) for name in ("name", "source", "reserved_source", "model", "peak_phase")},
        "peak_operator": side.peak_place,
        **{name: getattr(side, name) for name in ("verdict", "stopped", "collectives")},
    }
