"""What single operators take: matrix products, attention, what memory bounds, copies, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_bench.spec.profile import AttentionTime, CopyTime, MatmulTime, OperatorTime, OptimizerTime
from fsdp_bench.spec.setup import OptimizerKind
from fsdp_bench.train.dtypes import DTYPES
from fsdp_bench.train.optimizer import build_optimizer
from fsdp_bench.train.stopwatch import Stopwatch

SIDES = {"cpu": (64, 256, 1024, 4096), "cuda": (512, 2048, 8192)}
"""Sides of matrix products: all their combinations that are not too large."""
LARGEST_FLOPS = {"cpu": 9e9, "cuda": 1.2e12}
LENGTHS = {"cpu": (128, 512), "cuda": (512, 2048, 8192)}
HEAD_DIMS = (64, 128)
NUMELS = {"cpu": (2**8, 2**15, 2**18, 2**21), "cuda": (2**10, 2**20, 2**24, 2**27)}
ROW = 256
"""Columns of what is summed, normalised or looked up."""
COPIES = (2**16, 2**22, 2**27)
TENSORS = {"cpu": ((1, 2**12), (32, 2**17), (4, 2**21)), "cuda": ((1, 2**12), (256, 2**20), (8, 2**27))}
"""Tensors and elements of all of them together."""


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes that are worth timing."""
    return ("fp32", "bf16", "fp16") if device.type == "cuda" else ("fp32", "bf16")


def matmul_times(watch: Stopwatch) -> Iterator[MatmulTime]:
    """Time matrix products as a linear layer's forward and its two gradients run them."""
    device, sides = watch.device, SIDES[watch.device.type]
    for dtype, (m, n, k) in product(dtypes_of(device), product(sides, repeat=3)):
        if 2 * m * n * k > LARGEST_FLOPS[device.type]:
            continue
        one = {"device": device, "dtype": DTYPES[dtype]}
        for layout, call in _products(m, n, k, one):
            yield MatmulTime(layout=layout, dtype=dtype, m=m, n=n, k=k, seconds=watch.seconds(call))


