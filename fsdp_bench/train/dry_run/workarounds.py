"""Lists the symbols of torch that are replaced so that real FSDP and DDP code runs on tensors without data.

Each entry of WORKAROUNDS names a symbol, why it is replaced, and a part of its source that must be there. If a
symbol is missing or has changed in the installed torch, dry runs are refused with its name: a dry run is exact or it
does not run. All were checked on torch 2.13.0 and, except FakeTensor.view, on 2.11.0, and on no other version.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.train.dry_run import replacements

Replace = Callable[[Any], Any]


@dataclass(frozen=True)
class Workaround:
    """A symbol of torch and its replacement during a dry run."""

    symbol: str
    """``module:attribute.path``."""
    marker: str
    """A part of the symbol's source (or docstring, for compiled code) on which the replacement relies."""
    why: str
    replace: Replace
    """Takes the original, returns the replacement."""
    only_accelerator: bool = False

    def find(self) -> tuple[Any, str, Any]:
        """Return the object that has the symbol, its attribute name, and the symbol.

        Raises:
            MachineError: if the installed torch has no such symbol, or a changed one.
        """
        module, _, path = self.symbol.partition(":")
        *parents, name = path.split(".")
        try:
            owner: Any = importlib.import_module(module)
            for parent in parents:
                owner = getattr(owner, parent)
            found = inspect.getattr_static(owner, name)
        except (ImportError, AttributeError):
            raise self._refusal("is not there") from None
        if self.marker not in _text(found):
            raise self._refusal(f"has changed ({self.marker!r} is not in it)")
        return owner, name, found

    def _refusal(self, how: str) -> MachineError:
        return MachineError(
            f"torch {torch.__version__}: {self.symbol.replace(':', '.')} {how}, so a dry run could be wrong; "
            "dry runs were checked with torch 2.11.0 and 2.13.0"
        )


def _text(symbol: Any) -> str:
    """Return the source of a symbol; for compiled code its docstring, for data its keys."""
    if isinstance(symbol, dict):
        return " ".join(map(str, symbol))
    function = getattr(symbol, "__func__", symbol)
    try:
        return inspect.getsource(function)
    except (TypeError, OSError):
        return f"{getattr(function, '__name__', '')} {getattr(function, '__doc__', '')}"


@contextmanager
def applied(accelerator: bool) -> Iterator[None]:
    """Replace every symbol inside a ``with`` block. If one cannot be replaced, replace none.

    Raises:
        MachineError: naming the first symbol that the installed torch lacks or has changed.
    """
    chosen = [entry for entry in WORKAROUNDS if accelerator or not entry.only_accelerator]
    places = [(entry, *entry.find()) for entry in chosen]
    inherited = {entry.symbol for entry, owner, name, _ in places if name not in vars(owner)}
    try:
        for entry, owner, name, found in places:
            setattr(owner, name, entry.replace(found))
        yield
    finally:
        for entry, owner, name, found in reversed(places):
            if entry.symbol in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, found)


