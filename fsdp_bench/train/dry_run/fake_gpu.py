"""A fake accelerator, with which a CPU build of torch runs the GPU code of FSDP: streams, events, offload.

It is registered as PyTorch's device for other vendors (PrivateUse1), with a device module in Python. Its tensors are
fake, so no kernel ever runs, and streams have only an identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

NAME = "fakegpu"


class _AlwaysComplete:
    """The methods that streams and events share: nothing runs, so there is nothing to wait for."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True."""
        return True


class FakeStream(_AlwaysComplete):
    """A stream on which nothing runs."""

    def __init__(self, device: Any = None, priority: int = 0, **_other: Any) -> None:
        self.priority = priority

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    wait_event = wait_stream

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Return an event that is already complete."""
        return event or FakeEvent()


class FakeEvent(_AlwaysComplete):
    """An event that is always complete."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> FakeEvent:
        """Return this event."""
        return self

    def wait(self, stream: Any = None) -> None:
        """Return at once."""


class DeviceModule:
    """The device module, as ``torch.cuda`` for CUDA: the functions that torch and FSDP call.

    There is one device, without a random number generator.
    """

    def __init__(self) -> None:
        self._stream = FakeStream()
        self.Stream, self.Event = FakeStream, FakeEvent

    def is_initialized(self) -> bool:
        """Return True."""
        return True

    is_available = is_built = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        """Do nothing."""

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return a state for activation checkpointing to save, on the host as with CUDA."""
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Do nothing."""

    def device_count(self) -> int:
        """Return the usual number of GPUs of a node."""
        return 8

    def current_device(self) -> int:
        """Return the device index of rank 0."""
        return 0

    def set_device(self, device: Any) -> None:
        """Do nothing."""

    def synchronize(self, device: Any = None) -> None:
        """Return at once."""

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

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Do nothing: there is one device."""
        yield


@cache
def fake_gpu() -> torch.device:
    """Register the device with torch, once per process, and return it."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    if NAME not in dist.Backend.backend_capability["fake"]:
        dist.Backend.backend_capability["fake"].append(NAME)
    dist.Backend.default_device_backend_map[NAME] = "fake"
    return torch.device(NAME, 0)
