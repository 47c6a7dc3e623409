"""Tensors that CUDA's fused kernels allocate and save, on the fake accelerator. A CPU build of torch decomposes them.

    attention   16-bit: aten::_scaled_dot_product_flash_attention, which saves queries, keys, values, output and
                logsumexp; fp32, or with a mask: the memory-efficient one; single operators where neither can.
                Before sm80 (V100, T4) there is no FlashAttention, and the memory-efficient one is not for bf16
    rms_norm    aten::_fused_rms_norm, which saves input, weight and rstd
    softmax     and log_softmax, from fp16 to fp32: one kernel, where other dtypes are cast first
    autocast    CUDA's lists, below

The attention operators and their autograd formulas are torch's own. Only the choice among them is made here, as in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Not covered: what the kernels allocate while they run,
and cuDNN's attention. The fake accelerator's tensors have CPU dispatch keys (workarounds.py), so the
replacements are registered for these keys, and removed at the end.
"""

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from fsdp_bench.train.dry_run.fake_gpu import NAME

_HALF = (torch.float16, torch.bfloat16)

_CAUGHT_AT = "AutogradCPU"
"""The dispatch key at which operators are replaced, before torch decomposes them."""


@contextmanager
def fused_kernels(before_sm80: bool = False) -> Iterator[None]:
    """Inside a ``with`` block, run on the fake accelerator the operators that a GPU would run.

    ``before_sm80``: one of compute capability 7.0 or 7.5.
    """
    library = torch.library.Library("aten", "IMPL")
    is_efficient = partial(operator.is_, torch.ops.aten._scaled_dot_product_efficient_attention.default)
    shapes = (is_efficient, _efficient_attention)
    fake_impls.op_implementations_checks.append(shapes)
    try:
        attention: Callable[..., Tensor] = partial(_attention, before_sm80=before_sm80)
        for name, fused in (("scaled_dot_product_attention", attention), *_FUSED.items()):
            library.impl(name, _on_accelerator(operator_of(name), fused), _CAUGHT_AT)
        register_autocast(library)
        yield
    finally:
        fake_impls.op_implementations_checks.remove(shapes)
        library._destroy()


def _on_accelerator(torchs: Any, fused: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.device.type != NAME:
            return torchs.decompose(first, *args, **kwargs)
        return fused(torchs.decompose, first, *args, **kwargs)

    return call


def _attention(
    _unfused: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    before_sm80: bool = False,
) -> Tensor:
    """Replace aten::scaled_dot_product_attention; tensors are B, H, S, E."""
    width, half = query.shape[-1], query.dtype in _HALF
    grouped, square = query.shape[-3] != key.shape[-3], query.shape[-2] == key.shape[-2]
    same_width = width == value.shape[-1]  # sdp_utils: check_head_dim_size_flash
    has_flash = not before_sm80 and half and attn_mask is None  # check_flash_attention_hardware_support
    if query.dim() == 4 and has_flash and width <= 256 and same_width and (square or not is_causal):
        padding = -width % 8
        if padding:  # pad_last_dim<8>; the scale stays that of the unpadded width
            query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
            scale = scale or width**-0.5
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if padding else out
    allowed = torch.backends.cuda.mem_efficient_sdp_enabled()  # sdpa_kernel() of the code itself may leave it out
    needs_alignment = half or not before_sm80  # minimum_gemm_alignment: that of tensor cores
    aligned = not any(tensor.shape[-1] * tensor.element_size() % 16 for tensor in (query, key, value))
    allowed &= (aligned or not needs_alignment) and not (before_sm80 and query.dtype is torch.bfloat16)
    if allowed and query.dim() == 4 and not grouped:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        result: Tensor = efficient(query, key, value, bias, graph, dropout_p, is_causal, scale=scale)[0]
        return result
    mask = None if attn_mask is None else _in_dtype(attn_mask, query)
    return _math(query, key, value, mask, dropout_p, is_causal, scale)


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Replace aten::_scaled_dot_product_attention_math (transformers/attention.cpp).

    PyTorch's own adds the mask in place but where a dispatch mode watches (areAnyTensorSubclassLike): the dry run's own
    does not count here, that of selective checkpointing does.
    """
    dtype, groups = query.dtype, query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    given = query, key, value
    if dtype in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        given = query.to(torch.float32), key.to(torch.float32), value.to(torch.float32)
    factor = (query.shape[-1] ** -0.5 if scale is None else abs(scale)) ** 0.5
    times = torch.ops.aten.mul.Scalar
    scaled = times(given[0], -factor if scale is not None and scale < 0 else factor)
    if is_causal:
        size = query.shape[-2], key.shape[-2]
        mask = _in_dtype(torch.ones(size, dtype=torch.bool, device=query.device).tril(), scaled)
    _, keys, values = given  # held to the end, as what is made of them
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, -3), values.repeat_interleave(groups, -3)
    weights = torch.matmul(scaled, times(keys.transpose(-2, -1), factor))
    if mask is not None:
        selective = _CachingTorchDispatchMode, _CachedTorchDispatchMode
        is_watched = any(isinstance(mode, selective) for mode in _get_current_dispatch_mode_stack())
        weights = weights.add(mask) if is_watched else weights.add_(mask)
    weights = torch.ops.aten._safe_softmax(weights, -1)
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    _returned_with_it = weights.to(dtype)
    return torch.matmul(weights, values).to(dtype)


def _in_dtype(mask: Tensor, query: Tensor) -> Tensor:
    """convert_boolean_attn_mask (transformers/attention.cpp): a mask of booleans becomes one of zeros and -inf."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=query.device))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as memory-efficient attention takes and saves it: in the dtype of the queries, rows padded to 8.

    aten/src/ATen/native/transformers/attention.cpp: convert_boolean_attn_mask, preprocess_mask.
    """
    mask = _in_dtype(mask, query)
    length = mask.shape[-1]
    if length % 8:
        mask = F.pad(mask, (0, -length % 8))[..., :length]
    return mask.expand(*query.shape[:3], key.shape[-2])


def _efficient_attention(
    mode: FakeTensorMode, kernel: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Return the outputs of the kernel, with the random state on the host as CUDA's kernel has it."""
    with in_kernel_invocation_manager(mode):
        out, log_sums, *_state = kernel(query, key, value, *args, **kwargs)
    results = [FakeTensor(mode, result, query.device) for result in (out, log_sums)]
    return *results, *(torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))


