"""Small integer and boolean tensors of the GPU hold what they would hold in training, although kernels do nothing.

Scripts decide by such values: whether a batch has padding, whether sequences are packed, which rows a mask selects.
transformers, for example, asks the GPU whether the positions of a batch are packed sequences
(masking_utils.find_packed_sequence_indices), and the answer decides which attention runs. So operators on small
integers are computed by the CPU as well, on the same memory: the stand-in's device memory is memory of this process.
PyTorch's own CUDA code runs before it, so that what it allocates is as it was. Known is only what was computed here or
copied from the host: not integers that come from floating-point numbers, as an argmax does, nor what other operators
or compiled kernels write, nor what follows from them on the GPU.

Needs torch.library.get_kernel (torch 2.9); without it, what the script reads is only counted (reads.py).
"""

from __future__ import annotations

import ctypes
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

SMALL_BYTES = 1 << 20
"""The largest tensor that is computed or filled; stand_in/copies.c copies up to the same size."""

_COMPARISONS = tuple(f"{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar"))
_BITS = (
    *(f"bitwise_{name}.Tensor" for name in ("and", "or", "xor", "left_shift", "right_shift")),
    *(f"__{name}__.{kind}" for name in ("lshift", "rshift") for kind in ("Tensor", "Scalar")),
)
_LOGIC = ("logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_not")
_REDUCTIONS = ("all", "all.dim", "any", "any.dim", "sum", "sum.dim_IntList", "prod", "prod.dim_int", "max",
               "min", "max.dim", "min.dim", "argmax", "argmin", "amax", "amin")  # fmt: skip
_ARITHMETIC = ("add.Tensor", "sub.Tensor", "mul.Tensor", "remainder.Tensor", "floor_divide", "neg", "abs", "clamp",
               "cumsum", "where.self", "maximum", "minimum", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
               "div.Tensor_mode", "fmod.Tensor", "sign", "clamp.Tensor", "clamp_min", "clamp_max", "cumprod",
               "count_nonzero.dim_IntList")  # fmt: skip
_SELECTIONS = ("index.Tensor", "index_select", "gather", "cat", "tril", "triu", "sort", "sort.stable",
               "flip", "roll", "isin.Tensor_Tensor", "searchsorted.Tensor")  # fmt: skip
_IN_PLACE = ("add_.Tensor", "sub_.Tensor", "mul_.Tensor", "masked_fill_.Scalar", "index_put_", "scatter_.src",
             "scatter_.value", "scatter_add_", "index_add_", "cumsum_", "bitwise_and_.Tensor", "bitwise_or_.Tensor",
             "logical_not_", "clamp_", "floor_divide_.Tensor", "div_.Tensor_mode", "remainder_.Tensor", "neg_", "abs_",
             "index_copy_", "index_fill_.int_Scalar", "masked_scatter_", "tril_", "triu_")  # fmt: skip
_OVERWRITES = ("copy_", "fill_.Scalar", "fill_.Tensor", "zero_", "arange.start_out")
"""Operators that do not read the tensor that they write."""
_DECIDED_BY_VALUES = ("nonzero", "masked_select", "repeat_interleave.Tensor", "_unique2", "unique_consecutive", "equal",
                      "bincount")  # fmt: skip
"""Operators that read the GPU to learn their output's size or their answer; the CPU runs them if the input is known."""

_MORE = ("histc", "topk", "kthvalue", "mode", "cummax", "bucketize.Tensor", "random_", "random_.from", "random_.to",
         "bernoulli_.float")  # fmt: skip
"""Further operators that make integers, mostly of values that are not known."""
_READS = {"_local_scalar_dense": "item", "copy_": "copy"}
"""Operators that bring values to the host, as users know them."""


class HostRead(NamedTuple):
    """The tensors that an operator brings to the host."""

    operator: str = ""
    """As users know it; empty while no such operator runs."""
    is_known: bool = False
    """Whether the values are those of training."""
    has_integers: bool = False
    """Whether they are several integers or booleans, or one integer: values that may become sizes."""


reading = HostRead()
"""The tensors that the running operator reads."""

_KNOWN_BYTES = "_fsdp_bench_known_bytes"
"""Attribute of a storage: how many of its bytes hold what they would hold in training. It ends with the storage."""

balances_routing = False
"""Whether a choice among experts (topk of two dimensions) takes all of them equally often: --balanced-routing."""

_library: torch.library.Library | None = None


def can_compute() -> bool:
    """Whether this version of torch lets operators on integers be computed."""
    return hasattr(torch.library, "get_kernel")


