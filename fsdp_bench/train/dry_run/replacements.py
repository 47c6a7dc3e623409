"""Replacements of symbols of torch in a dry run. Each function takes the original and returns the replacement.

workarounds.py names the symbol of each, and the reason.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fsdp_bench.train.dry_run.fake_gpu import NAME, FakeStream
from fsdp_bench.train.dry_run.fused_kernels import clear_cache


def storage_address(original: Any) -> Any:
    """Give every allocated storage an address of its own."""

    def data_ptr(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":
            return original(storage)
        return storage._cdata if storage.nbytes() > 0 else 0

    return data_ptr


def tensor_address(_original: Any) -> Any:
    """Give every tensor the address of its storage plus its offset."""

    def data_ptr(tensor: Any) -> int:
        start = tensor.untyped_storage().data_ptr()
        return start + tensor.storage_offset() * tensor.element_size() if start else 0

    return data_ptr


def known_scalars(original: dict[Any, Any]) -> Any:
    """Return 0 as the value of a fake tensor: for ``found_inf`` of a gradient scaler, which then steps as usual."""
    read = torch.ops.aten._local_scalar_dense.default

    def zero(_mode: Any, _func: Any, tensor: torch.Tensor) -> float | int:
        return 0.0 if tensor.dtype.is_floating_point else 0

    return {**original, read: zero}


def no_check(_original: Any) -> Any:
    """Replace a check by a function that does nothing."""
    return lambda *_args, **_kwargs: None


def itself(_original: Any) -> Any:
    """Return a function that returns its argument."""
    return lambda tensor: tensor


def only_allocate(_original: Any) -> Any:
    """Allocate what verify_params_across_processes (c10d/reducer.cpp) allocates, without checking values."""

    def verify(process_group: dist.ProcessGroup, tensors: list[torch.Tensor], logger: Any = None) -> None:
        num_sizes, device = sum(2 * tensor.dim() for tensor in tensors), tensors[0].device
        # Of each rank its number of parameters, one tensor each; all sizes and strides, and on the host again.
        _counts = torch.empty(1 + process_group.size(), dtype=torch.int64, device=device)
        _metadata = torch.empty(num_sizes, dtype=torch.int64, device=device)
        _control = torch.empty(num_sizes, dtype=torch.int64, device="cpu")

    return verify


class _RealIndices(TorchDispatchMode):
    """A mode in which int32 tensors are real: the reducer writes bucket numbers into them by pointer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        given = (kwargs or {}).get("dtype") if not tensors else tensors[0].dtype
        if given is not torch.int32:
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():
            return func(*args, **{**(kwargs or {}), **({} if tensors else {"device": "cpu"})})


def rebuild_with_real_indices(original: Any) -> Any:
    """Let the reducer write its indices into real tensors."""

    def rebuild(reducer: Any) -> Any:
        with _RealIndices():
            return original(reducer)

    return rebuild


def view_that_knows(original: Any) -> Any:
    """Make a view keep a reference to its base."""

    def view(tensor: Any, *shape: Any) -> Any:
        found = original(tensor, *shape)
        found.viewed = weakref.ref(tensor)
        return found

    return view


def data_with_device(original: Any) -> Any:
    """Make an assignment to ``data`` change the fake device too, also of the base of a view.

    And forget the value of a small tensor of the host: what is computed from it would be a constant of the host, too.
    """

    def assign(tensor: Any, value: Any) -> None:
        original.__set__(tensor, value)
        if isinstance(value, FakeTensor):
            tensor.fake_device = value.fake_device
            tensor.constant = None
            viewed = tensor.viewed() if hasattr(tensor, "viewed") else None
            if viewed is not None:
                assign(viewed, value.detach().reshape(viewed.shape))

    return property(original.__get__, assign)


def with_cpu_keys(original: Any) -> Any:
    """Give tensors of the fake accelerator CPU dispatch keys."""

    def make_subclass(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_for_backend_keys") is not None:
            kwargs["device_for_backend_keys"] = torch.device("cpu")
        return original.__func__(cls, *args, **kwargs)

    return staticmethod(make_subclass)


def pinned_copy(_original: Any) -> Any:
    """Return a function that returns a copy, as pin_memory does."""
    return lambda tensor, device=None: tensor.clone()


def autocast_of_cpu_keys(original: Any) -> Any:
    """Make autocast on the fake accelerator use the dispatch keys of its tensors."""

    def init(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(context, "cpu" if device_type == NAME else device_type, *args, **kwargs)

    return init


def clear_both_caches(original: Any) -> Any:
    """Clear the cache of fused_kernels.py as well."""

    def clear() -> None:
        original()
        clear_cache()

    return clear


def without_modes(original: Any) -> Any:
    """Run a function outside of all dispatch modes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return run


def always(_original: Any) -> Any:
    """Return a function that returns True."""
    return lambda *_args, **_kwargs: True


def stream_without_work(_original: Any) -> Any:
    """Return a stream of the fake accelerator, on which nothing runs."""
    return lambda *_args, **_kwargs: FakeStream()
