"""FLOPs and tokens of a rehearsed step: of its matrix products and attention, and of its embeddings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fsdp_bench.plan.rehearsed_time.operator_work import DTYPES, dtype_of, work_of_operator
from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.subprocesses.issued import (
    Argument,
    IssuedOperator,
    IssuedStep,
    PhaseBegin,
    TensorNumbers,
    TritonKernel,
)

_ROUNDING = 1e-3


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step's forward and backward passes, two for a multiply-add. The optimizer's are not counted."""

    forward: float
    """FLOPs of forward, without recomputation."""
    backward: float
    """FLOPs of the gradients, without recomputation."""
    recomputed: float
    dtype: str | None
    """The dtype in which most of them are computed: fp32, bf16 or fp16."""

    @property
    def model(self) -> float | None:
        """FLOPs without recomputation.

        None if that is not known: gradients need at most twice what forward needs, so more was computed again.
        """
        return self.forward + self.backward if self.backward <= 2 * self.forward * (1 + _ROUNDING) else None

    @property
    def hardware(self) -> float:
        """All FLOPs."""
        return self.forward + self.backward + self.recomputed


def flops_of(step: IssuedStep) -> StepFlops:
    """Return the FLOPs of a step.

    Compiled code does not say what it computes again in backward: the products and the attention that forward has, too,
    with the same shapes and strides. Those of gradients have one factor transposed. Batched products, of attention that
    is written out, are left aside: there the shapes of both may be the same.
    """
    phase, totals, dtypes = "forward", Counter[str](), Counter[str]()
    of_forward = set[_Kind]()
    is_compiled = any(isinstance(event, TritonKernel) and event.is_inductors for event in step.events)
    for event in step.events:
        if isinstance(event, PhaseBegin):
            phase = event.name
        if not isinstance(event, IssuedOperator) or phase == "optimizer":
            continue
        work = work_of_operator(event, step.tensors)
        flops = _flops(work) if work is not None and work.dims else 0.0
        is_recomputed = event.is_recomputed or (is_compiled and phase == "backward" and _kind(event) in of_forward)
        if phase == "forward" and event.name not in _BATCHED:
            of_forward.add(_kind(event))
        totals["recomputed" if is_recomputed else phase] += flops  # type: ignore[assignment]
        if flops:
            dtypes[DTYPES[dtype_of(event, step.tensors)]] += flops  # type: ignore[assignment]
    most = max(dtypes, key=lambda dtype: dtypes[dtype], default=None)
    return StepFlops(float(totals["forward"]), float(totals["backward"]), float(totals["recomputed"]), most)


_BATCHED = "aten::bmm", "aten::baddbmm"
_Kind = tuple[str, frozenset[tuple[str, Argument]]]


def _kind(event: IssuedOperator) -> _Kind:
    """Return an operator's name and what it reads."""
    return event.name, frozenset(pair for pair in event.arguments.items() if pair[0] not in event.outputs)


def _flops(work: Work) -> float:
    """Return the FLOPs of a product or of attention, whose backward counts twice: recomputation within it does not."""
    if work.is_product:
        m, n, k = work.dims
        return 2.0 * m * n * k
    batch, heads, _groups, length, head_dim, keys, is_causal = work.dims
    seen = (keys + 1) / 2 if is_causal else keys
    return (2 if work.is_backward else 1) * 4.0 * batch * heads * length * seen * head_dim


def tokens_of(step: IssuedStep) -> int | None:
    """Return how many tokens a rank trained on: the most that any embedding looked up. None without embeddings.

    Positions have embeddings, too, but fewer or as many are looked up.
    """
    looked_up = Counter[tuple[int, ...]]()
    for event in step.events:
        if isinstance(event, IssuedOperator) and event.name == "aten::embedding" and not event.is_recomputed:
            weight, indices = (event.arguments.get(name) for name in ("weight", "indices"))
            if isinstance(weight, TensorNumbers) and isinstance(indices, TensorNumbers):
                count = 1
                for size in step.tensors[indices.tensors[0]].shape:
                    count *= size
                looked_up[step.tensors[weight.tensors[0]].shape] += count
    return max(looked_up.values(), default=None)
