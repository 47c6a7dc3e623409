"""Quantity: what max-size searches the largest value of. Its candidates are questions, each with one of its values.

size_ladder        the models of the size ladder (catalog/ladder.py), 10M to 1T parameters
layer_counts       num_hidden_layers of one model
batch_sizes        micro_batch_size
sequence_lengths   sequence_length, in multiples of 128
gpu_counts         world_size, from many GPUs to one
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from msgspec.structs import replace

from fsdp_bench.catalog.architectures import FOLDERS
from fsdp_bench.catalog.ladder import SMALLEST, all_sizes, nearest_size
from fsdp_bench.catalog.lookup import POSITIONS, with_code
from fsdp_bench.plan.estimate import DEEPEST
from fsdp_bench.plan.question import Question
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import MOST_TOKENS, TrainSetup

SEQUENCE_STEP = 128
"""Sequence lengths are multiples of this many tokens, the tile size of kernels."""
LONGEST_SEQUENCE = 1 << 22
LARGEST_BATCH = 1 << 14
MOST_GPUS = 4096
"""The largest world size that is tried."""


@dataclass(frozen=True)
class Quantity:
    """Candidates in the order of increasing memory."""

    name: str
    """The field of ModelShape or TrainSetup in which the candidates differ."""
    values: Sequence[int]
    candidate: Callable[[int], Question]
    """Returns the candidate of a value: its model, setup and hardware. FitCheck has the assumptions."""

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Question:
        return self.candidate(self.values[index])

    @property
    def is_model_size(self) -> bool:
        """Whether candidates are models of the size ladder."""
        return self.name == "num_parameters"

    @property
    def widths(self) -> list[range]:
        """Indices of the models of each width, on the size ladder. For other quantities, one range of all indices."""
        if not self.is_model_size:
            return [range(len(self))]
        widths = groupby(range(len(self)), key=lambda index: self[index].model.hidden_size)
        ranges = [list(indices) for _, indices in widths]
        return [range(indices[0], indices[-1] + 1) for indices in ranges]


def size_ladder(
    family: Family, setup: TrainSetup, hardware: Hardware | None, vocab_size: int | None = None, code: str | None = None
) -> Quantity:
    """Return the models of the size ladder. gpt2 models have as many learned positions as the sequence needs.

    ``code``: whose, ``huggingface``, ``torchtitan`` or ``benchmark``; None for the benchmark's.
    """
    positions = max(setup.sequence_length, POSITIONS[family])
    by_size = _models_by_size(family, vocab_size, positions)
    if code in FOLDERS:  # of one head nothing was recorded
        by_size = {size: shape for size, shape in by_size.items() if shape.num_attention_heads > 1}

    def candidate(size: int) -> Question:
        shape = by_size[size]
        return Question(with_code(shape, setup.sequence_length, code) if code in FOLDERS else shape, setup, hardware)

    return Quantity("num_parameters", tuple(by_size), candidate)


@lru_cache(maxsize=8)
def _models_by_size(family: Family, vocab_size: int | None, positions: int) -> dict[int, ModelShape]:
    smallest = nearest_size(family, SMALLEST, vocab_size, positions).num_parameters
    sized = ((shape.num_parameters, shape) for shape in all_sizes(family, vocab_size, positions))
    return {size: shape for size, shape in sized if size >= smallest}


def layer_counts(model: Model, setup: TrainSetup, hardware: Hardware | None) -> Quantity:
    """Return one model with 1 to DEEPEST layers. Raises SpecError if a recorded model's blocks are unlike."""
    if len(model.allowed_layers(DEEPEST)) < 2:
        raise SpecError(f"num_hidden_layers: the blocks of {model.name} differ, and other depths were not recorded")
    return Quantity(
        "num_hidden_layers",
        model.allowed_layers(DEEPEST),
        lambda layers: Question(model.with_layers(layers), setup, hardware),
    )


def batch_sizes(model: Model, setup: TrainSetup, hardware: Hardware | None) -> Quantity:
    """Return micro-batch sizes from 1 upwards."""
    return Quantity(
        "micro_batch_size",
        range(1, min(LARGEST_BATCH, MOST_TOKENS // setup.sequence_length) + 1),
        lambda batch: Question(model, replace(setup, micro_batch_size=batch), hardware),
    )


def sequence_lengths(model: Model, setup: TrainSetup, hardware: Hardware | None) -> Quantity:
    """Return sequence lengths, for gpt2 up to its learned positions.

    Raises:
        SpecError: for a model with fewer learned positions than SEQUENCE_STEP.
    """
    longest = min(model.longest_sequence or LONGEST_SEQUENCE, MOST_TOKENS // setup.micro_batch_size)
    if longest < SEQUENCE_STEP:
        raise SpecError(f"seq: {model.name} takes only {longest} tokens; the search begins at {SEQUENCE_STEP}")
    return Quantity(
        "sequence_length",
        range(SEQUENCE_STEP, longest + 1, SEQUENCE_STEP),
        lambda length: Question(model.for_length(length), replace(setup, sequence_length=length), hardware),
    )


def gpu_counts(model: Model, setup: TrainSetup, hardware: Hardware | None) -> Quantity:
    """Return world sizes in decreasing order: whole nodes, then fewer GPUs of one node.

    A hybrid strategy keeps its shard size, so world sizes that it does not divide are not among them.
    """
    each = hardware.server.gpus_per_node if hardware else 1
    counts = [nodes * each for nodes in range(MOST_GPUS // each, 0, -1)]
    counts += range(each - 1, 0, -1)
    allowed = [count for count in counts if _is_allowed(setup, count)]
    return Quantity("world_size", allowed, lambda count: Question(model, *_on_gpus(setup, hardware, count)))


def _is_allowed(setup: TrainSetup, count: int) -> bool:
    if not setup.strategy.is_hybrid:
        return True
    shard = setup.shard_size
    return count >= 4 and (count % shard == 0 and count > shard if shard else count % 2 == 0)


def _on_gpus(setup: TrainSetup, hardware: Hardware | None, count: int) -> tuple[TrainSetup, Hardware | None]:
    if hardware is not None and hardware.has_server:
        each = min(count, hardware.server.gpus_per_node)
        hardware = replace(hardware, gpus_per_node=each, num_nodes=count // each)
    return replace(setup, world_size=count), hardware


OF_ONE_MODEL: dict[str, Callable[[Model, TrainSetup, Hardware | None], Quantity]] = {
    "num_hidden_layers": layer_counts,
    "micro_batch_size": batch_sizes,
    "sequence_length": sequence_lengths,
    "gpus": gpu_counts,
}
"""Quantities that can be searched for one model, by the name that users write."""
