"""CrossEntropyLoss of flash_attn/losses/cross_entropy.py (2.8), with its defaults.

``inplace_backward`` is False, also in llm-foundry: the gradient of the logits is a tensor of its own.
"""

from __future__ import annotations

from fsdp_bench.simulate.autograd import Gradients
from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.losses.sums import mean_of_counted
from fsdp_bench.simulate.operators.core import Operators, Saved
from fsdp_bench.simulate.operators.kernels import FP32, INT64
from fsdp_bench.simulate.tape import Tensor

_FORWARD, _BACKWARD = "cross_entropy_fwd_kernel", "cross_entropy_bwd_kernel"


def flash_attn(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """flash_attn/ops/triton/cross_entropy.py, CrossEntropyLoss; then the mean over the targets that count.

    Saves the logits themselves, and the logarithm of each row's sum in fp32. Targets whose address is not a multiple of
    16 bytes are copied: those of one sequence, which are the tokens from the second one on.
    """
    tokens = targets.numel
    aligned = targets
    if targets.is_view:
        aligned = op.tape.tensor(tokens + 1, INT64, "aten::constant_pad_nd").view(tokens)
        op.run("aten::constant_pad_nd", targets, aligned)
    losses, row_sums, _z_losses = (op.tape.tensor(tokens, FP32, _FORWARD) for _ in range(3))
    op.run(_FORWARD, logits, aligned, losses, row_sums, _z_losses)
    numel, itemsize = logits.numel, logits.itemsize

    def backward(saved: Saved, gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        _d_z_losses = op.temporary(tokens, FP32, "aten::zeros")  # of an output that has no gradient
        d_logits = op.tape.tensor(numel, itemsize, _BACKWARD, Category.LOGITS)
        op.run(_BACKWARD, *opened, d_logits)
        return (d_logits,)

    op.record(losses, [logits], [logits, row_sums, aligned], backward)
    return mean_of_counted(op, losses, targets)