WORKAROUNDS = (
    Workaround(
        symbol="torch:UntypedStorage.data_ptr",
        marker="data_ptr",
        why="FSDP1 asks by address whether a storage is allocated and whether two tensors share one; a fake one's is 0",
        replace=replacements.storage_address,
    ),
    Workaround(
        symbol="torch._subclasses.fake_tensor:FakeTensor.data_ptr",
        marker="data_ptr",
        why="the same for tensors (_runtime_utils._catch_all_reshard)",
        replace=replacements.tensor_address,
    ),
    Workaround(
        symbol="torch._subclasses.fake_impls:op_implementations_dict",
        marker="aten._local_scalar_dense.default",
        why="the gradient scalers read found_inf with item(), which a fake tensor refuses",
        replace=replacements.known_scalars,
    ),
    Workaround(
        symbol="torch.distributed._functional_collectives:wait_tensor",
        marker="_c10d_functional.wait_tensor",
        why="a collective's fake tensor is waited for by making another one (_wait_tensor_meta); the operator on real "
        "tensors returns its argument",
        replace=replacements.itself,
    ),
    Workaround(
        symbol="torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
        marker="FakeTensorMode()",
        why="DTensor tries an operator on fake tensors to learn its result's shape; torch 2.11 does so in every step "
        "of a fused optimizer, and between fake tensors those would count as the step's",
        replace=replacements.without_modes,
    ),
    Workaround(
        symbol="torch.distributed.fsdp._fully_shard._fully_shard:_get_post_forward_mesh_info",
        marker="HSDPMeshInfo(",
        why="reshard_after_forward=N makes a mesh for every unit, which computes with rank numbers: its tensors must be"
        " real",
        replace=replacements.without_modes,
    ),
    Workaround(
        symbol="torch.nn.parallel.distributed:_verify_param_shape_across_processes",
        marker="_verify_params_across_processes",
        why="DDP compares the parameters' shapes over ranks by reading tensors in C++",
        replace=replacements.only_allocate,
    ),
    Workaround(
        symbol="torch.distributed:Reducer._rebuild_buckets",
        marker="_rebuild_buckets",
        why="DDP's reducer writes the buckets' indices into int32 tensors by pointer",
        replace=replacements.rebuild_with_real_indices,
    ),
    Workaround(
        symbol="torch._subclasses.fake_tensor:FakeTensor.data",
        marker="data",
        why="``x.data = y`` changes the storage but not the fake device, which CPU offload moves (flat_param_to)",
        replace=replacements.data_with_device,
        only_accelerator=True,
    ),
    Workaround(
        symbol="torch._subclasses.fake_tensor:FakeTensor.view",
        marker="view",
        why="a view of a fake tensor holds what it is a view of, for its reverse view function (ADInplaceOrView makes "
        "one where Python dispatches), and with it the memory that ``x.data = y`` frees on a GPU",
        replace=replacements.view_that_knows,
        only_accelerator=True,
    ),
    Workaround(
        symbol="torch:Tensor._make_subclass",
        marker="_make_subclass",
        why="tensors of the fake accelerator get a CPU's dispatch keys: without a kernel for its own, torch decomposes "
        "operators that a GPU runs whole (silu_backward), and C++ refuses to swap a tensor's data between devices",
        replace=replacements.with_cpu_keys,
        only_accelerator=True,
    ),
    Workaround(
        symbol="torch._subclasses.fake_tensor:FakeTensor.pin_memory",
        marker="pin_memory",
        why="pinning has no fake kernel",
        replace=replacements.pinned_copy,
        only_accelerator=True,
    ),
    Workaround(
        symbol="torch._subclasses.fake_tensor:FakeTensor.is_pinned",
        marker="is_pinned",
        why="a fake host tensor is as if pinned",
        replace=replacements.always,
        only_accelerator=True,
    ),
    Workaround(
        symbol="torch._subclasses.fake_tensor:FakeTensor.record_stream",
        marker="record_stream",
        why="it has no fake kernel, and says nothing about live bytes",
        replace=replacements.no_check,
        only_accelerator=True,
    ),
    Workaround(
        symbol="torch.nn.parallel.distributed:DistributedDataParallel._check_comm_hook",
        marker="bf16_compress_hook",
        why="it refuses the bf16 compression hook on a build of torch without CUDA",
        replace=replacements.no_check,
        only_accelerator=True,
    ),
    Workaround(
        symbol="torch.amp.autocast_mode:autocast.__init__",
        marker="self.device = device_type",
        why="tensors with a CPU's dispatch keys obey a CPU's autocast, whose kernels fused_kernels.py replaces",
        replace=replacements.autocast_of_cpu_keys,
        only_accelerator=True,
    ),
    Workaround(
        symbol="torch.accelerator:current_stream",
        marker="_accelerator_getStream",
        why="the fake accelerator's streams are Python's; fully_shard asks for one where it waits for a unit that was"
        " gathered and never used, as in backward of frozen blocks (finalize_backward)",
        replace=replacements.stream_without_work,
        only_accelerator=True,
    ),
    Workaround(
        symbol="torch:clear_autocast_cache",
        marker="clear_autocast_cache",
        why="fused_kernels.py keeps its own casts of parameters, which must end when torch's do",
        replace=replacements.clear_both_caches,
        only_accelerator=True,
    ),
)