class _FusedRMSNorm(torch.autograd.Function):
    """aten::_fused_rms_norm (native/cuda/layer_norm_kernel.cu): rstd is fp32, one number for each row."""

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
    unfused: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Replace aten::rms_norm. Two different dtypes are not fused (native/layer_norm.cpp, rms_norm_symint)."""
    if weight is not None and weight.dtype != input.dtype:
        mixed: Tensor = unfused(input, normalized_shape, weight, eps)
        return mixed
    out: Tensor = _FusedRMSNorm.apply(input, weight, len(normalized_shape))
    return out


def _softmax(kernel: Any) -> Callable[..., Tensor]:
    """Return a replacement of aten::softmax.int or log_softmax.int: ``half_to_float`` in native/SoftMax.cpp."""

    def call(unfused: Any, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        casts_inside = input.dtype is torch.float16 and dtype is torch.float32
        out: Tensor = kernel(input, dim, True) if casts_inside else unfused(input, dim, dtype)
        return out

    return call


_FUSED: dict[str, Callable[..., Tensor]] = {
    "rms_norm": _rms_norm,
    "softmax.int": _softmax(torch.ops.aten._softmax.default),
    "log_softmax.int": _softmax(torch.ops.aten._log_softmax.default),
}


AUTOCAST_KEY = "AutocastCPU"

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

cast_parameters: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
"""The parameters that the outermost autocast has cast, by their identity."""


def register_autocast(library: torch.library.Library) -> None:
    """Register CUDA's autocast for the fake accelerator, whose tensors have CPU dispatch keys but are no CPU tensors.

    AutocastCPU's kernels cast only tensors on a CPU (aten/src/ATen/autocast_mode.h, is_eligible), so they would cast
    nothing; these kernels replace them. The lists are those of AutocastCUDA. Not covered: its promote list.
    Operators for which only AutocastCPU has a kernel fall through: there autocast would end for all that the operator
    calls, as for the nll_loss inside of cross_entropy_loss, which CUDA casts to fp32.
    """
    for name in _LOWER_PRECISION:
        library.impl(name, _casting(operator_of(name), lambda: torch.get_autocast_dtype("cpu")), AUTOCAST_KEY)
    for name in _FP32:
        library.impl(name, _casting(operator_of(name), lambda: torch.float32), AUTOCAST_KEY)
    for name in _FP32_RESULT:
        library.impl(name, _fp32_result(operator_of(name)), AUTOCAST_KEY)
    has, prefix = torch._C._dispatch_has_kernel_for_dispatch_key, "aten::"
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(prefix) and has(name, AUTOCAST_KEY) and not has(name, "AutocastCUDA"):
            library.impl(name.removeprefix(prefix), torch.library.fallthrough_kernel, AUTOCAST_KEY)


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
    found = cast_parameters.get(id(value))
    if found is None or found[0]() is not value:
        found = cast_parameters[id(value)] = (weakref.ref(value), value.to(dtype))
    return found[1]


def _casting(operator: Any, dtype_of: Callable[[], torch.dtype]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of()
        with _without_autocast():
            named = {key: _cast(value, dtype) for key, value in kwargs.items()}
            last_first = [_cast(value, dtype) for value in reversed(args)]  # the order in which gcc evaluates arguments
            return operator(*reversed(last_first), **named)

    return call


def _fp32_result(operator: Any) -> Callable[..., Any]:
    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        half = first.dtype in _HALF and first.device.type == NAME
        names_dtype = any(isinstance(value, torch.dtype) for value in args)
        if half and kwargs.get("dtype") is None and not names_dtype:
            kwargs["dtype"] = torch.float32
        with _without_autocast():
            return operator(first, *args, **kwargs)

    return call
