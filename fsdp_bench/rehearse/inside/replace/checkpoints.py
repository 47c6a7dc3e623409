"""Checkpoints without the bytes of their tensors: their values would be meaningless, and writing them takes minutes.

A file of torch.save or safetensors is as large as a real one and can be loaded, but takes no space: it is sparse. The
script's way to it runs as usual, such as gathering a whole state dictionary. torch.distributed.checkpoint writes
nothing but its folder; loading what it would have written leaves the tensors as they are.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..at_import import change_at_import

LARGE_BYTES = 1 << 20

sparse: Counter[str] = Counter()
"""The number of times that each function wrote a file without the bytes of its tensors."""
skipped: Counter[str] = Counter()
"""The number of times that each function would have written a checkpoint."""

_unwritten: set[str] = set()
"""The checkpoints that torch.distributed.checkpoint would have written."""


def write_no_tensors(seen: Callable[[Any], Any]) -> None:
    """Let torch.save, safetensors and torch.distributed.checkpoint write no large tensors.

    ``seen`` returns where a file is read that Python's functions have written.
    """
    torch.save, torch.jit.save = _torch_save(torch.save), _jit_save(torch.jit.save)
    torch.load, torch.jit.load = _reading(torch.load, "f", seen), _reading(torch.jit.load, "f", seen)
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors.torch

        safetensors.serialize_file = _serialize_file(safetensors.serialize)  # which safetensors.numpy will import
        safetensors.torch.save_file = _safetensors_save(safetensors.torch.save_file, safetensors.torch.save)
        safetensors.safe_open = safetensors.torch.safe_open = _reading(safetensors.safe_open, "filename", seen)
    savers, loaders = (f"torch.distributed.checkpoint.state_dict_{kind}" for kind in ("saver", "loader"))
    change_at_import({savers: _replace_functions, loaders: _replace_functions})


def _torch_save(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.save without the bytes of large tensors that go to a file.

    Before torch 2.6, which has no ``skip_data``, such a file is not written, unless the script has opened it itself.
    """
    parameters = inspect.signature(save)
    skip_data = getattr(torch.serialization, "skip_data", None)

    def instead(*arguments: Any, **keywords: Any) -> Any:
        try:
            given = parameters.bind(*arguments, **keywords).arguments
        except TypeError:
            return save(*arguments, **keywords)  # its own message
        file = given["f"]
        is_path = isinstance(file, (str, os.PathLike))
        is_large = _num_bytes(given["obj"]) >= LARGE_BYTES and (is_path or _is_on_disk(file))
        if is_large and is_path and skip_data is None:
            skipped["torch.save"] += 1
            return None
        if is_path:
            with open(file, "wb") as opened:  # by Python, whose functions protect the user's files
                return instead(**{**given, "f": opened})
        if skip_data is None or not is_large or not given.get("_use_new_zipfile_serialization", True):
            return save(**given)
        sparse["torch.save"] += 1
        with skip_data():
            return save(**given)

    return instead


def _reading(load: Callable[..., Any], file: str, seen: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that reads a file, its first parameter, where the script sees it: C++ and Rust may open it."""

    @wraps(load)
    def instead(*arguments: Any, **keywords: Any) -> Any:
        if arguments:
            arguments = (seen(arguments[0]), *arguments[1:])
        elif file in keywords:
            keywords[file] = seen(keywords[file])
        return load(*arguments, **keywords)

    return instead


def _serialize_file(serialize: Callable[..., bytes]) -> Callable[..., None]:
    """Return safetensors.serialize_file with a file that Python opens; Rust would open it itself."""

    def instead(tensor_dict: Any, filename: Any, metadata: Any = None) -> None:
        with open(filename, "wb") as file:
            file.write(serialize(tensor_dict, metadata))

    return instead


def _jit_save(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.jit.save with files that Python opens; C++ would open them itself."""

    def instead(m: Any, f: Any, **keywords: Any) -> Any:
        if not isinstance(f, (str, os.PathLike)):
            return save(m, f, **keywords)
        with open(f, "wb") as file:
            return save(m, file, **keywords)

    return instead


def _is_on_disk(file: Any) -> bool:
    """Whether an opened file is one of the system's, and not bytes in memory."""
    try:
        file.fileno()
    except (AttributeError, OSError):
        return False
    return True


def _safetensors_save(save_file: Callable[..., Any], save: Callable[..., bytes]) -> Callable[..., Any]:
    """Return safetensors.torch.save_file without the bytes of large tensors."""
    parameters = inspect.signature(save_file)

    def instead(*arguments: Any, **keywords: Any) -> Any:
        try:
            given = parameters.bind(*arguments, **keywords).arguments
        except TypeError:
            return save_file(*arguments, **keywords)
        tensors, metadata = given["tensors"], given.get("metadata")
        if _num_bytes(tensors) < LARGE_BYTES or not all(tensor.dtype in _NAMES for tensor in tensors.values()):
            with open(given["filename"], "wb") as file:
                file.write(save(tensors, metadata))
            return None
        sparse["safetensors"] += 1
        header, num_bytes = safetensors_header(tensors, metadata)
        with open(given["filename"], "wb") as file:
            file.write(header)
            file.truncate(len(header) + num_bytes)
        return None

    return instead


_NAMES = {
    getattr(torch, name): code
    for name, code in {
        **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
        **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
        **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
    }.items()
}
"""The dtypes that the format names: https://github.com/huggingface/safetensors#format."""


def safetensors_header(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> tuple[bytes, int]:
    """Return what stands before the tensors' bytes, and how many these are."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _replace_functions(module: ModuleType) -> None:
    """Replace what saves or loads in a module of torch.distributed.checkpoint."""
    for name in ("save", "async_save", "save_state_dict"):
        if hasattr(module, name):
            setattr(module, name, _never(getattr(module, name), is_async=name == "async_save"))
    for name in ("load", "load_state_dict"):
        if hasattr(module, name):
            setattr(module, name, _unless_unwritten(getattr(module, name)))


def _never(save: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
    parameters = inspect.signature(save)

    def instead(*arguments: Any, **keywords: Any) -> Any:
        skipped["torch.distributed.checkpoint"] += 1
        if (place := _place(parameters.bind(*arguments, **keywords).arguments)) is not None:
            _unwritten.add(place)
            os.makedirs(place, exist_ok=True)
        if not is_async:
            return None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return instead


def _unless_unwritten(load: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(load)

    def instead(*arguments: Any, **keywords: Any) -> Any:
        if _place(parameters.bind(*arguments, **keywords).arguments) in _unwritten:
            return None
        return load(*arguments, **keywords)

    return instead


def _place(given: dict[str, Any]) -> str | None:
    """Return the folder of a checkpoint. None if it is no folder, or not known."""
    storage = given.get("storage_writer") or given.get("storage_reader")
    place = given.get("checkpoint_id") or getattr(storage, "path", None)
    if not isinstance(place, (str, os.PathLike)) or "://" in str(place):
        return None
    return os.path.abspath(place)


def _num_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
