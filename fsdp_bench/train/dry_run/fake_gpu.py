"""A fake accelerator, with which a CPU build of torch runs the GPU code of FSDP: streams, events, offload.

It is registered as PyTorch's device for other vendors (PrivateUse1), with a device module in Python. Its tensors are
fake, so no kernel ever runs, and streams have only an identity.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

NAME = "fakegpu"


class _WithoutWork:
    """The common part of streams, events and the device: nothing runs, so there is nothing to wait for."""

    def _nothing(self, *_given: Any, **_named: Any) -> None:
        pass

    def _true(self) -> bool:
        return True

    synchronize = _nothing


class FakeStream(_WithoutWork):
    """A stream on which nothing runs."""

    def __init__(self, device: Any = None, priority: int = 0, **_other: Any) -> None:
        self.priority = priority

    query = _WithoutWork._true
    wait_stream = wait_event = _WithoutWork._nothing

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        """Return an event that is already complete."""
        return event or FakeEvent()


class FakeEvent(_WithoutWork):
    """An event that is always complete."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    query = _WithoutWork._true
    wait = _WithoutWork._nothing

    def record(self, stream: Any = None) -> "FakeEvent":
        """Return this event."""
        return self


class DeviceModule(_WithoutWork):
    """The device module, what ``torch.cuda`` is for CUDA: one device, without random numbers."""

    Stream, Event = FakeStream, FakeEvent

    def __init__(self) -> None:
        self._stream = FakeStream()

    is_initialized = is_available = is_built = _WithoutWork._true
    _lazy_init = set_device = manual_seed = manual_seed_all = set_rng_state = _WithoutWork._nothing

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return a state for activation checkpointing to save, on the host as with CUDA."""
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    def device_count(self) -> int:
        """Return the usual number of GPUs of a node."""
        return 8

    def current_device(self) -> int:
        """Return the device index of rank 0."""
        return 0

    def current_stream(self, device: Any = None) -> FakeStream:
        """Return the stream set by ``set_stream`` or ``stream``."""
        return self._stream

    default_stream = current_stream

    def set_stream(self, stream: FakeStream) -> None:
        """Set the current stream."""
        self._stream = stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of CUDA."""
        return [torch.float16, torch.bfloat16]

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        """Set the current stream inside a ``with`` block."""
        before, self._stream = self._stream, stream or self._stream
        try:
            yield
        finally:
            self._stream = before

    def device(self, device: Any) -> AbstractContextManager[None]:
        """Return a context that changes nothing: there is one device."""
        return nullcontext()


@cache
def fake_gpu() -> torch.device:
    """Register the device with torch, once per process, and return it."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    if NAME not in dist.Backend.backend_capability["fake"]:
        dist.Backend.backend_capability["fake"].append(NAME)
    dist.Backend.default_device_backend_map[NAME] = "fake"
    return torch.device(NAME, 0)
