"""largest_value(): the largest value of a placeholder with which a script fits, or the fewest nodes."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fsdp_bench.plan.script.border import Border, Tried
from fsdp_bench.plan.script.each import answered_document, answered_row
from fsdp_bench.plan.script.kept import KeptReports
from fsdp_bench.plan.script.quantity import ScriptQuantity, check_use, read_quantity
from fsdp_bench.plan.script.rehearsals import Answered, Rehearsals
from fsdp_bench.plan.script.template import read_placeholder
from fsdp_bench.plan.script.variants import COUNTS, Combinations, Variant, read_combinations
from fsdp_bench.spec.errors import SpecError

MOST_LINES = 16
"""The most values of the first quantity of a frontier of which all are taken; of more, each is twice the last."""


@dataclass(frozen=True)
class LargestValue:
    """The border for one combination of all else: the largest value that fits, and the next that does not."""

    quantity: ScriptQuantity
    values: Mapping[str, str]
    """The other placeholders and options of which there are several values."""
    tried: Mapping[int, Answered]
    """The answers by value, in the order of increasing memory."""
    largest: int | None
    next: int | None
    is_found: bool
    """Whether nothing between the two is left to be rehearsed. False if the search was interrupted, or if the script
    fails with too many values."""
    is_uneven: bool
    """Whether something fits that is larger than something that does not."""

    @property
    def refused(self) -> list[int]:
        """The values of which it is unknown whether they fit."""
        return [value for value, one in self.tried.items() if one.fits is None]

    @property
    def fits(self) -> bool | None:
        """Whether any value fits; None if that is unknown."""
        return True if self.largest is not None else False if self.next is not None and self.is_found else None

    @property
    def shown(self) -> Answered:
        """The answer of the largest that fits; if none does, of the next, or of the first."""
        value = self.next if self.largest is None else self.largest
        return next(iter(self.tried.values())) if value is None else self.tried[value]

    def row(self) -> dict[str, Any]:
        """Return the answer as one row: the values, the largest, what it needs, the next and what that runs out of."""
        columns = ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds", "tokens_per_second_per_gpu", "mfu")
        at = {} if self.largest is None else answered_row(self.tried[self.largest])
        beyond = {} if self.next is None else answered_row(self.tried[self.next])
        return {
            **self.values,
            self.quantity.name: self.largest,
            "fits": self.fits,
            **{name: at.get(name) for name in columns},
            "next": self.next,
            **{f"next_{name}": beyond.get(name) for name in ("verdict", "peak_phase", "peak_step")},
            "is_found": self.is_found,
            "is_uneven": self.is_uneven,
            "num_rehearsed": len(self.tried),
            "reason": next((one.reason for one in self.tried.values() if one.reason), None),
        }


class _Search:
    """One search while it goes on."""

    def __init__(
        self, combinations: Combinations, chosen: Mapping[str, str], quantity: ScriptQuantity, near: float | None = None
    ) -> None:
        """``near``: where the border is expected; by default the two of the least memory are rehearsed first."""
        self._combinations, self._quantity, self.chosen = combinations, quantity, chosen
        last = len(quantity.values) - 1
        first = last - 1 if quantity.is_fewest else 0
        if near is not None:
            first = min(max(sum(size <= near for size in quantity.sizes) - 1, 0), last - 1)
        self._border, self._limit_bytes = Border(quantity.sizes, (first, first + 1)), 0
        self._answers: dict[int, Answered] = {}

    def wanted(self) -> list[tuple[int, Variant]]:
        """Return what to rehearse next, by its index."""
        values = self._quantity.values
        return [
            (index, self._combinations.variant({**self.chosen, self._quantity.name: str(values[index])}))
            for index in self._border.wanted(self._limit_bytes)
        ]

    def learn(self, index: int, one: Answered) -> None:
        """Take the answer to one value."""
        self._answers[index], worst = one, one.worst
        self._border.tried[index] = Tried(one.fits, worst.report.peak_reserved_bytes if worst is not None else 0)
        self._limit_bytes = worst.most_reserved_bytes if worst is not None else self._limit_bytes

    @property
    def found(self) -> LargestValue:
        """The answer as far as it is known."""
        values, border = self._quantity.values, self._border
        several = {name for name, given in self._combinations.values.items() if len(given) > 1}
        return LargestValue(
            self._quantity,
            {name: value for name, value in self.chosen.items() if name in several},
            {values[index]: one for index, one in sorted(self._answers.items())},
            None if border.largest is None else values[border.largest],
            None if border.next is None else values[border.next],
            border.is_found,
            border.is_uneven,
        )

    @property
    def next_near(self) -> float | None:
        """The size of the largest that fits, if one does."""
        return None if self._border.largest is None else self._quantity.sizes[self._border.largest]


class LargestSearch:
    """The search for every combination of placeholders, hardware and strategies; of two quantities the frontier."""

    def __init__(self, combinations: Combinations, quantities: Sequence[ScriptQuantity]) -> None:
        self.quantities, self._combinations, self._searches = tuple(quantities), combinations, list[_Search]()

    @property
    def found(self) -> list[LargestValue]:
        """The answers in the order of the combinations, and what an interrupted search knows."""
        return [one.found for one in self._searches if one.found.tried]

    def run(self, progress: Callable[[Answered], None] = lambda one: None) -> None:
        """Rehearse what the answers need; call ``progress`` with each rehearsal.

        Raises SpecError if nothing can be rehearsed, MachineError without a CUDA build of torch or a C compiler. After
        a KeyboardInterrupt the same search goes on where this one ended.
        """
        *of_lines, quantity = self.quantities
        names = {one.name for one in self.quantities}
        others = {name: values for name, values in self._combinations.values.items() if name not in names}
        open_ones = [dict(zip(others, chosen, strict=True)) for chosen in product(*others.values())]
        question = ["largest", self.quantities, self._combinations.script.command.words, others]
        with Rehearsals(KeptReports(question)) as rehearsals:
            if not of_lines:
                self._answer([_Search(self._combinations, one, quantity) for one in open_ones], rehearsals, progress)
                return
            near = list[float | None]([None] * len(open_ones))
            line, values = of_lines[0], _spread(of_lines[0].values)
            for value, following in zip(values, [*values[1:], values[-1]], strict=True):
                searches = [
                    _Search(self._combinations, {**one, line.name: str(value)}, quantity, at)
                    for one, at in zip(open_ones, near, strict=True)
                ]
                self._answer(searches, rehearsals, progress)
                going_on = [place for place, one in enumerate(searches) if one.found.fits is not False]
                factor = 1.0 if line.is_fewest else value / following  # as many tokens in all
                sizes = [searches[place].next_near for place in going_on]
                near = [None if size is None else size * factor for size in sizes]
                open_ones = [open_ones[place] for place in going_on]

    def _answer(
        self, searches: Sequence[_Search], rehearsals: Rehearsals, progress: Callable[[Answered], None]
    ) -> None:
        is_first = not self._searches
        self._searches += searches
        while asked := [(one, index, variant) for one in searches for index, variant in one.wanted()]:
            variants = [variant for _, _, variant in asked]
            if is_first and all(one.refused is not None for one in variants):
                raise SpecError(variants[0].refused)
            places = {id(variant): (one, index) for one, index, variant in asked}
            is_first = False

            def learn(found: Answered, places: Mapping[int, tuple[_Search, int]] = places) -> None:
                search, index = places[id(found.variant)]
                search.learn(index, found)
                progress(found)

            rehearsals.answer(variants, learn)


def _spread(values: Sequence[int]) -> list[int]:
    """Return all values if there are at most MOST_LINES; else such that each is at least twice or half the last."""
    found = [values[0]]
    for value in values[1:]:
        if len(values) <= MOST_LINES or not found[-1] / 2 < value < 2 * found[-1]:
            found.append(value)
    return found


def read_search(
    command: str | Sequence[str],
    of: str | Sequence[str],
    each: Mapping[str, Sequence[object]] | Sequence[str] = (),
    **options: Any,
) -> LargestSearch:
    """Check what is asked for, as ``largest_value`` takes it. Raises SpecError for values that are not allowed."""
    quantities = [read_quantity(text) for text in ([of] if isinstance(of, str) else of)]
    names = [one.name for one in quantities]
    if len(set(names)) < len(names) or len(names) not in (1, 2):
        raise SpecError(f"of: {', '.join(names) or 'nothing'} is not allowed; one quantity, or two that differ")
    words = shlex.split(command) if isinstance(command, str) else list(command)
    check_use(quantities, [*words, *options.get("env", ()), *options.get("edit", ())])
    given = each if isinstance(each, Mapping) else [read_placeholder(text).name for text in each]
    for name in names:
        if name in given or options.get(name) is not None:
            option = "each" if name in given else name.replace("_", "-")
            raise SpecError(f"of: {name} is what is searched; leave out its --{option}")
    searched = {one.name: tuple(map(str, one.values)) for one in quantities}
    options |= {name: values for name, values in searched.items() if name in COUNTS}
    placeholders = {name: values for name, values in searched.items() if name not in COUNTS}
    texts = [f"{name}={','.join(values)}" for name, values in placeholders.items()]
    every = {**each, **placeholders} if isinstance(each, Mapping) else [*each, *texts]
    return LargestSearch(read_combinations(words, every, **options), quantities)


def largest_value(
    command: str | Sequence[str],
    of: str | Sequence[str],
    each: Mapping[str, Sequence[object]] | Sequence[str] = (),
    progress: Callable[[Answered], None] = lambda one: None,
    **options: Any,
) -> list[LargestValue]:
    """Find the largest value with which a training command fits: ``largest_value("train.py --bs {batch}", "batch")``.

    Args:
        command: the command, with ``{batch}`` where the value goes.
        of: the placeholder: ``batch``, ``seq``, ``batch=1..512``, ``seq=512..65536:512``; or ``nodes``, the fewest of a
            server. Two give the frontier: for each value of the first the largest of the second.
        each: the values of other placeholders; each combination has its own answer.
        progress: called with each rehearsal once it is there.
        options: those of ``rehearse``.

    Returns:
        An answer for each combination. ``pandas.DataFrame(one.row() for one in largest_value(...))`` is a table. What
        fits and the next value that does not are both rehearsed (``tried``).

    Raises:
        SpecError: for values that are not allowed.
        MachineError: if the command's Python has no CUDA build of torch, or there is no C compiler.
    """
    search = read_search(command, of, each, **options)
    search.run(progress)
    return search.found


def largest_document(search: LargestSearch) -> dict[str, Any]:
    """Return the JSON form: each answer with all that was rehearsed for it."""
    return {
        "source": "rehearsed",
        "of": [one.name for one in search.quantities],
        "searches": [
            {
                "values": dict(one.values),
                "largest": one.largest,
                "next": one.next,
                "fits": one.fits,
                "is_found": one.is_found,
                "is_uneven": one.is_uneven,
                "rehearsals": [{"value": value, **answered_document(each)} for value, each in one.tried.items()],
            }
            for one in search.found
        ],
    }
