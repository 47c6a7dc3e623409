"""The quantity of which the largest value that fits a script is searched: ``batch=1..512``, ``seq=512..65536:512``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_bench.plan.script.template import PLACEHOLDER
from fsdp_bench.plan.script.variants import COUNTS
from fsdp_bench.plan.search.quantity import LARGEST_BATCH, LONGEST_SEQUENCE, MOST_GPUS, SEQUENCE_STEP
from fsdp_bench.spec.errors import SpecError, nearest, shown

_BATCHES, _SEQUENCES = (1, LARGEST_BATCH, 1), (SEQUENCE_STEP, LONGEST_SEQUENCE, SEQUENCE_STEP)
USUAL_RANGES = {
    **dict.fromkeys(("batch", "bs", "mbs", "batch_size", "micro_batch", "micro_batch_size"), _BATCHES),
    **dict.fromkeys(("seq", "seq_len", "seqlen", "seq_length", "sequence_length", "max_length"), _SEQUENCES),
    "nodes": (1, MOST_GPUS // 8, 1),
}
"""Ranges of names that say what they are: first, last, step."""

MOST_VALUES = 100_000


@dataclass(frozen=True)
class ScriptQuantity:
    """A placeholder, or an option of numbers such as ``nodes``, whose border is searched."""

    name: str
    values: tuple[int, ...]
    """In the order of increasing memory."""

    @property
    def is_fewest(self) -> bool:
        """Whether memory falls as the value grows, so that the smallest is searched: the fewest nodes."""
        return self.values[0] > self.values[-1]

    @property
    def sizes(self) -> list[float]:
        """The size that memory grows with, for each value: the value, or the part that each of the GPUs holds."""
        return [1 / value for value in self.values] if self.is_fewest else list(map(float, self.values))


def read_quantity(text: str) -> ScriptQuantity:
    """Read ``batch``, ``batch=1..512`` or ``seq=512..65536:512``; ``tp=8..1`` if memory falls as the value grows.

    Raises SpecError for a name without a usual range, and for a range of fewer than two values.
    """
    name, equals, given = text.partition("=")
    name = name.strip()
    match = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*(?::\s*(\d+))?\s*", given)
    if not re.fullmatch(r"[A-Za-z_]\w*", name) or (equals and match is None):
        raise SpecError(f"of: {shown(text)} is not allowed; NAME=FIRST..LAST or NAME=FIRST..LAST:STEP")
    if match is not None:
        first, last, step = (int(part or 1) for part in match.groups())
    elif name in USUAL_RANGES:
        first, last, step = USUAL_RANGES[name]
    else:
        close = nearest(name, USUAL_RANGES)
        raise SpecError(f"of: {name} has no usual range{close}; say it: --of {name}=1..64, or 1..64:2 for a step")
    low, high = sorted((first, last))
    if low < 1 or step < 1 or not 1 <= (high - low) // step < MOST_VALUES:
        raise SpecError(f"of: {shown(text)} is not allowed; 2 to {MOST_VALUES:,} values, 1 or more")
    values = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return ScriptQuantity(name, tuple(sorted(values, reverse=True) if name in COUNTS else values))


def check_use(quantities: Sequence[ScriptQuantity], texts: Sequence[str]) -> None:
    """Refuse a quantity that is no placeholder of a command, and no option. Raises SpecError, naming it."""
    used = {match[1] for text in texts for match in PLACEHOLDER.finditer(text) if match[1]}
    for one in quantities:
        if one.name not in used and one.name not in COUNTS:
            raise SpecError(
                f"of: {{{one.name}}} is nowhere in the command, --env or --edit{nearest(one.name, used)}; write it in"
                " the place of the value"
            )