def compute_small_integers() -> None:
    """Let operators on small integers of the GPU be computed as well, where torch can; a second call does nothing."""
    global _library
    if _library is not None or not can_compute():
        return
    get_kernel = torch.library.get_kernel
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are overridden, which is the purpose
        for replace, names in _REPLACEMENTS.items():
            for name in names:
                try:
                    kernel = get_kernel(f"aten::{name}", "CUDA")
                    packet, _point, overload = name.partition(".")
                    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
                except (AttributeError, RuntimeError):  # another version of torch
                    continue
                _library.impl(name, replace(operator, kernel), "CUDA", with_keyset=True)


def _after(operator: Any, kernel: Any) -> Callable[..., Any]:
    """Return PyTorch's own kernel, followed by the CPU's on the same memory."""
    takes_tensor = [str(argument.type) == "Tensor" for argument in operator._schema.arguments]
    name = operator._schema.name.removeprefix("aten::")
    overwrites = str(operator).removeprefix("aten.").removesuffix(".default") in _OVERWRITES

    def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
        global reading
        if not all(
            isinstance(one, torch.Tensor) for one, is_one in zip(arguments, takes_tensor, strict=False) if is_one
        ):
            arguments = _with_tensors(arguments, takes_tensor)
        inputs = tensors_in([*arguments, *keywords.values()])
        is_known = all(map(_is_known, inputs[1:] if overwrites else inputs))
        outer = reading
        if name in _READS:
            reading = HostRead(_READS[name], _is_known(inputs[-1]), _has_integers(inputs[-1]))
        try:
            found = kernel.call_boxed(keys, *arguments, **keywords)
        finally:
            reading = outer
        outputs = [one for one in tensors_in(found) if one.device.type == "cuda" and not _has_fractions(one)]
        if outputs and not is_known and _is_check_for_nan(name, arguments):
            _on_host(outputs[0]).fill_((name == "eq") == (arguments[0] is arguments[1]))
            _mark([outputs[0]], is_known=True)
        elif balances_routing and name == "topk" and outputs and outputs[0].dim() == 2:
            _balance(outputs[0], num_experts=inputs[0].shape[-1])
        elif outputs and is_known and all(map(_is_small, outputs)) and len(outputs) == len(tensors_in(found)):
            _mark(outputs, _compute(operator, arguments, keywords, found))
        else:
            _mark(outputs, is_known=False)
            for one in outputs:
                if one.dtype == torch.bool and _is_small(one):
                    # and not what the memory held before: any value overflows? no; are all equal, or finite? yes
                    _on_host(one).fill_(name == "all")
        return found

    return run


def _with_tensors(arguments: Sequence[Any], takes_tensor: Sequence[bool]) -> tuple[Any, ...]:
    """Return arguments with tensors of the result's dtype for numbers, as C++ had wrapped them."""
    first = next(one for one in arguments if isinstance(one, torch.Tensor))
    return tuple(
        torch.tensor(one, dtype=torch.result_type(first, one))
        if is_one and isinstance(one, (bool, int, float))
        else one
        for one, is_one in zip(arguments, [*takes_tensor, *[False] * len(arguments)], strict=False)
    )


def _instead(operator: Any, kernel: Any) -> Callable[..., Any]:
    """Return the CPU's kernel for known integers, and PyTorch's own for everything else."""
    name = operator._schema.name.removeprefix("aten::").strip("_").rstrip("2")

    def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
        global reading
        inputs = tensors_in([*arguments, *keywords.values()])
        if all(map(_is_known, inputs)):
            with torch._C._AutoDispatchBelowAutograd():
                computed = operator(*tree_map(_on_host, arguments), **tree_map(_on_host, keywords))
            device = inputs[0].device  # the copy there is known: copy_ marks it
            return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, computed)
        if name == "nonzero" and (found := _nonzero_of_expanded(*arguments)) is not None:
            return found
        caller = sys._getframe().f_back  # none in a thread of autograd
        if name == "masked_select" and caller and caller.f_code.co_filename.endswith("_tensor_str.py"):
            return inputs[0].new_empty(0)  # text of values that are not known: no number of them decides its format
        outer, reading = reading, HostRead(name)
        try:
            found = kernel.call_boxed(keys, *arguments, **keywords)
        finally:
            reading = outer
        for tensor in tensors_in(found):
            forget(tensor)  # CUDA's bincount begins with zeros, which are known
        return found

    return run


