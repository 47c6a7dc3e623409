"""aten::_scaled_dot_product_attention_math: attention of single operators, which keeps all heads' weights in fp32.

torch runs it where no fused kernel takes the tensors (transformers/attention.cpp). In 16 bits it computes in fp32.
"""

from typing import NamedTuple

from fsdp_bench.simulate.autograd import Gradients, operator_node
from fsdp_bench.simulate.operators.core import Operators, Saved
from fsdp_bench.simulate.operators.kernels import BOOL, FP32
from fsdp_bench.simulate.tape import Tensor
from fsdp_bench.spec.pointwise import STRIDED


class _Sizes(NamedTuple):
    """The shape of one call."""

    rows: int
    """Sequences times heads: the matrices of a batched product."""
    length: int
    dim: int
    is_one_by_one: bool
    """Whether heads follow each other token by token, so that a batched product needs a copy head by head."""


def unfused_attention(op: Operators, q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int, length: int) -> Tensor:
    """Causal attention of 16-bit queries, keys and values; the output is contiguous head by head."""
    itemsize, dim = q.itemsize, q.numel // (op.batch * heads * length)
    sizes = _Sizes(op.batch * heads, length, dim, op.batch > 1 and heads > 1 and length > 1)
    q32, k32, v32 = (op.to(x, FP32) for x in (q, k, v))
    scaled = _scale(op, q32)
    mask = _causal_mask(op, length)
    keys, values = (k32, v32) if groups == 1 else (repeat_heads(op, k32, groups), repeat_heads(op, v32, groups))
    are_copied = sizes.is_one_by_one and groups == 1
    weights = _scores(op, scaled, _scale(op, keys), sizes, are_copied)
    weights = _add_mask(op, weights, mask)
    weights = _softmax(op, weights, sizes)
    _returned_with_it = op.to(weights, itemsize)
    return op.to(_weighted(op, weights, values, sizes, are_copied), itemsize)


def repeat_heads(op: Operators, x: Tensor, times: int) -> Tensor:
    """aten::repeat_interleave along the heads: expanded, then cloned; the gradient is summed over the copies."""
    numel = x.numel

    def backward(_saved: Saved, gradients: list[Tensor]) -> Gradients:
        op.run("aten::sum", gradients[0])
        return (op.temporary(numel, gradients[0].itemsize, "aten::sum"),)

    out = op.like(x, "aten::clone", numel * times)
    op.run("aten::clone", x, out, path=STRIDED)
    return op.record(out, [x], [], backward)


def _scale(op: Operators, x: Tensor) -> Tensor:
    """aten::mul by a number (MulBackward1)."""

    def backward(_saved: Saved, gradients: list[Tensor]) -> Gradients:
        product = op.temporary(gradients[0].numel, FP32, "aten::mul")
        op.run("aten::mul", gradients[0], product)
        return (product,)

    return op.record(op.elementwise("aten::mul", x.numel, FP32, x), [x], [], backward)


def _add_mask(op: Operators, weights: Tensor, mask: Tensor) -> Tensor:
    """Add the mask in place, but where selective checkpointing's mode watches (areAnyTensorSubclassLike)."""
    if op.tape.kept is None:
        op.run("aten::add_", weights, mask, weights, path=STRIDED)
        return weights
    out = op.elementwise("aten::add", weights.numel, FP32, weights, mask, path=STRIDED)
    out.node, out.output = weights.node, weights.output  # AddBackward0 passes the gradient on
    return out


def _causal_mask(op: Operators, length: int) -> Tensor:
    """at::ones(...).tril() and convert_boolean_attn_mask: zeros and -inf in fp32."""
    tape, numel = op.tape, length * length
    ones = tape.tensor(numel, BOOL, "aten::ones")
    lower = tape.tensor(numel, BOOL, "aten::tril")
    op.run("aten::tril", ones, lower)
    del ones
    _minus_infinity = tape.tensor(1, FP32, "aten::scalar_tensor")
    _zero = tape.tensor(1, FP32, "aten::scalar_tensor")
    mask = tape.tensor(numel, FP32, "aten::where")
    op.run("aten::where", lower, mask)
    return mask