def _products(m: int, n: int, k: int, one: dict[str, object]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield calls on random numbers: what a product takes depends on them where power is limited."""
    left, right = torch.randn(m, k, **one), torch.randn(k, n, **one)  # type: ignore[call-overload]
    right_transposed, left_transposed = right.t().contiguous(), left.t().contiguous()
    yield "nt", lambda: F.linear(left, right_transposed)
    yield "nn", lambda: left @ right
    yield "tn", lambda: left_transposed.t() @ right


def attention_times(watch: Stopwatch) -> Iterator[AttentionTime]:
    """Time causal attention of one sequence, forward alone and backward alone."""
    heads, device = 8, watch.device
    for dtype, length, head_dim in product(dtypes_of(device), LENGTHS[device.type], HEAD_DIMS):
        q, k, v = (
            torch.randn(1, heads, length, head_dim, device=device, dtype=DTYPES[dtype], requires_grad=True)
            for _ in range(3)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradient = torch.randn_like(out)
        calls: dict[bool, Callable[[], object]] = {
            False: lambda q=q, k=k, v=v: F.scaled_dot_product_attention(  # type: ignore[misc]
                q.detach(), k.detach(), v.detach(), is_causal=True
            ),
            True: lambda out=out, q=q, k=k, v=v, gradient=gradient: torch.autograd.grad(  # type: ignore[misc]
                out, (q, k, v), gradient, retain_graph=True
            ),
        }
        for backward, call in calls.items():
            seconds = watch.seconds(call)
            yield AttentionTime(
                backward=backward, dtype=dtype, heads=heads, length=length, head_dim=head_dim, seconds=seconds
            )


def operator_times(watch: Stopwatch) -> Iterator[OperatorTime]:
    """Time the operators of a step that memory bounds, under the names that the prediction gives them."""
    for dtype, numel in product(dtypes_of(watch.device), NUMELS[watch.device.type]):
        for name, passes, call in _operators(numel, DTYPES[dtype], watch.device):
            num_bytes = round(passes * numel * DTYPES[dtype].itemsize)
            yield OperatorTime(operator=name, dtype=dtype, num_bytes=num_bytes, seconds=watch.seconds(call))


def _operators(
    numel: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Yield name, how often an element is read or written, and the call."""
    aten = torch.ops.aten
    x, y, z = (torch.randn(numel, device=device, dtype=dtype) for _ in range(3))
    rows, indices = x.view(-1, ROW), torch.arange(numel // ROW, device=device)
    weight = torch.ones(ROW, device=device, dtype=dtype)
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    cast = 1 + other.itemsize / dtype.itemsize
    yield "aten::add", 3, lambda: aten.add(x, y)
    yield "aten::add_", 3, lambda: aten.add_(z, y)
    yield "aten::mul", 3, lambda: aten.mul(x, y)
    yield "aten::mul_out", 2, lambda: torch.mul(x, 0.5, out=z)
    yield "aten::div_", 2, lambda: aten.div_(z, 1.0)
    yield "aten::neg", 2, lambda: aten.neg(x)
    yield "aten::pow", 2, lambda: aten.pow(x, 2)
    yield "aten::cat", 2, lambda: aten.cat([x[: numel // 2], x[numel // 2 :]])
    yield "aten::clone", 2, lambda: aten.clone(x)
    yield "aten::copy_", 2, lambda: z.copy_(x)
    yield "aten::_to_copy", cast, lambda: x.to(other)
    yield "aten::sum", 1, lambda: rows.sum(0)
    yield "aten::mean", 1, lambda: rows.mean(1)
    yield "aten::silu", 2, lambda: aten.silu(x)
    yield "aten::silu_backward", 3, lambda: aten.silu_backward(y, x)
    yield "aten::gelu", 2, lambda: aten.gelu(x, approximate="tanh")
    yield "aten::gelu_backward", 3, lambda: aten.gelu_backward(y, x, approximate="tanh")
    yield "aten::embedding", 2, lambda: aten.embedding(rows, indices)
    yield (
        "aten::embedding_dense_backward",
        4,
        lambda: aten.embedding_dense_backward(rows, indices, len(indices), -1, False),
    )
    if device.type == "cuda":
        yield "aten::_fused_rms_norm", 2, lambda: F.rms_norm(rows, [ROW], weight)
    mean_and_root = aten.native_layer_norm(rows, [ROW], weight, weight, 1e-5)[1:]
    yield "aten::native_layer_norm", 2, lambda: aten.native_layer_norm(rows, [ROW], weight, weight, 1e-5)
    yield (
        "aten::native_layer_norm_backward",
        5,
        lambda: aten.native_layer_norm_backward(rows, rows, [ROW], *mean_and_root, weight, weight, [True, True, True]),
    )
    yield "aten::_log_softmax", 2, lambda: aten._log_softmax(rows, 1, False)
    yield (
        "aten::_log_softmax_backward_data",
        4,
        lambda: aten._log_softmax_backward_data(rows, rows, 1, dtype),
    )


def copy_times(watch: Stopwatch) -> Iterator[CopyTime]:
    """Time copies between pinned memory and a GPU; on a CPU there are none."""
    if watch.device.type != "cuda":
        return
    for num_bytes in COPIES:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(num_bytes, dtype=torch.uint8, device=watch.device)
        to_device = watch.seconds(lambda h=host, d=device: d.copy_(h, non_blocking=True))  # type: ignore[misc]
        to_host = watch.seconds(lambda h=host, d=device: h.copy_(d, non_blocking=True))  # type: ignore[misc]
        yield CopyTime(direction="to_device", num_bytes=num_bytes, seconds=to_device)
        yield CopyTime(direction="to_host", num_bytes=num_bytes, seconds=to_host)


def optimizer_times(watch: Stopwatch) -> Iterator[OptimizerTime]:
    """Time every optimizer's step on the device, and beside a GPU also in host memory."""
    places = [("", watch.device)]
    if watch.device.type == "cuda":
        places.append(("host ", torch.device("cpu")))
    for (prefix, device), kind in product(places, OptimizerKind):
        for num_tensors, numel in TENSORS[device.type]:
            step = _optimizer_step(kind, num_tensors, numel, device)
            yield OptimizerTime(
                kind=prefix + kind.value, num_tensors=num_tensors, num_elements=numel, seconds=watch.seconds(step)
            )


def _optimizer_step(kind: OptimizerKind, num_tensors: int, numel: int, device: torch.device) -> Callable[[], object]:
    parameters = [torch.nn.Parameter(torch.randn(numel // num_tensors, device=device)) for _ in range(num_tensors)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return build_optimizer(parameters, kind, 1e-4).step
