"""Tracks live tensor bytes on a CPU, the counterpart of ``torch.cuda.memory_allocated``.

Not covered: memory that operators use internally and the process group's own buffers, which are not tensors.
"""

import time
import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fsdp_bench.spec.units import format_gib


class BudgetExceeded(MemoryError):
    """Live tensors on a CPU exceeded ``memory_limit``."""


_COLLECTIVES = ("c10d", "_c10d_functional")
"""The namespaces of collectives in torch.ops."""


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of every storage that operators create while the mode is active.

    A storage is counted from the operator that returns it until it is freed, and by its current size: FSDP frees
    and restores parameters with ``UntypedStorage.resize_``, which is not an operator and is therefore patched.
    """

    def __init__(self, budget_bytes: int | None = None, settle_seconds: float = 0.0) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.settle_seconds = settle_seconds
        """The time to wait after a collective: gloo's threads release its tensors a little later."""
        self._collective_ran = False
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resize: Callable[..., Any] | None = None

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        tracker, original = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            tracker._settle()
            result = original(storage, size)
            if storage._cdata in tracker._sizes:
                tracker._set(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        assert self._resize is not None
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor unwraps itself first; its local operators come back here
        self._settle()
        result = func(*args, **(kwargs or {}))
        if func.namespace in _COLLECTIVES:
            self._collective_ran = True
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _settle(self) -> None:
        if self._collective_ran:
            self._collective_ran = False
            if self.settle_seconds:
                time.sleep(self.settle_seconds)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are live now."""
        self.peak_bytes = self.live_bytes

    def counts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage is tracked.

        Meta tensors are not: DTensor propagates shardings on fake "CPU" tensors. Tensors that wrap another one, such as
        AsyncCollectiveTensor, are not: they have a size but no memory.
        """
        return tensor.untyped_storage().device.type == "cpu" and not is_traceable_wrapper_subclass(tensor)

    def _count(self, tensor: torch.Tensor) -> None:
        if not self.counts(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._watches[key] = weakref.ref(storage, lambda _dead: self._forget(key))
            self._set(key, storage.nbytes())
        elif self._sizes[key] != storage.nbytes():  # an operator that resizes its output, such as aten.resize_
            self._set(key, storage.nbytes())

    def _forget(self, key: int) -> None:
        size = self._sizes.pop(key, 0)
        self.live_bytes -= size  # no call in this line: gloo's threads free storages too, and may interrupt at calls
        self._watches.pop(key, None)

    def _set(self, key: int, size: int) -> None:
        grown = size - self._sizes[key]
        self._sizes[key] = size
        self.live_bytes += grown
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        if self.budget_bytes is not None and grown > 0 and self.live_bytes > self.budget_bytes:
            raise BudgetExceeded(
                f"tried to allocate {format_gib(grown)}; {format_gib(self.live_bytes - grown)} of the budget of "
                f"{format_gib(self.budget_bytes)} are in use"
            )
