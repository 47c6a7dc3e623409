"""The flash-attn package on tensors without data: transformers' ``attn_implementation="flash_attention_2"``.

Written from flash_attn_interface.py of Dao-AILab/flash-attention 2.8 (FlashAttnFunc) and csrc/flash_attn/flash_api.cpp
(mha_fwd, mha_bwd): what they allocate, save and return. Compared with no run of the package. Not covered: padding and
packed sequences (flash_attn_varlen_func), heads that are no multiple of 8, dropout's probabilities.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fsdp_bench.spec.errors import SpecError

NAME = "flash_attention_2"
WIDEST_HEAD = 256

_LIBRARY = torch.library.Library("flash_attn", "DEF")
_LIBRARY.define("flash_attn_func(Tensor q, Tensor k, Tensor v, bool causal, int[] window) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "flash_attn_func_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor dq,"
    " Tensor dk, Tensor dv, Tensor rng_state, bool causal, int[] window) -> Tensor"
)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, logarithms of the rows' sums, and the random state, which are made even without dropout."""
    batch, length, heads, _ = q.shape
    sums = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    return torch.empty_like(q), sums, torch.empty(2, dtype=torch.int64, device=q.device)


def _backward(dout: Tensor, q: Tensor, *_: Any) -> Tensor:
    """Return softmax_d, each row's sum of dout * out; the gradients are written into what is given."""
    batch, length, heads, _width = q.shape
    return torch.empty(batch, heads, -(-length // 128) * 128, dtype=torch.float32, device=q.device)


torch.library.register_fake("flash_attn::flash_attn_func", _forward, lib=_LIBRARY)
torch.library.register_fake("flash_attn::flash_attn_func_backward", _backward, lib=_LIBRARY)


class _FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
        out, sums, state = torch.ops.flash_attn.flash_attn_func(q, k, v, causal, window)
        ctx.save_for_backward(q, k, v, out, sums, state)
        ctx.causal, ctx.window = causal, window
        view: Tensor = out[..., : q.shape[-1]]
        return view

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dout,) = gradients
        q, k, v, out, sums, state = ctx.saved_tensors
        made = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn.flash_attn_func_backward(dout, q, k, v, out, sums, *made, state, ctx.causal, ctx.window)
        return *(each[..., : dout.shape[-1]] for each in made), None, None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Attention of B, S, H, D queries and B, S, K, D keys and values; returns B, S, H, D.

    Raises RuntimeError for what the package refuses, and for what is not covered.
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("flash_attn: FlashAttention only support fp16 and bf16 data type")
    if q.shape[-1] > WIDEST_HEAD:
        raise RuntimeError(f"flash_attn: forward only supports head dimension at most {WIDEST_HEAD}")
    if q.shape[-1] % 8:
        raise RuntimeError(f"flash_attn: heads of {q.shape[-1]} are padded to a multiple of 8, which is not predicted")
    out: Tensor = _FlashAttnFunc.apply(q, k, v, causal, window_size)
    return out


def _varlen(*_: Any, max_seqlen_q: int = 0, max_seqlen_k: int = 0, **__: Any) -> Tensor:
    raise RuntimeError("flash_attn: padded and packed sequences are not predicted")


@contextmanager
def flash_attn_replaced() -> Iterator[None]:
    """Let transformers find the package inside a ``with`` block, and sequences that are not packed."""
    try:
        from transformers import modeling_flash_attention_utils as utils
        from transformers.integrations import flash_attention
    except ImportError:
        yield
        return
    packed, target = utils._is_packed_sequence, flash_attention.get_target_dtype

    def never_packed(position_ids: Any, batch_size: int) -> bool:
        packed(position_ids, batch_size)  # for what it allocates; its answer depends on data
        return False

    def cast_to(query: Tensor, module: nn.Module) -> torch.dtype | None:
        """Return autocast's dtype: on the fake accelerator that of CPU keys (train/dry_run/workarounds.py)."""
        if query.dtype is torch.float32 and query.device.type != "cpu" and torch.is_autocast_enabled("cpu"):
            return torch.get_autocast_dtype("cpu")
        found: torch.dtype | None = target(query, module)
        return found

    package = mock.patch.multiple(
        utils,
        _is_packed_sequence=never_packed,
        _loaded_implementation=NAME,
        _flash_fn=flash_attn_func,
        _flash_varlen_fn=_varlen,
        _process_flash_kwargs_fn=utils._lazy_define_process_function(flash_attn_func),
    )
    with package, mock.patch.object(flash_attention, "get_target_dtype", cast_to):
        yield


def is_replaced() -> bool:
    """Whether this is inside of ``flash_attn_replaced``."""
    from transformers import modeling_flash_attention_utils as utils

    return utils._flash_fn is flash_attn_func


def use_package(model: nn.Module, name: str) -> None:
    """Let a model of transformers call the package, without its checks for a GPU.

    Raises SpecError if transformers does not call the package in that model.
    """
    if not getattr(model, "_supports_flash_attn", False):
        raise SpecError(f"attention: {name} has no {NAME} in transformers")
    model.config._attn_implementation = NAME  # type: ignore[union-attr]
