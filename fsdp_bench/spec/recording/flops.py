"""The FLOPs of a recorded model's forward pass: its matrix products and attention, two for a multiply-add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_bench.spec.checkpointing_policy import CheckpointingPolicy
from fsdp_bench.spec.recording.formula import evaluate
from fsdp_bench.spec.recording.recorded import Variant
from fsdp_bench.spec.recording.steps import Call, Instruction, Loop, Operator, operator_name

if TYPE_CHECKING:
    from fsdp_bench.spec.recording.model import RecordedModel


def forward_flops(
    model: RecordedModel, length: int, only_blocks: bool = False, recomputed_by: CheckpointingPolicy | None = None
) -> float:
    """Return the FLOPs of forward for one sequence. A causal token sees (length + 1) / 2 keys on average.

    ``only_blocks`` leaves out what is outside of blocks; ``recomputed_by`` also what selective checkpointing saves.
    """
    only_blocks = only_blocks or recomputed_by is not None
    variant = model.some_variant
    numbers = [evaluate(text, model.values(2, length)) for text in variant.formulas]
    return _Counting(model, variant, numbers, recomputed_by).of(variant.top.code, not only_blocks) / 2


class _Counting:
    def __init__(
        self, model: RecordedModel, variant: Variant, numbers: list[int], recomputed_by: CheckpointingPolicy | None
    ) -> None:
        self._variant, self._numbers = variant, numbers
        self._iterations = model.iterations()
        self._lists = tuple(f"{path}." for path in model.code.num_blocks)
        self._recomputed_by = recomputed_by
        self._num_products = 0
        """How many aten.mm the block has run."""

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
        if name == "aten.mm" and policy.recomputes_every_second_product:
            self._num_products += 1
            return self._num_products % 2 == 1
        return name in policy.saved

    def _operator(self, operator: Operator) -> float:
        dims = [self._numbers[size] for size in operator.dims]
        name, layout, _ = operator_name(self._variant.names[operator.name])
        if layout:
            m, n, k = dims
            return 2 * m * n * k
        if "attention" in name:
            batch, heads, _, length, keys, head_dim, is_causal = dims
            seen = (keys + 1) / 2 if is_causal else keys
            return 4 * batch * heads * length * seen * head_dim
        return 0.0
