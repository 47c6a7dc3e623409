"""The losses of train/models/loss.py: what each allocates, saves for backward and computes."""

from functools import partial

from fsdp_bench.simulate.autograd import Gradients
from fsdp_bench.simulate.events import Category, Stream
from fsdp_bench.simulate.models.activation_checkpointing import checkpointed
from fsdp_bench.simulate.operators.core import Operators, Parameter, Saved
from fsdp_bench.simulate.operators.kernel_workspaces import reduce_all_workspace
from fsdp_bench.simulate.operators.kernels import BOOL, FP32, INT64, CrossEntropy
from fsdp_bench.simulate.tape import Tensor
from fsdp_bench.spec.setup import Loss


def sum_of_all(op: Operators, x: Tensor, itemsize: int, name: str = "aten::sum") -> Tensor:
    """aten::sum, or another reduction of all elements to one, of so many bytes; it adds up in at least fp32.

    Booleans become integers first (sum_out in aten/native/ReduceOps.cpp).
    """
    out = op.tape.tensor(1, itemsize, name)
    if x.itemsize == BOOL:
        x = op.to(x, itemsize)
    _workspace = op.scratch(reduce_all_workspace(x.numel, op.kernels, max(itemsize, FP32)), "Reduce.cuh")
    op.run(name, x, out)
    return out


def mean_of_counted(op: Operators, losses: Tensor, targets: Tensor) -> Tensor:
    """loss.sum() / (target != ignore_index).sum(): the gradient is one number, expanded without a copy."""
    total = sum_of_all(op, losses, FP32)
    is_counted = op.tape.tensor(targets.numel, BOOL, "aten::ne")
    op.run("aten::ne", targets, is_counted)
    count = sum_of_all(op, is_counted, INT64)
    mean = op.tape.tensor(1, FP32, "aten::div")
    del total, is_counted

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        _opened = saved.copy()
        return (op.temporary(1, FP32, "aten::div"),)

    return op.record(mean, [losses], [count], backward)


# -- CrossEntropyLoss of flash_attn/losses/cross_entropy.py (2.8), with its defaults -----------------------------------
#
# ``inplace_backward`` is False, also in llm-foundry: the gradient of the logits is a tensor of its own.

_FLASH_FORWARD, _FLASH_BACKWARD = "cross_entropy_fwd_kernel", "cross_entropy_bwd_kernel"


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
    losses, row_sums, _z_losses = (op.tape.tensor(tokens, FP32, _FLASH_FORWARD) for _ in range(3))
    op.run(_FLASH_FORWARD, logits, aligned, losses, row_sums, _z_losses)
    numel, itemsize = logits.numel, logits.itemsize

    def backward(saved: Saved, gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        _d_z_losses = op.temporary(tokens, FP32, "aten::zeros")  # of an output that has no gradient
        d_logits = op.tape.tensor(numel, itemsize, _FLASH_BACKWARD, Category.LOGITS)
        op.run(_FLASH_BACKWARD, *opened, d_logits)
        return (d_logits,)

    op.record(losses, [logits], [logits, row_sums, aligned], backward)
    return mean_of_counted(op, losses, targets)


# -- fast_cross_entropy_loss of unsloth (kernels/cross_entropy_loss.py) on logits that were cast to fp32 ---------------
#
# unsloth's models cast them so until late 2024, and fms-acceleration's ``fast_loss`` replaces the CrossEntropyLoss that
# transformers calls with logits.float(). The fp32 logits are saved, and backward overwrites them with their gradient.

_UNSLOTH_FORWARD, _UNSLOTH_BACKWARD = "_cross_entropy_forward", "_cross_entropy_backward"


def unsloth_fp32(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """Fast_CrossEntropyLoss: saves the fp32 logits, and the logarithm of each row's sum; then the mean of what counts.

    Not modelled: a row of more than 65,536 logits is added up in parts, a few numbers a row.
    """
    whole = op.to(logits, FP32)
    losses, row_sums = (op.tape.tensor(targets.numel, FP32, _UNSLOTH_FORWARD) for _ in range(2))
    op.run(_UNSLOTH_FORWARD, whole, targets, losses, row_sums)
    numel = whole.numel

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        op.run(_UNSLOTH_BACKWARD, *opened, opened[0])
        return (Tensor(opened[0].storage, numel, FP32),)

    op.record(losses, [whole], [whole.detach(), row_sums, targets], backward)
    return mean_of_counted(op, losses, targets)


# -- The plain loss compiled by torch.compile: what inductor's code allocates and what its partitioner saves -----------
#
# Read from the allocator's history of torch 2.13 on the stand-in for NVIDIA's libraries (tests/on_stand_in/simulate).
# One kernel reads the logits for each row's maximum and sum (online softmax), and one writes their gradient in their
# own dtype. Not modelled: the partial results, a few numbers a row, with which several blocks share a row where there
# are fewer than two rows a multiprocessor (torch/_inductor/ir.py, Reduction.num_splits).

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


# -- LigerCrossEntropyLoss and LigerFusedLinearCrossEntropyLoss of liger_kernel (0.8), with their defaults -------------
#
# Both compute their gradients in forward, into tensors that are there already, and scale them in backward, unless the
# gradient of the loss is 1.

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
        op.tape.cast(self.weight.numel, self.weight.itemsize, itemsize)
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


# -- torch.nn.functional.cross_entropy on the whole logits, or on chunks of them ---------------------------------------

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
