"""Dials: one quantity turned up step by step, all else equal. Each step is a whole question; search.py answers them.

model      the size ladder (catalog/ladder.py): rung by rung, 10M to 1T parameters
depth      num_hidden_layers of one model, its widths as they are
batch      micro_batch_size
sequence   sequence_length, in multiples of 128
gpus       world_size, turned down: from many GPUs to one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from fsdp_bench.catalog.ladder import SMALLEST, rung, rungs
from fsdp_bench.plan.estimate import DEEPEST
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import MOST_TOKENS, TrainSetup

Hardware = Cluster | Gpu | None

SEQUENCE_STEP = 128
"""Tokens: what kernels are tiled by, and fine enough to plan with."""
LONGEST_SEQUENCE = 1 << 22
LARGEST_BATCH = 1 << 14
MOST_GPUS = 4096


@dataclass(frozen=True)
class Step:
    """One position of a dial."""

    model: ModelShape
    setup: TrainSetup
    hardware: Hardware


@dataclass(frozen=True)
class Dial:
    """Steps in the order in which they need more memory, as far as it is monotonic."""

    name: str
    """What is turned: a field of ModelShape or TrainSetup."""
    values: Sequence[int]
    step: Callable[[int], Step]
    """Builds the step of a value."""

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Step:
        return self.step(self.values[index])


def model_dial(family: Family, setup: TrainSetup, hardware: Hardware, vocab_size: int | None = None) -> Dial:
    """Turn the size ladder; gpt2 gets as many learned positions as the sequence needs."""
    positions = max(setup.sequence_length, POSITIONS[family])
    by_size = _rungs_by_size(family, vocab_size, positions)
    return Dial("num_parameters", tuple(by_size), lambda size: Step(by_size[size], setup, hardware))


@lru_cache(maxsize=8)
def _rungs_by_size(family: Family, vocab_size: int | None, positions: int) -> dict[int, ModelShape]:
    smallest = rung(family, SMALLEST, vocab_size, positions).num_parameters
    sized = ((shape.num_parameters, shape) for shape in rungs(family, vocab_size, positions))
    return {size: shape for size, shape in sized if size >= smallest}


POSITIONS = {Family.LLAMA: 4096, Family.GPT2: 1024}
"""Positions of the ladder's models; a longer sequence gets as many as it needs."""


def depth_dial(shape: ModelShape, setup: TrainSetup, hardware: Hardware) -> Dial:
    """Turn the number of layers."""
    return Dial(
        "num_hidden_layers",
        range(1, DEEPEST + 1),
        lambda layers: Step(replace(shape, num_hidden_layers=layers), setup, hardware),
    )


def batch_dial(shape: ModelShape, setup: TrainSetup, hardware: Hardware) -> Dial:
    """Turn the sequences of one forward pass of one GPU."""
    return Dial(
        "micro_batch_size",
        range(1, min(LARGEST_BATCH, MOST_TOKENS // setup.sequence_length) + 1),
        lambda batch: Step(shape, replace(setup, micro_batch_size=batch), hardware),
    )


def sequence_dial(shape: ModelShape, setup: TrainSetup, hardware: Hardware) -> Dial:
    """Turn the tokens of a sequence; gpt2 ends at its learned positions.

    Raises:
        SpecError: for a model with fewer learned positions than one step.
    """
    longest = shape.max_position_embeddings if shape.family is Family.GPT2 else LONGEST_SEQUENCE
    longest = min(longest, MOST_TOKENS // setup.micro_batch_size)
    if longest < SEQUENCE_STEP:
        raise SpecError(f"seq: {shape.name} has only {longest} learned positions; the dial begins at {SEQUENCE_STEP}")
    return Dial(
        "sequence_length",
        range(SEQUENCE_STEP, longest + 1, SEQUENCE_STEP),
        lambda length: Step(shape, replace(setup, sequence_length=length), hardware),
    )


def gpus_dial(shape: ModelShape, setup: TrainSetup, hardware: Hardware) -> Dial:
    """Turn the number of GPUs down: whole nodes, then fewer GPUs of one node.

    A hybrid strategy keeps its shard size; counts that it cannot have are left out.
    """
    each = hardware.server.gpus_per_node if isinstance(hardware, Cluster) else 1
    counts = [nodes * each for nodes in range(MOST_GPUS // each, 0, -1)]
    counts += range(each - 1, 0, -1)
    allowed = [count for count in counts if _holds(setup, count)]
    return Dial("world_size", allowed, lambda count: Step(shape, *_resized(setup, hardware, count)))


def _holds(setup: TrainSetup, count: int) -> bool:
    if not setup.strategy.is_hybrid:
        return True
    shard = setup.shard_size
    return count >= 4 and (count % shard == 0 and count > shard if shard else count % 2 == 0)


def _resized(setup: TrainSetup, hardware: Hardware, count: int) -> tuple[TrainSetup, Hardware]:
    if isinstance(hardware, Cluster):
        each = min(count, hardware.server.gpus_per_node)
        hardware = replace(hardware, gpus_per_node=each, num_nodes=count // each)
    return replace(setup, world_size=count), hardware