def _copied(op: Operators, x: Tensor) -> Tensor:
    """Expand and reshape in at::matmul: a copy head by head, whose gradient is the copy's own."""
    out = op.like(x, "aten::clone")
    op.run("aten::clone", x, out, path=STRIDED)
    return op.record(out, [x], [], lambda _saved, gradients: (gradients[0],))


def _scores(op: Operators, q: Tensor, k: Tensor, sizes: _Sizes, are_copied: bool) -> Tensor:
    """aten::bmm of queries and transposed keys (BmmBackward0 saves both)."""
    if sizes.is_one_by_one:
        q = _copied(op, q)
    if are_copied:
        k = _copied(op, k)
    return _product(op, q, k, (sizes.rows * sizes.length, sizes.length, sizes.dim), "nt", sizes)


def _weighted(op: Operators, weights: Tensor, v: Tensor, sizes: _Sizes, are_copied: bool) -> Tensor:
    """aten::bmm of weights and values; its gradient comes token by token and is copied head by head."""
    if are_copied:
        v = _copied(op, v)
    out = _product(op, weights, v, (sizes.rows * sizes.length, sizes.dim, sizes.length), "nn", sizes)

    def backward(_saved: Saved, gradients: list[Tensor]) -> Gradients:
        if not sizes.is_one_by_one:
            return (gradients[0],)
        op.run("aten::clone", gradients[0], gradients[0], path=STRIDED)
        return (op.temporary(gradients[0].numel, FP32, "aten::clone"),)

    return op.record(out.detach(), [out], [], backward)


def _product(op: Operators, a: Tensor, b: Tensor, dims: tuple[int, int, int], layout: str, sizes: _Sizes) -> Tensor:
    """aten::bmm, as one product with so many more rows; the second matrix's gradient is computed first."""
    rows, columns, inner = dims
    numels = a.numel, b.numel

    def gradient(numel: int, m: int, n: int, k: int) -> Tensor:
        op.tape.product(layout, m, n, k, FP32)
        out = op.temporary(numel, FP32, "aten::bmm")
        op.make_workspace(in_backward=True)
        return out

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        second = gradient(numels[1], sizes.rows * inner, columns, sizes.length)
        first = gradient(numels[0], rows, inner, columns)
        del opened
        return first, second

    node = operator_node(op.tape, backward, [a, b], [a.detach(), b.detach()]) if op.tape.grad_enabled else None

    def product() -> Tensor:
        op.tape.product(layout, rows, columns, inner, FP32)
        out = op.tape.tensor(rows * columns, FP32, "aten::bmm")
        op.make_workspace(op.tape.in_backward)
        return out

    out = op.saved_output("aten::bmm", product)
    out.node = node
    return out


def _softmax(op: Operators, scores: Tensor, sizes: _Sizes) -> Tensor:
    """aten::_safe_softmax (its backward saves the result): which rows have nothing but -inf is a mask beside it."""
    numel = scores.numel

    def backward(saved: Saved, gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        op.run("aten::_softmax_backward_data", gradients[0], *opened, gradients[0])
        result = op.temporary(numel, FP32, "aten::_softmax_backward_data")
        # softmax_backward_cuda_out (SoftMax.cu): tmp = grad * output
        _product = op.scratch([numel * FP32], "aten::_softmax_backward_data")
        del opened
        return (result,)

    def softmax() -> Tensor:
        out = op.like(scores, "aten::_safe_softmax")
        op.run("aten::_safe_softmax", scores, out)
        _inside = op.scratch((numel * BOOL, sizes.rows * sizes.length * BOOL, FP32), "aten::_safe_softmax")
        return out

    out = op.saved_output("aten::_safe_softmax", softmax)
    return op.record(out, [scores], [out.detach()], backward)
