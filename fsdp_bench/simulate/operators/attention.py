"""aten::scaled_dot_product_attention: which kernel runs, what it needs first, saves and allocates.

CPU: flash attention for every dtype and head. CUDA: flash attention for 16 bits, whose heads are padded to a multiple
of eight (aten/native/transformers/attention.cpp, pad_last_dim); memory-efficient attention for fp32, whose rows are
rounded to 32 and which knows no grouped keys, so these are repeated (train/models/transformer.py, attention). Both
return a random state even without dropout: flash attention's is on the GPU, the other's on the host. Before sm80 there
is no flash attention: fp16 without grouped keys takes the memory-efficient one, the rest unfused_attention.py.
"""

from collections.abc import Sequence
from functools import partial

import msgspec

from fsdp_bench.simulate.autograd import Backward, Gradients
from fsdp_bench.simulate.operators.core import Operators, Saved
from fsdp_bench.simulate.operators.kernel_workspaces import workspace_of
from fsdp_bench.simulate.operators.kernels import FP32
from fsdp_bench.simulate.operators.unfused_attention import repeat_heads, unfused_attention
from fsdp_bench.simulate.tape import Storage, Tensor
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.pointwise import STRIDED

_NAME = "aten::scaled_dot_product_attention"
_FLASH = "aten::_scaled_dot_product_flash_attention"
_FLASH_ON_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"
_EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
"""The dispatcher's name of each kernel, by which checkpointing's policies know it."""
_HEAD_MULTIPLE = 8
_FP32_MULTIPLE = 4
"""aten/native/transformers/cuda/sdp_utils.cpp, check_head_dim_size_mem_efficient: 16 bytes."""
_FLASH_STATE = 16, 8
"""Bytes of the random state's two tensors."""


class Heads(msgspec.Struct, frozen=True, gc=False):
    """The shape of one call."""

    count: int
    groups: int
    """Heads that share one key and value."""
    dim: int
    length: int
    """Tokens of a sequence."""
    are_slices: bool = False
    """Whether queries, keys and values are parts of one product's rows."""

    def are_unfused(self, op: Operators, itemsize: int) -> bool:
        """Whether no fused kernel takes them: before sm80 in 16 bits bf16, grouped keys, and heads of odd sizes."""
        if not op.kernels.is_before_sm80 or itemsize == FP32:
            return False
        return op.computes_in_bf16 or self.groups > 1 or self.dim % _HEAD_MULTIPLE != 0

    def are_padded(self, op: Operators, itemsize: int) -> bool:
        """Whether flash attention pads them."""
        return itemsize != FP32 and self.dim % _HEAD_MULTIPLE != 0 and not op.kernels.is_before_sm80


def split_heads(op: Operators, x: Tensor, heads: Heads, is_query: bool) -> Tensor:
    """train/models/transformer.py, split_heads: views, unless the gradient comes head by head.

    Kernels give gradients in the order of the merged heads. A gradient that was cut off padding, summed over repeated
    keys, or comes of single operators, is contiguous head by head, so that the view's backward copies it (aten::clone
    in reshape).
    """
    comes_by_head = heads.are_padded(op, x.itemsize) or heads.are_unfused(op, x.itemsize)
    is_repeated = x.itemsize == FP32 and heads.groups > 1 and not is_query
    if heads.count == (1 if is_query else heads.groups) or heads.dim == 1 or heads.length == 1:
        return x  # of one head, one number or one token both orders are the same
    if not op.kernels.is_cuda or not (comes_by_head or is_repeated):
        return x
    return op.record(x.detach(), [x], [], _copied_gradient(op, "aten::clone", x.numel))


def _copied_gradient(op: Operators, name: str, numel: int) -> Backward:
    """Return a backward that copies the gradient into a tensor of so many elements."""

    def backward(_saved: Saved, gradients: list[Tensor]) -> Gradients:
        op.run(name, gradients[0], gradients[0], path=STRIDED)
        return (op.temporary(numel, gradients[0].itemsize, name),)

    return backward


def merge_heads(op: Operators, x: Tensor, heads: Heads) -> Tensor:
    """merge_heads of train/models/transformer.py: a view, or a copy of heads without their padding (aten::clone).

    Single operators return them head by head, which is copied, too.
    """
    padded = x.numel
    tokens = op.batch * heads.length
    numel = tokens * heads.count * heads.dim
    if heads.are_unfused(op, x.itemsize) and heads.count > 1 and heads.length > 1:
        op.run("aten::clone", x, x, path=STRIDED)
        return op.record(op.like(x, "aten::clone"), [x], [], lambda _saved, gradients: (gradients[0],))
    if padded == numel:
        return x
    backward = _copied_gradient(op, "aten::slice_backward", padded)
    if heads.count == tokens == 1:  # a single row
        return op.record(Tensor(x.storage, numel, x.itemsize), [x], [], backward)
    op.run("aten::clone", x, x, path=STRIDED)
    return op.record(op.like(x, "aten::clone", numel), [x], [], backward)