def _nonzero_of_expanded(mask: torch.Tensor) -> torch.Tensor | None:
    """Return the memory that nonzero takes of a small known tensor that was expanded to a large one; None of others.

    Its size is known from the elements that are there once. A mask of images' tokens is expanded to the hidden size.
    """
    once = mask
    for dim, stride in enumerate(mask.stride()):
        once = once if stride else once[(slice(None),) * dim + (slice(1),)]
    if not (0 < once.numel() < mask.numel()) or not _is_known(once):
        return None
    count = int(torch.count_nonzero(_on_host(once))) * (mask.numel() // once.numel())
    _contiguous = mask.contiguous()  # CUDA's nonzero holds one
    return mask.new_empty((mask.dim(), count), dtype=torch.int64).t()


_REPLACEMENTS = {
    _after: (*_COMPARISONS, *_BITS, *_LOGIC, *_REDUCTIONS, *_ARITHMETIC, *_SELECTIONS, *_IN_PLACE, *_OVERWRITES,
             "_local_scalar_dense", *_MORE),
    _instead: _DECIDED_BY_VALUES,
}  # fmt: skip


def _compute(operator: Any, arguments: Any, keywords: Any, found: Any) -> bool:
    """Compute an operator on the CPU, and write the results where PyTorch's kernel should have written them.

    Return False if the CPU cannot. That is no error: the code for CUDA has run, without a kernel.
    """
    written = {tensor.data_ptr() for tensor in tensors_in(found)}
    with torch._C._AutoDispatchBelowAutograd():
        for prepare in (_on_host, _as_float):  # the CPU has histc for floating-point numbers alone
            try:
                computed = operator(*tree_map(prepare, arguments), **tree_map(prepare, keywords))
                break
            except (RuntimeError, IndexError):
                continue
        else:
            return False
        for target, source in zip(tensors_in(found), tensors_in(computed), strict=True):
            if source.data_ptr() not in written:  # an in-place operator has written there itself
                _on_host(target).copy_(source)
    return True


def _as_float(value: Any) -> Any:
    return _on_host(value).float() if isinstance(value, torch.Tensor) else _on_host(value)


def _is_check_for_nan(name: str, arguments: Sequence[Any]) -> bool:
    """Whether a comparison asks for NaN or infinity, as torch.isfinite; training that goes well has none."""
    if name not in ("eq", "ne") or not isinstance(arguments[0], torch.Tensor) or not _is_small(arguments[0]):
        return False
    first, second = arguments[:2]
    return (first is second) or (isinstance(second, float) and math.isinf(second))


def _balance(chosen: torch.Tensor, num_experts: int) -> None:
    """Let tokens take the experts in turn: 0, 1, ..., n-1, 0, ... Each is then chosen equally often."""
    _on_host(chosen).copy_((torch.arange(chosen.numel()) % num_experts).view(chosen.shape))
    _mark([chosen], is_known=True)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return a tensor, or those in lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors_in(one)]
    return []


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _has_integers(tensor: torch.Tensor) -> bool:
    return not _has_fractions(tensor) and (tensor.numel() > 1 or tensor.dtype != torch.bool)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= SMALL_BYTES


def _is_known(tensor: torch.Tensor) -> bool:
    """Whether an operator's input has the values of training: a small integer, or a tensor of the host."""
    if tensor.device.type == "cpu":
        return True
    if _has_fractions(tensor) or not _is_small(tensor):
        return False
    storage = tensor.untyped_storage()
    return getattr(storage, _KNOWN_BYTES, 0) >= storage.nbytes()


def _mark(tensors: Sequence[torch.Tensor], is_known: bool) -> None:
    """Record whether what was written is known.

    Known bytes are added up: a storage is known once as many were written as it has.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        known = getattr(storage, _KNOWN_BYTES, 0) + tensor.numel() * tensor.element_size() if is_known else 0
        setattr(storage, _KNOWN_BYTES, min(known, storage.nbytes()))


def forget(tensor: torch.Tensor) -> None:
    """Record that a tensor holds what another rank has, or what is not known for another reason."""
    if tensor.device.type == "cuda" and not _has_fractions(tensor):
        _mark([tensor], is_known=False)


def values_of(tensor: torch.Tensor) -> str:
    """Return the bytes of a tensor of integers in hexadecimal digits; empty if they are not known."""
    if not _is_known(tensor):
        return ""
    return bytes(_on_host(tensor).contiguous().view(-1).view(torch.uint8).tolist()).hex()


def set_values(tensor: torch.Tensor, values: str) -> None:
    """Write what ``values_of`` has returned for another rank's tensor."""
    if not values:
        return forget(tensor)
    found = torch.frombuffer(bytearray.fromhex(values), dtype=tensor.dtype)
    _on_host(tensor).copy_(found.view(tensor.shape))
    _mark([tensor], is_known=True)
    return None


def _on_host(value: Any) -> Any:
    """Return a tensor of the CPU on the same memory; other values as they are, devices as the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return value
    count = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    if value.numel() == 0:
        return torch.empty(value.shape, dtype=value.dtype)
    memory = (ctypes.c_byte * (count * value.element_size())).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=value.dtype, count=count).as_strided(value.shape, value.stride())
