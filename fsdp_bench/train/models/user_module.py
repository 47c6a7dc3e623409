"""A user's own model: ``pkg.mod:function`` returns the model and a batch.

For dry runs and recordings the function is called under FakeTensorMode: tensors that it creates take no memory, and
reading a value fails. In a trial it is called for real. Its parameter named ``micro_batch_size`` or
``sequence_length`` gets --batch or --seq. The model is called with the batch: ``model(**batch)`` for a mapping,
``model(*batch)`` for a tuple or list, else ``model(batch)``. The loss is ``output.loss``, or ``output["loss"]``, or the
output itself if it is a scalar, or else the first floating tensor in the output; of several elements their mean.
"""

import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_bench.spec.errors import SpecError, nearest
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import SIZES, UserModule
from fsdp_bench.train.step import Training, forward_backward, gradient_sync, optimizer_step


@dataclass(frozen=True)
class UserModel:
    """The model and batch that the user's function returned."""

    model: nn.Module
    batch: Any
    block: type[nn.Module] | None
    arguments: dict[str, int]
    """The SIZES with which the function was called."""


CONTRACT = (
    "it is called model(**batch) for a dict, model(*batch) for a tuple or list, else model(batch); the loss is"
    " output.loss, output['loss'], a scalar output, or the mean of the first floating tensor in the output"
)
"""The text of error messages that says how a user's model is called and its loss is found."""


def load_user_module(spec: UserModule, setup: TrainSetup, dtype: torch.dtype, home: torch.device) -> UserModel:
    """Call the user's function; put its model, without data, on ``home``. Raises as ``call_users_function``."""
    user = call_users_function(spec, setup, dtype)
    allocate(user.model, dtype, home)
    on_host = tree_map_only(
        Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"), user.batch
    )
    return replace(user, batch=on_host)


def call_users_function(spec: UserModule, setup: TrainSetup, dtype: torch.dtype) -> UserModel:
    """Import and call the user's function; return what it made, where it made it. ``dtype`` is the default dtype.

    Raises:
        SpecError: if it cannot be found, fails, or returns something else; one line.
        MemoryError: if host memory ran out, or what a trial may take of it.
    """
    function = _find(spec, spec.function, "module")
    block = _find(spec, spec.block, "transformer-block") if spec.block is not None else None
    if block is not None and not (isinstance(block, type) and issubclass(block, nn.Module)):
        raise SpecError(f"transformer-block: {spec.block} is no class of nn.Module")
    arguments = _arguments(function, spec, setup)
    try:
        with default_dtype(dtype):
            returned = _call(function, arguments)
    except MemoryError:
        raise  # an outcome of a trial
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise SpecError(f"module: {spec.function}() raised {type(error).__name__}: {text}") from error
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)):
        raise SpecError(f"module: {spec.function}() must return (nn.Module, batch), not {type(returned).__name__}")
    model, batch = returned
    return UserModel(model, batch, block, arguments)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let torch create floating tensors with this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def sizes_of(spec: UserModule) -> tuple[str, ...]:
    """Return which of SIZES the user's function takes. Raises SpecError if it cannot be found."""
    return tuple(size for size in SIZES if size in _parameters(_find(spec, spec.function, "module")))


def _call(function: Any, arguments: dict[str, int]) -> Any:
    """Return what a function builds; on the meta device where it moves modules that fake tensors cannot move.

    nn.Module._apply swaps the parameters of a FakeTensorMode, which refuses ones with weak references: those of the
    adapters that peft moves to the device of their layer.
    """
    try:
        return function(**arguments)
    except RuntimeError as error:
        if "_apply(): Couldn't swap" not in str(error):
            raise
    with _disable_current_modes(), torch.device("meta"):
        return function(**arguments)


