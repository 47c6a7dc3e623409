"""The losses of train/loss.py: what the logits cost."""

from __future__ import annotations

from fsdp_bench.predict.events import Category
from fsdp_bench.predict.ledger import FP32, Operators
from fsdp_bench.predict.tape import Tensor
from fsdp_bench.spec.setup import Loss


def loss(op: Operators, kind: Loss, logits: Tensor, targets: Tensor) -> Tensor:
    """Logits and targets to the mean loss, a scalar."""
    op.tape.category = Category.LOGITS
    out = plain(op, logits, targets)
    op.tape.category = Category.ACTIVATIONS
    return out


def plain(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """train/loss.py, plain: F.cross_entropy on fp32 logits."""
    return cross_entropy(op, op.to(logits, FP32), targets)


def cross_entropy(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """torch.nn.functional.cross_entropy: aten::_log_softmax, aten::nll_loss_forward."""
    return op.nll_loss(op.log_softmax(logits), targets)
