"""RecordedModel: a recorded code with the sizes and the number of blocks of one model. Model: this or a ModelShape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any

import msgspec

from fsdp_bench.spec.checkpointing_policy import CheckpointingPolicy
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.pointwise import CASTING, STRIDED
from fsdp_bench.spec.recording.config import HIDDEN
from fsdp_bench.spec.recording.formula import evaluate, symbols_of
from fsdp_bench.spec.recording.recorded import RecordedCode, Variant
from fsdp_bench.spec.recording.steps import Call, Instruction, Loop, Operator, operator_name
from fsdp_bench.spec.setup import Checkpointing, TrainSetup
from fsdp_bench.spec.units import format_count


def forward_flops(model: RecordedModel, length: int, recomputed_by: CheckpointingPolicy | None = None) -> float:
    """Return the FLOPs of forward for one sequence. A causal token sees (length + 1) / 2 keys on average.

    ``recomputed_by`` leaves out what is outside of blocks, and what selective checkpointing saves.
    """
    variant = model.some_variant
    numbers = [evaluate(text, model.values(2, length)) for text in variant.formulas]
    return _Counting(model, variant, numbers, recomputed_by).of(variant.top.code, recomputed_by is None) / 2


class _Counting:
    def __init__(
        self, model: RecordedModel, variant: Variant, numbers: list[int], recomputed_by: CheckpointingPolicy | None
    ) -> None:
        self._variant, self._numbers = variant, numbers
        self._iterations = model.iterations()
        self._lists = tuple(f"{path}." for path in model.code.num_blocks)
        self._recomputed_by = recomputed_by
        self._num_products = 0
        """The number of aten.mm that the block has run."""

    def of(self, code: Sequence[Instruction], counts: bool) -> float:
        """Return the FLOPs of some instructions; of operators only if they ``counts``."""
        total = 0.0
        for each in code:
            if isinstance(each, Loop):
                total += self._iterations[each.number] * self.of(self._variant.loops[each.number].code, counts)
            elif isinstance(each, Call):
                is_in_block = each.module.startswith(self._lists)
                if is_in_block and not counts:
                    self._num_products = 0  # a block begins
                total += self.of(each.code, counts or is_in_block)
            elif counts and isinstance(each, Operator) and each.dims and not self._is_saved(each):
                total += self._operator(each)
        return total

    def _is_saved(self, operator: Operator) -> bool:
        policy = self._recomputed_by
        if policy is None:
            return False
        name, _, outer = operator_name(self._variant.names[operator.name])
        if outer:
            return False
        name = name.replace("::", ".")
        self._num_products += name == "aten.mm"
        return policy.saves(name, self._num_products)

    def _operator(self, operator: Operator) -> float:
        dims = [self._numbers[size] for size in operator.dims]
        name, layout, _ = operator_name(self._variant.names[operator.name])
        if layout and not layout.startswith((STRIDED, CASTING)):
            m, n, k = dims
            return 2 * m * n * k
        if "attention" in name:
            batch, heads, _, length, keys, head_dim, is_causal = dims
            seen = (keys + 1) / 2 if is_causal else keys
            return 4 * batch * heads * length * seen * head_dim
        return 0.0


class RecordedModel(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A model of recorded code, with a ModelShape's answers. Raises SpecError for sizes that it does not hold for."""

    name: str
    code: RecordedCode
    """Compared by identity."""
    sizes: tuple[tuple[str, int], ...]
    """Values of the recording's symbols, but for the batch and the sequence length."""
    counts: tuple[tuple[str, int], ...]
    """The number of blocks in each nn.ModuleList of them."""
    max_position_embeddings: int | None = None
    """The longest sequence, where positions are learned."""
    beyond: RecordedModel | None = None
    """The same model for sequences longer than its sliding window, if this one is for those that are not."""

    def __post_init__(self) -> None:
        missing = set(self.code.sizes) - set(dict(self.sizes))
        if missing:
            raise SpecError(f"{self.name}: has no {', '.join(sorted(missing))}")
        self.iterations()

    @property
    def kind(self) -> str:
        """The class of the model, as tables and charts name it."""
        origin = self.code.origin
        return origin.architecture if origin.lora is None else f"{origin.architecture} with {origin.lora.title}"

    @property
    def learned_positions(self) -> int | None:
        """The longest sequence, where positions are learned; else None."""
        return self.max_position_embeddings

    @property
    def longest_sequence(self) -> int | None:
        """The longest sequence that this recording or ``beyond`` holds for; None if there is no limit."""
        if self.beyond is not None:
            return self.beyond.longest_sequence
        limits = [limit for limit in (self.max_position_embeddings, self.code.longest) if limit is not None]
        return min(limits, default=None)

    def for_length(self, sequence_length: int) -> RecordedModel:
        """Return the model for sequences of a length: on this side of its sliding window or beyond."""
        is_beyond = self.code.longest is not None and sequence_length > self.code.longest
        return self.beyond if is_beyond and self.beyond is not None else self

    @property
    def shortest_sequence(self) -> int:
        """The shortest sequence that the recording holds for."""
        return -(-self.code.shortest // self.code.multiple) * self.code.multiple

    @property
    def has_tokens(self) -> bool:
        """Whether the batch is made of sequences of tokens; that of a vision transformer is made of images."""
        return any("S" in symbols_of(each.numel) for each in self.code.batch)

    @cached_property
    def has_fused_attention(self) -> bool:
        """Whether its code calls fused kernels of attention, which not every GPU has."""
        return self.has_flash_attn or any("scaled_dot_product" in name for name in self.some_variant.names)

    @cached_property
    def has_flash_attn(self) -> bool:
        """Whether its code calls the flash-attn package, which needs compute capability 8.0."""
        return any(name.startswith("flash_attn::") for name in self.some_variant.names)

    def knows_attention(self, gpu: Gpu | None, compute: str) -> bool:
        """Whether the recorded code is what a GPU runs in a compute dtype: its kernels of attention exist there.

        Before sm80 there is no FlashAttention. In fp32 it runs what other GPUs run.
        """
        if gpu is None or gpu.native_bf16 or compute == "fp32" or not self.has_fused_attention:
            return True
        return gpu.is_before_sm80 and self.code.origin.before_sm80

    @cached_property
    def some_variant(self) -> Variant:
        """One of the variants; all have the same loops."""
        return self.code.read(next(iter(self.code.variants)))

    def iterations(self) -> list[int]:
        """Return how often each loop of blocks runs. Raises SpecError for numbers of blocks it does not hold for."""
        found, counts = [], dict(self.counts)
        for loop in self.some_variant.loops:
            around = self.code.num_blocks[loop.path] - loop.iterations * loop.period
            times, rest = divmod(counts[loop.path] - around, loop.period)
            if rest or times < 0:
                allowed = f"{around} or more" if loop.period == 1 else f"{around}, and {loop.period} more at a time"
                raise SpecError(f"num_hidden_layers: {counts[loop.path]} is not allowed for {self.name}; {allowed}")
            found.append(times)
        looped = {loop.path for loop in self.some_variant.loops}
        for path, recorded in self.code.num_blocks.items():
            if path not in looped and counts[path] != recorded:
                raise SpecError(f"{path}: only {recorded} blocks were recorded, not {counts[path]}: they differ")
        return found

    # -- blocks --------------------------------------------------------------------------------------------------

    @property
    def num_hidden_layers(self) -> int:
        """The most blocks that a list of them has: of an encoder-decoder, those of the encoder or of the decoder."""
        return max(count for _, count in self.counts)

    @property
    def num_blocks(self) -> int:
        """Groups of blocks: the iterations of loops, what is before them, and what is behind them."""
        loops = {loop.path: loop for loop in self.some_variant.loops}
        around = sum(1 if path in loops else count for path, count in self.counts)
        return around + sum(self.iterations()) + sum(loop.first > 0 for loop in loops.values())

    @property
    def repeats(self) -> bool:
        """Whether one group of blocks may stand for others: there is one list of them."""
        return len(self.code.num_blocks) == 1 and len(self.some_variant.loops) == 1

    def with_blocks(self, num_blocks: int) -> RecordedModel:
        """Return the model with another number of groups of blocks."""
        ((path, count),) = self.counts
        period = self.some_variant.loops[0].period
        counts = ((path, count + (num_blocks - self.num_blocks) * period),)
        return msgspec.structs.replace(self, counts=counts, beyond=None)

    def with_layers(self, num_layers: int) -> RecordedModel:
        """Return the model with so many blocks in every list of them."""
        return msgspec.structs.replace(self, counts=tuple((path, num_layers) for path, _ in self.counts), beyond=None)

    def allowed_layers(self, most: int) -> range:
        """Return the numbers of layers, in every list of blocks, that the recording holds for."""
        loops = self.some_variant.loops
        around = [self.code.num_blocks[loop.path] - loop.iterations * loop.period for loop in loops]
        if len(loops) < len(self.code.num_blocks) or len(set(around)) > 1 or len({loop.period for loop in loops}) > 1:
            return range(self.num_hidden_layers, self.num_hidden_layers + 1)
        return range(around[0], most + 1, loops[0].period)

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def hidden_size(self) -> int:
        """The width of the model, by which charts and tables name it; 0 if it is not known."""
        sizes = dict(self.sizes)
        return next((sizes[name] for name in HIDDEN if name in sizes), 0)

    @property
    def head_dim(self) -> int:
        """The size of an attention head; 1 if it is not known."""
        return dict(self.sizes).get("head_dim", 1)

    def values(self, batch: int, length: int) -> dict[str, int]:
        """Return the values of all symbols."""
        return {**dict(self.sizes), "B": batch, "S": length}

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters. A tied one counts once."""
        return sum(count for count, _ in self._parameters())

    @cached_property
    def num_trained_parameters(self) -> int:
        """Number of parameters that need a gradient."""
        return sum(count for count, is_trained in self._parameters() if is_trained)

    @cached_property
    def has_frozen_parameters(self) -> bool:
        """Whether some parameters need no gradient."""
        return not all(parameter.is_trained for parameter in self.code.parameters)

    def _parameters(self) -> list[tuple[int, bool]]:
        values, iterations = self.values(1, 1), self.iterations()
        return [
            (
                prod([parameter.packed, *(evaluate(size, values) for size in parameter.shape)])
                * self._num_blocks_like(parameter.name, iterations),
                parameter.is_trained,
            )
            for parameter in self.code.parameters
        ]

    def _num_blocks_like(self, name: str, iterations: list[int]) -> int:
        """Return how many blocks have a parameter like a recorded one: for those of a loop's first iteration all."""
        for loop, times in zip(self.some_variant.loops, iterations, strict=True):
            if name.startswith(f"{loop.path}."):
                number = name[len(loop.path) + 1 :].partition(".")[0]
                if number.isdecimal() and 0 <= (block := int(number) - loop.first) < loop.period * loop.iterations:
                    return times if block < loop.period else 0
        return 1

    # -- work ----------------------------------------------------------------------------------------------------

    def model_flops_per_token(self, sequence_length: int) -> float | None:
        """Return FLOPs per token of a step without recomputation, thrice forward's; None with frozen parameters."""
        if self.has_frozen_parameters:
            return None
        return 3 * forward_flops(self, sequence_length) / sequence_length

    def hardware_flops_per_token(self, setup: TrainSetup) -> float | None:
        """Return the FLOPs of one training step for one token, with what selective checkpointing computes again.

        None for full checkpointing: where a block's recomputation stops is not recorded.
        """
        length = setup.sequence_length
        flops = self.model_flops_per_token(length)
        if flops is None or setup.checkpointing is Checkpointing.FULL:
            return None
        if setup.checkpointing is Checkpointing.SELECTIVE and setup.checkpointing_policy is not None:
            flops += forward_flops(self, length, recomputed_by=setup.policy) / length
        return flops

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "code": self.code.origin.code,
            "architecture": self.code.origin.architecture,
            "lora": to_builtins(self.code.origin.lora),
            "attention": self.code.origin.attention or ("sdpa" if self.code.origin.code == "huggingface" else None),
            "recorded_with": dict(self.code.origin.versions),
            "num_hidden_layers": self.num_hidden_layers,
            "blocks": dict(self.counts),
            "hidden_size": self.hidden_size or None,
            "num_parameters": self.num_parameters,
            "num_trained_parameters": self.num_trained_parameters,
        }

    def describe(self) -> str:
        """Return one line for tables and charts."""
        layers = " + ".join(str(count) for _, count in self.counts)
        width = f" x {self.hidden_size}" if self.hidden_size else ""
        return f"{self.kind} {format_count(self.num_parameters)} ({layers} layers{width})"


Model = ModelShape | RecordedModel
"""A benchmark model's dimensions, or a recorded model: predictions take either."""

_WHOSE = {
    "huggingface": "transformers' code",
    "torchtitan": "torchtitan's code",
    "benchmark": "the benchmark's own code",
}


def code_of(model: Model) -> str:
    """Return whose code a model is: ``huggingface``, ``torchtitan``, ``benchmark``, or ``module`` for a user's."""
    return model.code.origin.code if isinstance(model, RecordedModel) else "benchmark"


def whose_code(code: str) -> str:
    """Return a code in words: ``transformers' code``."""
    return _WHOSE.get(code, "your own code")


def lora_of(model: Model) -> LoRA | None:
    """Return the adapters in a model; None if it has none."""
    return model.code.origin.lora if isinstance(model, RecordedModel) else None