def _arguments(function: Any, spec: UserModule, setup: TrainSetup) -> dict[str, int]:
    """Return the sizes to pass to a function: those that the user gave; else the setup's, if it has no default.

    Raises SpecError if the user gave a size that the function does not accept.
    """
    known = _parameters(function)
    for name in spec.arguments:
        if name not in known:
            raise SpecError(
                f"{SIZES[name]}: {spec.function}() makes its own batch; give it a parameter {name} to pass"
                f" --{SIZES[name]} on, or leave the option out"
            )
    needed = {name: getattr(setup, name) for name in SIZES if name in known and known[name].default is inspect._empty}
    return needed | spec.arguments


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _find(spec: UserModule, path: str, option: str) -> Any:
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise SpecError(f"{option}: {path!r} is not allowed; write it like 'package.module:name'")
    folder = str(Path(spec.folder).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise SpecError(f"{option}: cannot import {module}: {' '.join(str(error).split())[:300]}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise SpecError(f"{option}: {module} has no {name!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


@torch.no_grad()
def allocate(
    model: nn.Module, dtype: torch.dtype, home: torch.device, keeps: Callable[[Tensor], bool] = lambda parameter: False
) -> None:
    """Move every parameter and buffer to ``home``, parameters as ``allocate_parameters`` does. Tied ones stay tied."""
    allocate_parameters(model, dtype, home, keeps=keeps)
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                key = id(buffer)
                made[key] = made.get(key, torch.empty(buffer.shape, dtype=buffer.dtype, device=home))
                module._buffers[name] = made[key]


@torch.no_grad()
def allocate_parameters(
    model: nn.Module,
    dtype: torch.dtype,
    home: torch.device,
    fill: Callable[[Tensor, str], None] | None = None,
    keeps: Callable[[Tensor], bool] = lambda parameter: False,
) -> None:
    """Make every parameter anew on ``home``, floating ones as ``dtype``; ``fill`` is called with each and its name.

    Tied parameters stay tied. Those that one ``keeps`` stay of their dtype, and have the attributes that they had.
    """
    made: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            kept = keeps(parameter)
            kind = dtype if parameter.is_floating_point() and not kept else parameter.dtype
            key = id(parameter)
            if key not in made:
                fresh = torch.empty(parameter.shape, dtype=kind, device=home)
                if fill is not None:
                    fill(fresh, f"{prefix}.{name}" if prefix else name)
                made[key] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
                if kept:
                    made[key].__dict__.update(parameter.__dict__)
            module._parameters[name] = made[key]


def module_step(training: Training, batches: list[Any], losses: Tensor | None = None) -> None:
    """Run one optimizer step over micro-batches of a user's model, as step.py does over tokens.

    ``losses``, in host memory, gets for each of them its part of the step's mean loss; the copy may end after this
    returns.
    """
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        with gradient_sync(training.model, training.setup.sync_every_micro_batch or is_last):
            on_device = tree_map_only(Tensor, lambda tensor: tensor.to(training.device), batch)
            forward = partial(call_model, training.model, on_device)
            loss = forward_backward(training, forward, on_device, len(batches))
            if losses is not None:
                losses[index].copy_(loss, non_blocking=True)
            del loss, on_device, forward
    optimizer_step(training)


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch (CONTRACT)."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def loss_of(output: Any, _batch: Any = None) -> Tensor:
    """Return the loss of a model's output.

    Raises SpecError if there is no loss, and no floating tensor to take the mean of.
    """
    for leaf in (_named(output, "loss"), *tree_leaves(output)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf if leaf.dim() == 0 else leaf.float().mean()
    raise SpecError(
        f"module: the model returned {type(output).__name__}, which has no loss and no floating tensor; {CONTRACT}"
    )


def logits_of(output: Any) -> Tensor | None:
    """Return the tensor named ``logits`` in a model's output. None if there is none."""
    found = _named(output, "logits")
    return found if isinstance(found, Tensor) and found.dim() > 0 else None


def _named(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def block_class(model: nn.Module) -> type[nn.Module]:
    """Return the class of a model's blocks: as transformers names it, else that of the largest list of modules.

    Raises SpecError if the model holds no list of modules of one class.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    sizes: dict[type[nn.Module], int] = defaultdict(int)
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                sizes[type(block)] += sum(parameter.numel() for parameter in block.parameters())
    chosen = {kind: size for kind, size in sizes.items() if kind.__name__ in named} or sizes
    if not chosen:
        raise SpecError("the model has no nn.ModuleList of blocks; say which class they are: --transformer-block")
    return max(chosen, key=lambda kind: chosen[kind])


def named_class(model: nn.Module, path: str) -> type[nn.Module]:
    """Return the class ``pkg.mod:Class`` of a model's blocks. Raises SpecError if the model has no such module."""
    name = path.rpartition(":")[2].rpartition(".")[2]
    found = next((type(module) for module in model.modules() if type(module).__name__ == name), None)
    if found is None:
        raise SpecError(f"transformer-block: the model has no module of the class {path}")
    return found


def block_lists(model: nn.Module, kind: type[nn.Module]) -> dict[str, int]:
    """Return the names of the lists that hold blocks, each with how many."""
    counts: dict[str, int] = defaultdict(int)
    for name, module in model.named_modules():
        found = re.fullmatch(r"(.+)\.(\d+)", name)
        if isinstance(module, kind) and found:
            counts[found[1]] += 1
    return dict(counts)
