"""Checkpoints that a rehearsal does not write: their weights would be meaningless, in the script's own folder.

What leads to them runs as usual, such as gathering a whole state dictionary. Files below 1 MiB are written, except by
torch.distributed.checkpoint.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

LARGE_BYTES = 1 << 20

skipped: Counter[str] = Counter()
"""How often each function would have written a checkpoint."""


def skip_large_files() -> None:
    """Let torch.save, safetensors and torch.distributed.checkpoint write no large tensors."""
    torch.save = _skipping("torch.save", torch.save)
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors.torch

        safetensors.torch.save_file = _skipping("safetensors", safetensors.torch.save_file)
    if _DISTRIBUTED in sys.modules:
        _replace_savers(sys.modules[_DISTRIBUTED])
    else:
        sys.meta_path.insert(0, _AtImport())


_DISTRIBUTED = "torch.distributed.checkpoint.state_dict_saver"


class _AtImport(importlib.abc.MetaPathFinder):
    """Replaces the savers when the script imports them: to import them takes 1.5 seconds."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the module's own spec, whose loader then replaces functions of it."""
        if name != _DISTRIBUTED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_replace(module: ModuleType) -> None:
            load(module)
            _replace_savers(module)

        spec.loader.exec_module = load_and_replace
        return spec


def _replace_savers(module: ModuleType) -> None:
    for name in ("save", "async_save", "save_state_dict"):
        if hasattr(module, name):
            setattr(module, name, _never("torch.distributed.checkpoint", is_async=name == "async_save"))


def _skipping(name: str, save: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``save`` for everything but large tensors that go to a file."""

    def instead(tensors: Any, file: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and _num_bytes(tensors) >= LARGE_BYTES:
            skipped[name] += 1
            return None
        return save(tensors, file, *arguments, **keywords)

    return instead


def _never(name: str, is_async: bool) -> Callable[..., Any]:
    def instead(*_arguments: Any, **_keywords: Any) -> Any:
        skipped[name] += 1
        if not is_async:
            return None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return instead


def _num_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