def attention(op: Operators, q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """Queries, keys and values to the heads' outputs, which are padded as the kernel needs it."""
    if not op.kernels.is_cuda:
        return _kernel(op, _FLASH_ON_CPU, (q, k, v), heads, op.batch * heads.count * heads.length)
    if heads.are_unfused(op, q.itemsize):
        return unfused_attention(op, q, k, v, heads.count, heads.groups, heads.length)
    if q.itemsize == FP32 or op.kernels.is_before_sm80:
        if q.itemsize == FP32 and heads.dim % _FP32_MULTIPLE and not op.kernels.is_before_sm80:
            raise SpecError(
                f"head size {heads.dim}: in fp32 CUDA's fused attention wants a multiple of {_FP32_MULTIPLE}; torch"
                " falls back to the unfused kernel, whose memory is unknown here; use bf16, or another head size"
            )
        if heads.groups > 1:
            k, v = repeat_heads(op, k, heads.groups), repeat_heads(op, v, heads.groups)
        return _kernel(op, _EFFICIENT, (q, k, v), heads, op.batch * heads.count * -(-heads.length // 32) * 32)
    return _flash(op, q, k, v, heads)


def _flash(op: Operators, q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    padded_dim = -(-heads.dim // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    if padded_dim != heads.dim:
        q, k, v = (_pad(op, x, x.numel // heads.dim * padded_dim) for x in (q, k, v))
    rows = op.batch * heads.count * heads.length
    # _flash_attention_backward makes output and gradient contiguous, which follow the padded queries head by head.
    copies = padded_dim != heads.dim and heads.count > 1 and heads.length > 1 and not op.kernels.observed
    return _kernel(op, _FLASH, (q, k, v), heads, rows, _FLASH_STATE, 2 * copies)


def _kernel(
    op: Operators,
    operator: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    heads: Heads,
    rows: int,
    state: Sequence[int] = (),
    num_copies: int = 0,
) -> Tensor:
    """Run the kernel: the output, the logarithm of each row's sum, the random state; saves them and its inputs.

    Its other allocations live until it has allocated everything; so do ``num_copies`` copies of tensors like the
    output, with which its backward begins. An output that was token by token and has been in host memory is back head
    by head, and flash attention makes it contiguous token by token.
    """
    (q, k, v), tape = inputs, op.tape
    numels, itemsize = (q.numel, k.numel, v.numel), q.itemsize
    size = op.batch, heads.count, heads.count // heads.groups, heads.length
    dims = (*size, heads.length, q.numel // (op.batch * heads.count * heads.length), 1)
    in_forward, in_backward = (
        workspace_of(operator + which, dims, itemsize, op.kernels, results=(q.numel * itemsize,))
        for which in ("", "_backward")
    )

    def issue(name: str, passes: int) -> None:
        tape.attention(name, (*size, heads.dim), passes * (sum(numels) + numels[0]) * itemsize, itemsize)

    def kernel() -> Tensor:
        issue(_NAME, 1)
        return tape.tensor(numels[0], itemsize, _NAME)

    scratch: list[Storage] = []

    def log_sums() -> Tensor:
        sums = tape.tensor(rows, FP32, _NAME)
        scratch.extend(op.scratch(in_forward.after_second, _NAME))
        return sums

    out = op.saved_output(operator, kernel)
    extra = [op.saved_output(operator, log_sums)]
    extra += [op.saved_output(operator, partial(tape.tensor, 1, size, _NAME)) for size in state]
    scratch.clear()

    def backward(saved: Saved, gradients: list[Tensor]) -> Gradients:
        itemsize = gradients[0].itemsize
        opened = saved.copy()
        issue(_NAME + "_backward", 2)
        came_from_host = is_flash and saved_strided and not opened[3].is_strided
        _copies = [op.temporary(numels[0], itemsize, "aten::clone") for _ in range(num_copies + came_from_host)]
        results = [op.temporary(numel, itemsize, _NAME + "_backward") for numel in numels]
        _workspace = op.scratch(in_backward.after, _NAME + "_backward")
        return results

    saved = [one.detach() for one in (q, k, v, out)]
    for tensor, count in zip(saved, _heads_of(op, heads, itemsize), strict=True):
        tensor.is_strided = count > 1 and heads.length > 1
    saved_strided, is_flash = saved[3].is_strided, operator == _FLASH and not op.kernels.observed
    for tensor in saved[:3]:
        tensor.is_strided |= heads.are_slices and op.batch * heads.length > 1 and not heads.are_padded(op, itemsize)
    return op.record(out, [q, k, v], [*saved, *extra], backward)


def _heads_of(op: Operators, heads: Heads, itemsize: int) -> tuple[int, int, int, int]:
    """Return how many heads of queries, keys, values and output follow each other within a token; else one.

    Padded or repeated tensors are contiguous head by head.
    """
    if heads.are_padded(op, itemsize):
        return 1, 1, 1, 1
    keys = heads.count // heads.groups if itemsize != FP32 or heads.groups == 1 else 1
    return heads.count, keys, keys, heads.count


def _pad(op: Operators, x: Tensor, numel: int) -> Tensor:
    """aten::constant_pad_nd; its gradient is a copy of the part that was not padding."""
    out = op.like(x, "aten::constant_pad_nd", numel)
    op.run("aten::constant_pad_nd", x, out)
    return op.record(out, [x], [], _copied_gradient(op, "aten::constant_pad_nd", x.numel))
