"""RMSNorm and LayerNorm: what they allocate, save for backward and compute."""

from functools import partial

from fsdp_bench.simulate.autograd import Gradients
from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.operators.core import Operators, Parameter, Saved
from fsdp_bench.simulate.operators.kernels import FP32
from fsdp_bench.simulate.tape import Tensor
from fsdp_bench.spec.pointwise import STRIDED


def rms_norm(op: Operators, x: Tensor, weight: Parameter) -> Tensor:
    """aten::_fused_rms_norm, or rms_norm_composite (aten/native/layer_norm.cpp) from elementary operators."""
    if op.kernels.is_cuda and not op.kernels.composite_norms:
        return fused_norm(op, x, weight, None)
    rows = x.numel // weight.numel
    upcast = op.to(x, FP32)
    scale = _reciprocal_root(op, upcast, rows)
    normalized = op.mul_broadcast(upcast, scale)
    out = op.mul_broadcast(normalized, weight, Category.GRADIENTS)
    del normalized, upcast
    return op.to(out, x.itemsize)


def _reciprocal_root(op: Operators, x: Tensor, rows: int) -> Tensor:
    """aten::pow, mean, add_, rsqrt: 1 / sqrt(mean(x^2) + eps) of each row, as one node."""
    squares = op.tape.tensor(x.numel, FP32, "aten::pow")
    mean = op.tape.tensor(rows, FP32, "aten::mean")
    out = op.tape.tensor(rows, FP32, "aten::rsqrt")
    op.run("aten::pow", x, squares)
    op.run("aten::mean", squares, mean)
    op.run("aten::add", mean, mean)
    op.run("aten::rsqrt", mean, out)
    del mean, squares
    numel = x.numel

    def backward(saved: Saved, gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        powers = op.temporary(rows, FP32, "aten::pow")
        scaled = op.temporary(rows, FP32, "aten::mul")
        to_mean = op.temporary(rows, FP32, "aten::mul")
        for small in (powers, scaled, to_mean):
            op.run("aten::mul", gradients[0], small, small)
        del small, scaled, powers
        gradients.clear()
        opened.pop()
        saved.pop()
        spread = op.temporary(numel, FP32, "aten::div")
        del to_mean
        power = op.temporary(numel, FP32, "aten::pow")
        doubled = op.temporary(numel, FP32, "aten::mul")
        dx = op.temporary(numel, FP32, "aten::mul")
        op.run("aten::div", spread, spread, path=STRIDED)
        op.run("aten::pow", power, power)
        op.run("aten::mul", power, doubled)
        op.run("aten::mul", doubled, spread, dx)
        del doubled, power, spread
        return (dx,)

    return op.record(out, [x], [x, out.detach()], backward)


def fused_norm(op: Operators, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
    """aten::_fused_rms_norm or, with a bias, aten::native_layer_norm: one kernel.

    Returns the output; saves the inputs, and of each row one statistic (RMSNorm) or two (mean and rstd) in fp32.
    """
    rows, columns = x.numel // weight.numel, weight.numel
    name = "aten::native_layer_norm" if bias else "aten::_fused_rms_norm"
    out = op.elementwise(name, x.numel, x.itemsize, x)
    # CPU's native_layer_norm keeps mean and rstd in the input's dtype, CUDA's in fp32 (layer_norm_kernel.cu).
    size = FP32 if op.kernels.is_cuda else x.itemsize
    make = partial(op.tape.tensor, rows, size, "statistics")
    statistics = [op.saved_output(name, make) for _ in range(2 if bias else 1)]
    numel, itemsize = x.numel, x.itemsize

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        _opened = saved.copy()
        dx = op.temporary(numel, itemsize, "aten::native_layer_norm_backward")
        # Once for the input's gradient, and once more over both tensors for the weight's.
        op.tape.kernel(name + "_backward", 5 * numel * itemsize, itemsize)
        dw = op.tape.tensor(columns, weight.itemsize, "aten::native_layer_norm_backward", Category.GRADIENTS)
        if bias is None:
            return dx, dw
        db = op.tape.tensor(columns, weight.itemsize, "aten::native_layer_norm_backward", Category.GRADIENTS)
        return dx, dw, db

    inputs: list[Tensor] = [x, weight] if bias is None else [x, weight, bias]
    return op.record(out, inputs, [*inputs, *statistics], backward)
