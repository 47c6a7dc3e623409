"""A fake accelerator, so that a CPU build of torch runs what FSDP does on a GPU: streams, events, offload.

PyTorch's slot for other vendors' devices (PrivateUse1) is given a device module in Python. Its tensors are fake, so
that no kernel ever runs; streams only have an identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

NAME = "fakegpu"


class FakeStream:
    """A stream on which nothing runs."""

    def __init__(self, device: Any = None, priority: int = 0, **_other: Any) -> None:
        self.priority = priority

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Return an event that has happened."""
        return event or FakeEvent()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Everything is done."""
        return True


class FakeEvent:
    """An event that has happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> FakeEvent:
        """Return itself."""
        return self

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True


class DeviceModule:
    """What ``torch.cuda`` is to CUDA: the functions that torch and FSDP ask a device module for."""

    def __init__(self) -> None:
        self._stream = FakeStream()
        self.Stream, self.Event = FakeStream, FakeEvent

    def is_initialized(self) -> bool:
        """Always."""
        return True

    def is_available(self) -> bool:
        """Always."""
        return True

    def is_built(self) -> bool:
        """Always."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        """No generator."""

    def manual_seed_all(self, seed: int) -> None:
        """No generator."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return a state for checkpointing to keep, on the host as CUDA's is."""
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """No generator."""

    def device_count(self) -> int:
        """One node's usual number."""
        return 8

    def current_device(self) -> int:
        """Rank 0's."""
        return 0

    def set_device(self, device: Any) -> None:
        """There is one."""

    def synchronize(self, device: Any = None) -> None:
        """Nothing to wait for."""

    def current_stream(self, device: Any = None) -> FakeStream:
        """Return the stream that ``stream`` chose."""
        return self._stream

    def default_stream(self, device: Any = None) -> FakeStream:
        """Return the current stream."""
        return self._stream

    def set_stream(self, stream: FakeStream) -> None:
        """Choose the stream."""
        self._stream = stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """CUDA's."""
        return [torch.float16, torch.bfloat16]

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        """Choose a stream for a while."""
        before, self._stream = self._stream, stream or self._stream
        try:
            yield
        finally:
            self._stream = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """There is one."""
        yield


@cache
def fake_gpu() -> torch.device:
    """Register the device with torch, once a process, and return it."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    if NAME not in dist.Backend.backend_capability["fake"]:
        dist.Backend.backend_capability["fake"].append(NAME)
    dist.Backend.default_device_backend_map[NAME] = "fake"
    return torch.device(NAME, 0)
