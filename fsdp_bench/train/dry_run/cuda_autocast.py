"""CUDA's autocast for the fake accelerator, whose tensors have CPU dispatch keys but are not CPU tensors.

AutocastCPU's kernels cast only tensors on a CPU (aten/src/ATen/autocast_mode.h, is_eligible), so they would
cast nothing; these kernels replace them. The lists are those of AutocastCUDA. Not covered: its promote list.
What AutocastCPU alone has a kernel for falls through: there autocast would end for all that the operator calls, as for
the nll_loss inside of cross_entropy_loss, which CUDA casts to fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_bench.train.dry_run.fake_gpu import NAME

KEY = "AutocastCPU"

_LOWER_PRECISION = (
    *("linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "prelu"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("_convolution", "chain_matmul", "linalg_multi_dot", "scaled_dot_product_attention"),
)
_FP32 = (
    *("rms_norm", "layer_norm", "group_norm", "native_layer_norm", "norm.Scalar", "norm.ScalarOpt_dim"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "exp", "expm1", "log", "log10", "log1p", "log2"),
    *("logsumexp", "rsqrt", "reciprocal", "softplus", "dist", "cosine_similarity", "acos", "asin", "cosh", "sinh"),
    *("tan", "erfinv", "pdist", "renorm", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy_with_logits", "kl_div", "cosine_embedding_loss", "cdist"),
)
_FP32_RESULT = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod", "prod")

_cache: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}


def clear_cache() -> None:
    """Clear the cache of cast parameters, when the outermost autocast ends."""
    _cache.clear()


def register(library: torch.library.Library) -> None:
    """Register the kernels with a library."""
    for names, make in ((_LOWER_PRECISION, _lower), (_FP32, _fp32), (_FP32_RESULT, _fp32_result)):
        for name in names:
            library.impl(name, make(operator_of(name)), KEY)
    for name in _of_cpu_alone():
        library.impl(name, torch.library.fallthrough_kernel, KEY)


def _of_cpu_alone() -> list[str]:
    """Return the aten operators that AutocastCPU has kernels for, and AutocastCUDA has not."""
    has, prefix = torch._C._dispatch_has_kernel_for_dispatch_key, "aten::"
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)]
    return [name.removeprefix(prefix) for name in names if has(name, KEY) and not has(name, "AutocastCUDA")]


def operator_of(name: str) -> Any:
    """Return the aten operator of ``name`` or ``name.overload``."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast as cached_cast in autocast_mode.cpp does: a parameter is cast once within the outermost autocast."""
    if isinstance(value, list | tuple):
        return type(value)(_cast(part, dtype) for part in value)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.device.type != NAME:
        return value
    if value.dtype == dtype or value.dtype == torch.float64:
        return value
    parameter = value.requires_grad and value.is_leaf and not value._is_view() and dtype != torch.float32
    if not (parameter and value.dtype == torch.float32 and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    found = _cache.get(id(value))
    if found is None or found[0]() is not value:
        found = _cache[id(value)] = (weakref.ref(value), value.to(dtype))
    return found[1]


def _casting(operator: Any, dtype_of: Callable[[], torch.dtype]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of()
        with _without_autocast():
            named = {key: _cast(value, dtype) for key, value in kwargs.items()}
            last_first = [_cast(value, dtype) for value in reversed(args)]  # the order in which gcc evaluates arguments
            return operator(*reversed(last_first), **named)

    return call


def _lower(operator: Any) -> Callable[..., Any]:
    return _casting(operator, lambda: torch.get_autocast_dtype("cpu"))


def _fp32(operator: Any) -> Callable[..., Any]:
    return _casting(operator, lambda: torch.float32)


def _fp32_result(operator: Any) -> Callable[..., Any]:
    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        half = first.dtype in (torch.float16, torch.bfloat16) and first.device.type == NAME
        names_dtype = any(isinstance(value, torch.dtype) for value in args)
        if half and kwargs.get("dtype") is None and not names_dtype:
            kwargs["dtype"] = torch.float32
        with _without_autocast():
            return operator(first, *args, **kwargs)

    return call
