"""LigerCrossEntropyLoss and LigerFusedLinearCrossEntropyLoss of liger_kernel (0.8), with their defaults.

Both compute their gradients in forward, into tensors that are there already, and scale them in backward, unless the
gradient of the loss is 1.
"""

from __future__ import annotations

from fsdp_bench.simulate.autograd import Gradients
from fsdp_bench.simulate.events import Category, Stream
from fsdp_bench.simulate.losses.fused import sum_of_all
from fsdp_bench.simulate.operators.core import Operators, Parameter, Saved
from fsdp_bench.simulate.operators.kernels import BOOL, FP32, INT64
from fsdp_bench.simulate.tape import Tensor

_KERNEL, _SCALE = "liger_cross_entropy_kernel", "element_mul_kernel"


def liger(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """liger_kernel/ops/cross_entropy.py, LigerCrossEntropyFunction: the logits become their gradient."""
    tape, tokens = op.tape, targets.numel
    losses = tape.tensor(tokens, logits.itemsize, "aten::zeros")
    mask = _counted(op, targets)
    for extreme in ("aten::max", "aten::min"):
        _compare_with_bound(op, targets, mask, extreme)
    op.run(_KERNEL, logits, logits, logits, targets, losses)  # the logits are read twice and written once
    out = sum_of_all(op, losses, logits.itemsize)
    numel, itemsize = logits.numel, logits.itemsize

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        (gradient,) = saved.copy()
        _compare_with_one(op)
        if op.scales_loss:
            op.run(_SCALE, gradient, gradient)
        return (Tensor(gradient.storage, numel, itemsize),)

    return op.record(out, [logits], [logits.detach()], backward)


def _counted(op: Operators, targets: Tensor) -> Tensor:
    """Return the mask of the targets that count; the host waits for their number."""
    mask = op.tape.tensor(targets.numel, BOOL, "aten::ne")
    op.run("aten::ne", targets, mask)
    sum_of_all(op, mask, INT64)
    op.tape.synchronize(Stream.COMPUTE)
    return mask


def _compare_with_bound(op: Operators, targets: Tensor, mask: Tensor, extreme: str) -> None:
    """Assert that the largest or the smallest target is a row of the head; the host waits for the answer."""
    masked = op.tape.tensor(targets.numel, INT64, "aten::mul")
    op.run("aten::mul", targets, mask, masked)
    one = sum_of_all(op, masked, INT64, extreme)
    del masked
    _answer = op.tape.tensor(1, BOOL, "aten::lt")
    del one
    op.tape.synchronize(Stream.COMPUTE)


def _compare_with_one(op: Operators) -> None:
    """torch.equal(grad_output, torch.tensor(1.0)): the host waits for the answer."""
    _one = op.temporary(1, FP32, "aten::tensor")
    _equal = op.temporary(1, BOOL, "aten::eq")
    _all = op.temporary(1, BOOL, "aten::all")
    op.tape.synchronize(Stream.COMPUTE)


def rows_of_a_chunk(tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Return how many rows of logits there are at once: about as many elements as the head's input has."""
    wanted = -(-tokens // -(-vocab_size // hidden_size))
    return min(1 << (wanted - 1).bit_length(), tokens)


class _Chunks:
    """The loop over chunks of fused_linear_cross_entropy_forward."""

    def __init__(self, op: Operators, x: Tensor, weight: Tensor, d_weight: Tensor | None, hidden_size: int) -> None:
        self.op, self.x, self.weight, self.d_weight = op, x, weight, d_weight
        self.hidden_size, self.vocab_size = hidden_size, weight.numel // hidden_size
        self.is_autocast = op.autocast not in (None, x.itemsize)

    def run(self, rows: int, buffer: Tensor | None) -> None:
        """Compute the logits of some rows, their losses, and what they add to both gradients."""
        op, hidden, vocab = self.op, self.hidden_size, self.vocab_size
        itemsize = op.autocast or self.x.itemsize
        logits = self._autocast_logits(rows, itemsize) if buffer is None else buffer.view(rows * vocab)
        op.tape.product("nt", rows, vocab, hidden, itemsize)
        op.make_workspace(op.tape.in_backward)
        op.run(_KERNEL, logits, logits, logits)
        if buffer is None:
            whole = op.cast_weight(self.weight)
            d_rows = op.tape.tensor(rows * hidden, itemsize, "aten::mm")
            op.run("aten::copy_", d_rows, self.x.view(rows * hidden))
            del whole, d_rows
        op.tape.product("nn", rows, hidden, vocab, itemsize)
        if self.d_weight is not None:
            self._add_to_weight(rows, itemsize, self.d_weight, is_in_place=buffer is None or itemsize != FP32)

    def _add_to_weight(self, rows: int, itemsize: int, d_weight: Tensor, is_in_place: bool) -> None:
        op, hidden = self.op, self.hidden_size
        op.tape.product("tn", self.vocab_size, hidden, rows, itemsize, d_weight.itemsize if is_in_place else 0)
        if self.is_autocast:
            op.to(self.x.view(rows * hidden), itemsize)
        if not is_in_place:
            part = op.tape.tensor(self.weight.numel, FP32, "aten::mm", Category.GRADIENTS)
            op.run("aten::add", part, d_weight, d_weight)

    def _autocast_logits(self, rows: int, itemsize: int) -> Tensor:
        """The weight's t() is cast, a view, which autocast does not keep."""
        op = self.op
        _x = op.to(self.x.view(rows * self.hidden_size).detach(), itemsize)
        _weight = op.tape.tensor(self.weight.numel, itemsize, "aten::_to_copy", Category.GRADIENTS)
        op.run("aten::_to_copy", self.weight, _weight)
        return op.tape.tensor(rows * self.vocab_size, itemsize, "aten::mm", Category.LOGITS)


def liger_fused_linear(op: Operators, x: Tensor, weight: Parameter, targets: Tensor) -> Tensor:
    """liger_kernel/ops/fused_linear_cross_entropy.py: the head's input and weight to the mean loss.

    Both gradients are complete when forward ends. In 16 bits they are added up in place, in fp32 out of place. A frozen
    weight has none.
    """
    tape, tokens = op.tape, targets.numel
    hidden_size = x.numel // tokens
    vocab_size = weight.numel // hidden_size
    d_x = op.like(x, "aten::zeros_like")
    d_weight = None
    if weight.node is not None:
        d_weight = tape.tensor(weight.numel, weight.itemsize, "aten::zeros_like", Category.GRADIENTS)
    op.run("aten::zeros_like", d_x, *([] if d_weight is None else [d_weight]))
    losses = tape.tensor(tokens, FP32, "aten::zeros")
    _mask = _counted(op, targets)
    rows, chunks = rows_of_a_chunk(tokens, hidden_size, vocab_size), _Chunks(op, x, weight, d_weight, hidden_size)
    buffer = None
    if not chunks.is_autocast:
        buffer = tape.tensor(rows * vocab_size, x.itemsize, "aten::empty", Category.LOGITS)
    grad_enabled, tape.grad_enabled = tape.grad_enabled, False
    for first in range(0, tokens, rows):
        chunks.run(min(rows, tokens - first), buffer)
    tape.grad_enabled = grad_enabled
    del buffer, chunks
    out = sum_of_all(op, losses, FP32)

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        _compare_with_one(op)
        found = []
        for one in opened:
            if op.scales_loss:
                op.run(_SCALE, one, one)
            found.append(Tensor(one.storage, one.numel, one.itemsize))
        return found

    if d_weight is None:
        return op.record(out, [x], [d_x.detach()], backward)
    return op.record(out, [x, weight], [d_x.detach(), d_weight.detach()], backward)
