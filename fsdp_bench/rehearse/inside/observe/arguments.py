"""An operator's arguments and results as JSON takes them: tensors by shape, strides, dtype and device."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from ..replace.integers import tensors_in

LARGE_BYTES = 1 << 20
"""Operators in host memory are noted from this size on."""

_LONGEST_LIST = 8
"""Lists of numbers up to this length are kept: dimensions, strides, paddings."""


class Tensors:
    """The kinds of tensors of a step, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        """By what document returns, as text, which does not count for Python's garbage collector."""

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's kind."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        kind = (*map(int, tensor.shape),), _strides(tensor), dtype, tensor.dtype.itemsize, tensor.device.type
        return self._numbers.setdefault(repr(kind), len(self._numbers))

    def document(self) -> list[dict[str, Any]]:
        """Return the kinds by number."""
        names = "shape", "strides", "dtype", "itemsize", "device"
        return [dict(zip(names, ast.literal_eval(kind), strict=True)) for kind in self._numbers]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return (*map(int, tensor.stride()),) if tensor.layout is torch.strided else ()


def described(func: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], found: Any, kinds: Tensors) -> Any:
    """Return an operator's name, its arguments by name, which of them it writes, and its results.

    ``written`` are arguments that it reads and writes, ``outputs`` those that it only writes (``out=``). ``results``
    are tensors that it made.
    """
    func, arguments = _inner(func, arguments)
    schema = getattr(func, "_schema", None)
    if schema is None:
        given = {str(place): one for place, one in enumerate(arguments)} | dict(keywords)
        name, writes, outputs = f"higher_order::{func}", [], []
    else:
        given = {argument.name: one for argument, one in zip(schema.arguments, arguments, strict=False)}
        given |= keywords
        name = schema.name
        changed = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        writes = [one.name for one in changed if not one.kwarg_only and one.name in given]
        outputs = [one.name for one in changed if one.kwarg_only and one.name in given]
    known = {id(one) for one in tensors_in([*given.values()])}
    return {
        "name": name,
        "arguments": {key: _value(one, kinds) for key, one in given.items()},
        "written": writes,
        "outputs": outputs,
        "results": [kinds.number(one) for one in tensors_in(found) if id(one) not in known],
    }


def _inner(func: Any, arguments: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return the operator, and its arguments, that a higher-order one runs with the state of random numbers, say.

    It is given among the arguments, before its own: graphsafe_run_with_rng_state(operator, ...).
    """
    if not isinstance(func, HigherOrderOperator):
        return func, arguments
    for place, one in enumerate(arguments):
        if isinstance(one, OpOverload):
            return one, arguments[place + 1 :]
    return func, arguments


def is_large_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor in host memory is so large that the time of an operator on it counts."""
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() >= LARGE_BYTES


def described_skipped(name: str, arguments: Sequence[Any], found: Any, kinds: Tensors) -> dict[str, Any]:
    """Return what a method of Tensor would have done in host memory, as ``described`` does.

    It changes the first of its arguments in place where its name ends with an underscore.
    """
    given = {str(place): one for place, one in enumerate(arguments) if isinstance(one, torch.Tensor)}
    return {
        "name": f"aten::{name}",
        "arguments": {key: _value(one, kinds) for key, one in given.items()},
        "written": ["0"] if name.endswith("_") and "0" in given else [],
        "outputs": [],
        "results": [] if name.endswith("_") else [kinds.number(one) for one in tensors_in(found)],
    }


def _value(value: Any, kinds: Tensors) -> Any:
    """Return tensors as ``{"tensors": [their numbers]}``, integers of 63 bits as they are, anything else as None."""
    found = tensors_in(value)
    if found:
        return {"tensors": [kinds.number(one) for one in found]}
    if isinstance(value, (bool, int)) and value.bit_length() <= 63:  # -2^63, from which torch.compile draws seeds
        return value
    if isinstance(value, (list, tuple)) and len(value) <= _LONGEST_LIST:
        return [int(one) if isinstance(one, (bool, int)) and one.bit_length() <= 63 else None for one in value]
    return None
