"""The loss of a setup; torch.nn.functional.cross_entropy on the whole logits, or on chunks of them."""

from __future__ import annotations

from functools import partial

from fsdp_bench.simulate.autograd import Gradients
from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.losses.fused import compiled, flash_attn, unsloth_fp32
from fsdp_bench.simulate.losses.liger import liger
from fsdp_bench.simulate.models.activation_checkpointing import checkpointed
from fsdp_bench.simulate.operators.core import Operators, Saved
from fsdp_bench.simulate.operators.kernels import FP32, CrossEntropy
from fsdp_bench.simulate.tape import Tensor
from fsdp_bench.spec.setup import Loss

NUM_CHUNKS = 8
"""train/models/loss.py, NUM_CHUNKS."""


def plain(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """Plain of train/models/loss.py: F.cross_entropy on fp32 logits, or what other scripts call (CrossEntropy)."""
    which = op.kernels.cross_entropy
    return cross_entropy(op, op.to(logits, FP32) if which is CrossEntropy.FP32_LOGITS else logits, targets)


def chunked(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """train/models/loss.py, chunked: a checkpointed sum over each of up to eight runs of tokens."""
    tokens = targets.numel
    vocab_size = logits.numel // tokens
    rows = [min(-(-tokens // NUM_CHUNKS), tokens - first) for first in range(0, tokens, -(-tokens // NUM_CHUNKS))]
    parts = op.split(logits, [count * vocab_size for count in rows])
    chunk_sum = checkpointed(op)
    total = op.tape.tensor(1, FP32, "aten::new_zeros")
    for part, count in zip(parts, rows, strict=True):
        total = op.add(total, chunk_sum(partial(_chunk_sum, op), part, targets.view(count)))
    return op.divide(total)


def _chunk_sum(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(op, op.to(logits, FP32), targets)


def cross_entropy(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """torch.nn.functional.cross_entropy: aten::_log_softmax, aten::nll_loss_forward."""
    return _nll_loss(op, _log_softmax(op, logits), targets)


def _log_softmax(op: Operators, x: Tensor) -> Tensor:
    """aten::_log_softmax: saves its result."""
    out = op.like(x, "aten::_log_softmax")
    op.run("aten::_log_softmax", x, out)
    numel, itemsize = x.numel, x.itemsize

    def backward(saved: Saved, gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        op.run("aten::_log_softmax_backward_data", *gradients, *opened, opened[0])
        return (op.tape.tensor(numel, itemsize, "aten::_log_softmax_backward_data", Category.LOGITS),)

    return op.record(out, [x], [out.detach()], backward)


def _nll_loss(op: Operators, x: Tensor, targets: Tensor) -> Tensor:
    """aten::nll_loss_forward: a scalar and the total weight, which is saved."""
    out = op.tape.tensor(1, x.itemsize, "aten::nll_loss_forward")
    total_weight = op.tape.tensor(1, x.itemsize, "aten::nll_loss_forward")
    # One element of each row is read, and its target.
    op.tape.kernel("aten::nll_loss_forward", targets.numel * (targets.itemsize + x.itemsize), x.itemsize)
    numel, itemsize = x.numel, x.itemsize

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        _opened = saved.copy()
        op.tape.kernel("aten::nll_loss_backward", numel * itemsize, itemsize)
        return (op.tape.tensor(numel, itemsize, "aten::nll_loss_backward", Category.LOGITS),)

    return op.record(out, [x], [x, targets, total_weight], backward)


_ON_LOGITS = {
    Loss.PLAIN: plain,
    Loss.CHUNKED: chunked,
    Loss.COMPILED: compiled,
    Loss.FLASH_ATTN: flash_attn,
    Loss.LIGER: liger,
    Loss.UNSLOTH_FP32: unsloth_fp32,
}


def loss(op: Operators, kind: Loss, logits: Tensor, targets: Tensor) -> Tensor:
    """Logits and targets to the mean loss, a scalar; of a kind that includes the head, the loss is given."""
    if kind.includes_head:
        return logits
    op.tape.category = Category.LOGITS
    if kind is Loss.COMPILED and not op.kernels.is_cuda:
        kind = Loss.PLAIN  # the compiled code of a CPU is another, and is not predicted
    out = _ON_LOGITS[kind](op, logits, targets)
    op.tape.category = Category.ACTIVATIONS
    return out
