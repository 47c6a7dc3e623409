"""fast_cross_entropy_loss of unsloth (kernels/cross_entropy_loss.py) on logits that were cast to fp32.

unsloth's models cast them so until late 2024, and fms-acceleration's ``fast_loss`` replaces the CrossEntropyLoss that
transformers calls with logits.float(). The fp32 logits are saved, and backward overwrites them with their gradient.
"""

from __future__ import annotations

from fsdp_bench.simulate.autograd import Gradients
from fsdp_bench.simulate.losses.sums import mean_of_counted
from fsdp_bench.simulate.operators.core import Operators, Saved
from fsdp_bench.simulate.operators.kernels import FP32
from fsdp_bench.simulate.tape import Tensor

_FORWARD, _BACKWARD = "_cross_entropy_forward", "_cross_entropy_backward"


def unsloth_fp32(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """Fast_CrossEntropyLoss: saves the fp32 logits, and the logarithm of each row's sum; then the mean of what counts.

    Not modelled: a row of more than 65,536 logits is added up in parts, a few numbers a row.
    """
    whole = op.to(logits, FP32)
    losses, row_sums = (op.tape.tensor(targets.numel, FP32, _FORWARD) for _ in range(2))
    op.run(_FORWARD, whole, targets, losses, row_sums)
    numel = whole.numel

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        op.run(_BACKWARD, *opened, opened[0])
        return (Tensor(opened[0].storage, numel, FP32),)

    op.record(losses, [whole], [whole.detach(), row_sums, targets], backward)
    return mean_of_counted(op, losses, targets)
