"""The FLOPs of a recorded model's forward pass: its matrix products and attention, two for a multiply-add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_bench.spec.recording.formula import evaluate
from fsdp_bench.spec.recording.recorded import Variant
from fsdp_bench.spec.recording.steps import Call, Instruction, Loop, Operator

if TYPE_CHECKING:
    from fsdp_bench.spec.recording.model import RecordedModel


def forward_flops(model: RecordedModel, length: int, only_blocks: bool = False) -> float:
    """Return the FLOPs of forward for one sequence. A causal token sees (length + 1) / 2 keys on average."""
    variant = model.some_variant
    numbers = [evaluate(text, model.values(2, length)) for text in variant.formulas]
    return _Counting(model, variant, numbers, only_blocks).of(variant.top.code, not only_blocks) / 2


class _Counting:
    def __init__(self, model: RecordedModel, variant: Variant, numbers: list[int], only_blocks: bool) -> None:
        self._variant, self._numbers = variant, numbers
        self._iterations = model.iterations()
        self._lists = tuple(f"{path}." for path in model.code.num_blocks)
        self._only_blocks = only_blocks

    def of(self, code: Sequence[Instruction], counts: bool) -> float:
        """Return the FLOPs of some instructions; of operators only if they ``counts``."""
        total = 0.0
        for each in code:
            if isinstance(each, Loop):
                total += self._iterations[each.number] * self.of(self._variant.loops[each.number].code, counts)
            elif isinstance(each, Call):
                total += self.of(each.code, counts or each.module.startswith(self._lists))
            elif counts and isinstance(each, Operator) and each.dims:
                total += self._operator(each)
        return total

    def _operator(self, operator: Operator) -> float:
        dims = [self._numbers[size] for size in operator.dims]
        name = self._variant.names[operator.name]
        if " " in name:
            m, n, k = dims
            return 2 * m * n * k
        if "attention" in name:
            batch, heads, _, length, keys, head_dim, is_causal = dims
            seen = (keys + 1) / 2 if is_causal else keys
            return 4 * batch * heads * length * seen * head_dim
        return 0.0
