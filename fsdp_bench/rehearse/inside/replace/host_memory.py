"""Keeps large tensors of the host from taking memory: their pages are never written.

A model that a script makes in host memory is filled with random numbers, cast and copied. None of these values decides
anything here, and Linux gives a page only when it is written. So initializers skip large floating-point tensors, and
casts and copies skip those whose source was never written: what was never written reads as zeros, in the copy as well.
Real data, integers and masks among it, are written as usual.
"""

from __future__ import annotations

import ctypes
import functools
import resource
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._device import _device_constructors

LARGE_BYTES = 1 << 20
_HUGE_PAGE_BYTES = 2 << 20
_PAGE_BYTES = 4096

_INITIALIZERS = ("normal_", "uniform_", "log_normal_", "exponential_", "zero_", "fill_")
_INITIALIZERS_THAT_READ = ("trunc_normal_", "orthogonal_", "sparse_")
"""Functions of torch.nn.init that also read what they wrote."""
_ARITHMETIC = ("erfinv_", "mul_", "add_", "div_", "clamp_")
"""Arithmetic of other libraries' initializers, skipped if its input was never written."""
_FACTORIES = ("zeros", "ones", "randn", "rand")
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}

on_skip: Callable[[str, Sequence[Any], Any], None] | None = None
"""Is told what is skipped: its name, its arguments, its result."""

loaded_file_bytes: Counter[str] = Counter()
"""The bytes of each file that were in the memory of the process that this one is forked from."""

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident_file_bytes() -> Counter[str]:
    """Return the bytes of each file, such as a library, that are in this process's memory: man 5 proc_pid_smaps."""
    found: Counter[str] = Counter()
    path = ""
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, _colon, rest = line.partition(":")
            if " " in name:  # the addresses of a mapping, with a path if it is of a file
                path = line[line.find("/") :].rstrip() if "/" in line else ""
            elif path and name in ("Rss", "Anonymous"):
                found[path] += 1024 * int(rest.split()[0]) * (1 if name == "Rss" else -1)
    return found


def is_written(address: int, num_bytes: int) -> bool:
    """Return whether any page within these bytes is in memory, which it is from the first write on.

    The pages at both ends are left out, which may hold other data: of large ranges, as far as huge pages go.
    """
    step = _HUGE_PAGE_BYTES if num_bytes >= 3 * _HUGE_PAGE_BYTES else _PAGE_BYTES
    begin, end = -(-address // step) * step, (address + num_bytes) // step * step
    if end <= begin:
        return True
    pages = ctypes.create_string_buffer((end - begin) // _PAGE_BYTES)
    return _mincore(begin, end - begin, pages) != 0 or any(pages.raw)


class SkippedWrites:
    """Skips what only writes values, and counts the bytes of the tensors that were never written."""

    def __init__(self) -> None:
        self.peak_unwritten_bytes = 0
        self._unwritten_bytes = 0
        self._known: set[int] = set()

    def install(self) -> None:
        """Replace functions of torch by some that skip large tensors in host memory."""
        _device_constructors()  # kept by torch from here on: with torch.device("meta") must know the originals
        for name in _INITIALIZERS_THAT_READ:
            self._replace(torch.nn.init, name, self._skip_filling)
        for name in (*_INITIALIZERS, *_ARITHMETIC):
            self._replace(torch.Tensor, name, self._skip_filling)
        self._replace(torch.Tensor, "copy_", self._skip_copying)
        for name in ("to", "clone", *_CASTS):
            self._replace(torch.Tensor, name, self._skip_cast)
        for name in _FACTORIES:
            self._replace(torch, name, self._skip_factory)

    @property
    def peak_resident_bytes(self) -> int:
        """The most memory that this process has had.

        In a fork, a page of a library counts from its first use on; in a process that has loaded it, from then on.
        """
        own_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return own_bytes + (loaded_file_bytes - resident_file_bytes()).total()

    def _replace(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """Call ``instead(name, *arguments)``; where it returns None, the original."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*arguments: Any, **keywords: Any) -> Any:
            found = None if torch.compiler.is_compiling() else instead(name, *arguments, **keywords)
            if found is None:
                return original(*arguments, **keywords)
            if on_skip is not None:
                on_skip(name, arguments, found)
            return found

        setattr(owner, name, replacement)

    def _skip_filling(self, name: str, tensor: Any, *_arguments: Any, **_keywords: Any) -> Any:
        if not _is_large(tensor) or (name in _ARITHMETIC and _has_values(tensor)):
            return None
        return self._counted(tensor)

    def _skip_copying(self, _name: str, tensor: Any, source: Any = None, *_arguments: Any, **_keywords: Any) -> Any:
        if _is_large(tensor) and _is_large(source) and not _has_values(source) and not _has_values(tensor):
            return self._counted(tensor)
        return None

    def _skip_cast(self, name: str, tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        if not _is_large(tensor) or (tensor.requires_grad and torch.is_grad_enabled()):
            return None
        dtype = _CASTS.get(name, tensor.dtype)
        if name == "to":
            given = {name: value for name, value in keywords.items() if name != "copy"}  # it is unknown there
            device, asked, *_rest = torch._C._nn._parse_to(*arguments[:3], **given)
            if device is not None and device.type != "cpu":
                return None
            dtype = asked or tensor.dtype
        if (dtype == tensor.dtype and name != "clone") or _has_values(tensor):
            return None
        return self._counted(torch.empty_like(tensor, dtype=dtype))

    def _skip_factory(self, _name: str, *size: Any, **keywords: Any) -> Any:
        device = keywords.get("device") or torch.get_default_device()
        if torch.device(device).type != "cpu" or {"out", "generator", "names"} & keywords.keys():
            return None
        found = torch.empty(*size, **keywords)
        return self._counted(found) if _is_large(found) else None

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a storage that is not written, until it is freed."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._known:
            self._known.add(id(storage))
            self._unwritten_bytes += storage.nbytes()
            self.peak_unwritten_bytes = max(self.peak_unwritten_bytes, self._unwritten_bytes)
            weakref.finalize(storage, self._forget, id(storage), storage.nbytes())
        return tensor

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._unwritten_bytes -= num_bytes


def _is_large(tensor: Any) -> bool:
    """Whether it is a plain floating-point tensor in host memory of LARGE_BYTES or more."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and tensor.layout == torch.strided
        and tensor.numel() * tensor.element_size() >= LARGE_BYTES
    )


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds anything but zeros. A page that was only read is in memory, too."""
    storage = tensor.untyped_storage()
    if not is_written(storage.data_ptr(), storage.nbytes()):
        return False
    with torch._C._DisableTorchDispatch():  # this is no operator of the script's
        numbers = torch.empty(0, dtype=torch.uint8).set_(storage)
        return any(bool(part.any()) for part in numbers.split(LARGE_BYTES))
