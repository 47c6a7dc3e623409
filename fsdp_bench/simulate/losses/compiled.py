"""The plain loss compiled by torch.compile: what inductor's code allocates and what its partitioner saves.

Read from the allocator's history of torch 2.13 on the stand-in for NVIDIA's libraries (tests/on_stand_in/simulate). One
kernel reads the logits for each row's maximum and sum (online softmax), and one writes their gradient in their own
dtype. Not modelled: the partial results, a few numbers a row, with which several blocks share a row where there are
fewer than two rows a multiprocessor (torch/_inductor/ir.py, Reduction.num_splits).
"""

from __future__ import annotations

from fsdp_bench.simulate.autograd import Gradients
from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.operators.core import Operators, Saved
from fsdp_bench.simulate.operators.kernels import FP32
from fsdp_bench.simulate.tape import Tensor

_FORWARD, _BACKWARD = "triton_red_fused__log_softmax", "triton_poi_fused__log_softmax_backward_data"
_MOST_VALUES, _VALUES = 8192, 4096
"""Reduction.num_splits: from how many values on a sum is split, and how many values each part then has."""


def compiled(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """Logits and targets to the mean loss; saves the logits, and each row's maximum and sum in fp32."""
    tape, tokens = op.tape, targets.numel
    maxima, sums = (tape.tensor(tokens, FP32, _FORWARD) for _ in range(2))
    op.run(_FORWARD, logits, maxima, sums)
    parts = -(-tokens // _VALUES) if tokens > _MOST_VALUES else 0
    _partial = [op.temporary(parts, size, "triton_red_fused_nll_loss_forward") for size in (FP32, 2) if parts]
    total_weight, out = (tape.tensor(1, FP32, "triton_red_fused_nll_loss_forward") for _ in range(2))
    op.run("triton_red_fused_nll_loss_forward", targets, maxima, sums)
    numel, itemsize = logits.numel, logits.itemsize

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        d_logits = tape.tensor(numel, itemsize, _BACKWARD, Category.LOGITS)
        op.run(_BACKWARD, *opened, d_logits)
        return (d_logits,)

    return op.record(out, [logits], [logits, targets, maxima, sums, total_weight], backward)
