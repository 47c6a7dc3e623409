"""What CUDA's fused kernels allocate and save, on the fake accelerator; a CPU's torch would decompose them.

    F.scaled_dot_product_attention  16-bit: aten::_scaled_dot_product_flash_attention, which saves queries, keys, values,
                                    output and logsumexp; fp32, or with a mask: the memory-efficient one
    F.rms_norm                      aten::_fused_rms_norm, which saves input, weight and rstd
    autocast                        AutocastCUDA's fp32 list (norms, softmax, ...), on top of a CPU's own lists

Attention's are torch's own operators with torch's own shape functions and autograd formulas; only the choice among
them is made here, as aten/src/ATen/native/transformers/cuda/sdp_utils.cpp makes it. Not covered: what the kernels
allocate while they run, and cuDNN's attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsdp_bench.train.fake_gpu import NAME

_HALF = (torch.float16, torch.bfloat16)

_FP32_UNDER_AUTOCAST = {
    *("rms_norm", "layer_norm", "group_norm", "native_layer_norm", "norm", "pow", "__pow__", "__rpow__"),
    *("exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "rsqrt", "reciprocal", "softplus", "dist"),
    *("cosine_similarity", "acos", "asin", "cosh", "sinh", "tan", "erfinv", "pdist", "renorm"),
}
_FP32_RESULT_UNDER_AUTOCAST = {"softmax", "log_softmax", "sum", "cumsum", "cumprod"}
"""Operators of AutocastCUDA's two fp32 lists (aten/src/ATen/autocast_mode.h) that AutocastCPU has not."""


class FusedKernels(TorchFunctionMode):
    """Sends torch's functions on the fake accelerator to what a GPU would run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a function, or call it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _FUSED and _on_accelerator(args):
            args, kwargs = _under_autocast(name, args, kwargs)
            with torch.autocast("cpu", enabled=False):
                return _FUSED[name](func, *args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if name in _FP32_UNDER_AUTOCAST and _on_accelerator(args):
                with torch.autocast("cpu", enabled=False):
                    return func(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))
            if name in _FP32_RESULT_UNDER_AUTOCAST and _on_accelerator(args) and args[0].dtype in _HALF:
                return func(*args, **{"dtype": torch.float32, **kwargs})
        return func(*args, **kwargs)


def _on_accelerator(args: Any) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].device.type == NAME


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors among arguments."""
    if isinstance(values, dict):
        return {key: _cast(value, dtype) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_cast(value, dtype) for value in values)
    return values.to(dtype) if isinstance(values, Tensor) and values.is_floating_point() else values


def _under_autocast(name: str, args: Any, kwargs: Any) -> Any:
    if not torch.is_autocast_enabled("cpu"):
        return args, kwargs
    dtype = torch.float32 if name == "rms_norm" else torch.get_autocast_dtype("cpu")
    return _cast(args, dtype), _cast(kwargs, dtype)


def _attention(
    original: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention on B, H, S, E."""
    grouped = query.shape[-3] != key.shape[-3]
    width = query.shape[-1]
    if query.dim() == 4 and query.dtype in _HALF and attn_mask is None and width <= 256:
        padding = -width % 8
        if padding:  # sdp_utils: pad_last_dim<8>; the scale stays that of the unpadded width
            query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
            scale = scale or width**-0.5
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if padding else out
    if query.dim() == 4 and not grouped and width * query.element_size() % 16 == 0:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[-2])
        result: Tensor = efficient(query, key, value, attn_mask, graph, dropout_p, is_causal, scale=scale)[0]
        return result
    unfused: Tensor = original(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return unfused


class _FusedRMSNorm(torch.autograd.Function):
    """aten::_fused_rms_norm (native/cuda/layer_norm_kernel.cu): rstd is fp32, one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = (*x.shape[: x.dim() - num_dims], *[1] * num_dims)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, _rstd = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        needs_dw = weight is not None and ctx.needs_input_grad[1]
        return dx, torch.empty_like(weight) if needs_dw else None, None


def _rms_norm(
    original: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """torch.nn.functional.rms_norm; two dtypes are not fused (native/layer_norm.cpp, rms_norm_symint)."""
    if weight is not None and weight.dtype != input.dtype:
        mixed: Tensor = original(input, normalized_shape, weight, eps)
        return mixed
    out: Tensor = _FusedRMSNorm.apply(input, weight, len(normalized_shape))
    return out


_FUSED = {"scaled_dot_product_attention": _attention, "rms_norm": _rms_norm}
