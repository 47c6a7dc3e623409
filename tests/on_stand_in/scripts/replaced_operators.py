"""The storages that the operators make which a dry run replaces; standard input N runs one case in N.

Shapes are away from the defaults: masks of every kind, heads that are no multiple of 8, odd lengths, grouped keys.
"""

import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)


class Storages(TorchDispatchMode):
    """Notes the bytes of every new storage on a device, in the order in which operators make them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._kept: list[torch.UntypedStorage] = []  # so that no address is used again
        self._known: set[int] = set()
        self._device = device.type
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage.nbytes():
                    self._known.add(storage._cdata)
                    self._kept.append(storage)
                    if func is not torch.ops.aten.add.Tensor:  # in place where no mode watches: a mask
                        self.sizes.append(storage.nbytes())
        return result


def storages(run: Callable[[torch.device], Tensor], device: torch.device) -> dict[str, list[int]]:
    """Return the bytes of the storages that forward and backward make, and of those that autograd saves."""
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.device.type == device.type:
            saved.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
        return tensor

    made = Storages(device)
    with made, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(device)
    gradient, in_forward = torch.empty_like(out), len(made.sizes)
    with made:
        out.backward(gradient)
    return {
        "forward": made.sizes[:in_forward],
        "saved": sorted(storage.nbytes() for storage in saved.values()),
        "backward": sorted(made.sizes[in_forward:]),  # a node's two gradients are made in either order
    }


def attention(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    heads: tuple[int, int] = (4, 4),
    length: int = 64,
    mask: str | None = None,
    autocast: torch.dtype | None = None,
    **how: Any,
) -> Tensor:
    """Run attention of ``heads`` for queries, and keys and values, with a mask of a shape and a dtype."""

    def made(num_heads: int) -> Tensor:
        # As models have it: a view of what a linear layer returns.
        flat = torch.empty(2, length, num_heads * width, dtype=dtype, device=device, requires_grad=True)
        return flat.view(2, length, num_heads, width).transpose(1, 2)

    query, key, value = made(heads[0]), made(heads[1]), made(heads[1])
    given = None
    if mask is not None:
        shape, kind = mask.split(" ")
        sizes = {"batch": (2, 1), "one": (1, 1), "heads": (2, heads[0])}.get(shape, ())
        given = torch.ones(*sizes, length, length, dtype=torch.bool if kind == "bool" else query.dtype, device=device)
        if shape == "one":
            given = given.expand(2, -1, -1, -1)
    with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=given, **how)


def norm(device: torch.device, dtype: torch.dtype, weight: torch.dtype | None, width: int = 100) -> Tensor:
    """Run RMSNorm, with a weight of a dtype or without one."""
    x = torch.empty(3, 7, width, dtype=dtype, device=device, requires_grad=True)
    scale = None if weight is None else torch.empty(width, dtype=weight, device=device, requires_grad=True)
    return F.rms_norm(x, (width,), scale)


def softmax(
    device: torch.device, dtype: torch.dtype, to: torch.dtype | None, autocast: torch.dtype | None, is_log: bool
) -> Tensor:
    """Run softmax or log_softmax of a product, as routers, losses and eager attention do."""
    given: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
    x, weight = torch.empty(3, 7, 20, **given), torch.empty(101, 20, **given)
    with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        return (F.log_softmax if is_log else F.softmax)(F.linear(x, weight), dim=-1, dtype=to)


def under_autocast(device: torch.device, dtype: torch.dtype, vocabulary: int = 1001) -> Tensor:
    """Run what autocast casts, to 16 bits and to fp32: products, norms, the loss of odd logits."""
    given: dict[str, Any] = {"device": device, "requires_grad": True}
    x, weight, bias = torch.empty(3, 7, 20, **given), torch.empty(vocabulary, 20, **given), torch.empty(20, **given)
    targets = torch.zeros(21, dtype=torch.long, device=device)
    with torch.autocast(device.type, dtype):
        turned = torch.matmul(x, x.transpose(1, 2)) @ x
        normed = F.rms_norm(F.layer_norm(turned, (20,), bias, bias), (20,), bias)
        return F.cross_entropy(F.linear(normed, weight).view(-1, vocabulary), targets)


def cases() -> Iterator[tuple[str, Callable[[torch.device], Tensor]]]:
    """Yield each case with its name."""
    masks = (None, "batch bool", "one bool", "matrix bool", "heads bool", "batch as-queries", "matrix as-queries")
    for mask, width, length, dtype in itertools.product(masks, (12, 18, 20, 64, 100), (61, 64, 72), DTYPES):
        yield (
            f"attention: mask {mask}, heads of {width}, {length} tokens, {dtype}",
            lambda device, m=mask, w=width, n=length, d=dtype: attention(device, d, w, length=n, mask=m),
        )
    for heads, width, dtype, mask in itertools.product(((6, 2), (4, 1)), (20, 64), DTYPES, (None, "batch bool")):
        how: dict[str, Any] = {"enable_gqa": True} | ({} if mask else {"is_causal": True})
        yield (
            f"attention: {heads} heads of {width}, mask {mask}, {dtype}",
            lambda device, h=heads, w=width, d=dtype, m=mask, how=how: attention(device, d, w, h, mask=m, **how),
        )
    for dtype, mask in itertools.product(HALVES, (None, "batch bool", "batch as-queries")):
        yield (
            f"attention: mask {mask}, fp32 under autocast to {dtype}",
            lambda device, d=dtype, m=mask: attention(device, torch.float32, 64, mask=m, autocast=d),
        )
    for dtype, dropout in itertools.product(DTYPES, (None, "batch bool")):
        yield (
            f"attention: mask {dropout}, dropout, {dtype}",
            lambda device, d=dtype, m=dropout: attention(device, d, 64, mask=m, dropout_p=0.1),
        )
    yield "attention: heads of 320", lambda device: attention(device, torch.bfloat16, 320, is_causal=True)
    for dtype, weight in itertools.product(DTYPES, (None, torch.bfloat16, torch.float32)):
        yield f"rms_norm: {dtype}, weight {weight}", lambda device, d=dtype, w=weight: norm(device, d, w)
    for dtype, to, is_log in itertools.product(DTYPES, (None, *DTYPES), (False, True)):
        yield (
            f"{'log_' * is_log}softmax: {dtype} to {to}",
            lambda device, d=dtype, t=to, log=is_log: softmax(device, d, t, None, log),
        )
    for dtype, to, is_log in itertools.product(HALVES, (None, *DTYPES), (False, True)):
        yield (
            f"{'log_' * is_log}softmax to {to}, fp32 under autocast to {dtype}",
            lambda device, d=dtype, t=to, log=is_log: softmax(device, torch.float32, t, d, log),
        )
    for dtype in HALVES:
        yield f"autocast to {dtype}", lambda device, d=dtype: under_autocast(device, d)


def all_storages(device: torch.device, every: int = 1) -> dict[str, Any]:
    """Return the storages of one in so many cases."""
    with warnings.catch_warnings(action="ignore"):  # two dtypes, for which rms_norm is not fused
        if device.type == "cuda":
            torch.cuda.is_bf16_supported()  # on a T4 the first autocast asks, which makes a tensor
        return {name: storages(run, device) for name, run in itertools.islice(cases(), 0, None, every)}


if __name__ == "__main__":
    torch.backends.cuda.enable_cudnn_sdp(False)  # what is replaced is FlashAttention
    print(json.dumps(all_storages(torch.device("cuda"), int(sys.stdin.read()))))
