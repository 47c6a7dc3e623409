"""The parts of a step's time: they exclude each other and add up to the step.

At any time the step belongs to the operators that run; if none runs, to the collectives; then to copies to and from the
host; then to the optimizer that the host computes; then to waiting for other ranks. The rest is time in which the GPU
waits for the host.
"""

from collections.abc import Mapping
from enum import StrEnum

from fsdp_bench.simulate.events import Work

# -- Intervals of time: pairs of begin and end in seconds --------------------------------------------------------------

Intervals = list[tuple[float, float]]
"""Begin and end in seconds, in order."""


def union(spans: Intervals) -> Intervals:
    """Return spans without overlap, in order."""
    merged: Intervals = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(spans: Intervals) -> float:
    """Return the seconds of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def overlap(one: Intervals, other: Intervals) -> float:
    """Return the seconds that two lists of such spans share."""
    shared, index = 0.0, 0
    for begin, end in one:
        while index < len(other) and other[index][1] <= begin:
            index += 1
        position = index
        while position < len(other) and other[position][0] < end:
            shared += min(end, other[position][1]) - max(begin, other[position][0])
            position += 1
    return shared


class StepPart(StrEnum):
    """A part of a step's time; the keys of ``parts_seconds`` in ``predict --json``."""

    MATRIX_PRODUCTS = "matrix_products"
    ATTENTION = "attention"
    OTHER_OPERATORS = "other_operators"
    """Norms, activations, casts, copies within the GPU, losses."""
    OPTIMIZER = "optimizer"
    """On the GPU."""
    EXPOSED_COMMUNICATION = "exposed_communication"
    EXPOSED_COPIES = "exposed_copies"
    """Copies to and from the host, while neither operators nor collectives run."""
    CPU_OPTIMIZER = "cpu_optimizer"
    """The host's work on tensors in its memory, under offload: the optimizer, norms and copies of gradients."""
    WAITING_FOR_RANKS = "waiting_for_ranks"
    """Other ranks have not come to a collective, sent a message or ended their step: a pipeline's bubbles. Only where
    several ranks run together."""
    WAITING_FOR_HOST = "waiting_for_host"
    """The host has not yet launched what comes next: its time for operators and hooks."""


IN_OPTIMIZER = "optimizer"
"""The label of a rehearsed script's operators that run in its optimizer's step."""


def part_of(work: Work, label: str) -> StepPart:
    """Return the part that an operator on the GPU belongs to."""
    if label == IN_OPTIMIZER:
        return StepPart.OPTIMIZER
    if work.is_product:
        return StepPart.MATRIX_PRODUCTS
    if work.is_attention:
        return StepPart.ATTENTION
    return StepPart.OPTIMIZER if work.name.startswith("optimizer") else StepPart.OTHER_OPERATORS


def parts_of(
    end: float,
    operators: Mapping[StepPart, float],
    busy: Mapping[str, Intervals],
    cpu_optimizer: Intervals,
    waits: Intervals,
) -> dict[StepPart, float]:
    """Return the seconds of each part.

    Args:
        end: the seconds of the step.
        operators: seconds of the operators on the compute stream, which runs one at a time, by part.
        busy: intervals of ``compute``, ``collective`` and ``copy`` on all streams.
        cpu_optimizer: when the host computes the optimizer.
        waits: when the compute stream waits for other ranks.
    """
    compute, collectives, copies = (union(busy[kind]) for kind in ("compute", "collective", "copy"))
    gpu = union(compute + collectives)
    device = union(gpu + copies)
    optimizer = union(cpu_optimizer)
    parts = dict.fromkeys(StepPart, 0.0) | dict(operators)
    parts[StepPart.OTHER_OPERATORS] += length(compute) - sum(operators.values())
    parts[StepPart.EXPOSED_COMMUNICATION] = length(gpu) - length(compute)
    parts[StepPart.EXPOSED_COPIES] = length(device) - length(gpu)
    parts[StepPart.CPU_OPTIMIZER] = length(optimizer) - overlap(optimizer, device)
    not_waiting = union(device + optimizer)
    parts[StepPart.WAITING_FOR_RANKS] = length(union(not_waiting + waits)) - length(not_waiting)
    parts[StepPart.WAITING_FOR_HOST] = end - length(union(not_waiting + waits))
    if not waits:
        del parts[StepPart.WAITING_FOR_RANKS]
    return parts
