"""Lists the symbols of torch that are replaced so that real FSDP and DDP code runs on tensors without data.

Each entry of WORKAROUNDS names a symbol, why it is replaced, and a part of its source that must be there. If a
symbol is missing or has changed in the installed torch, dry runs are refused with its name: a dry run is exact or it
does not run. All were checked on torch 2.13.0 and, except FakeTensor.view, on 2.11.0, and on no other version.
"""

import importlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.train.dry_run.fake_gpu import NAME, FakeStream
from fsdp_bench.train.dry_run.fused_kernels import cast_parameters

Replace = Callable[[Any], Any]


@dataclass(frozen=True)
class Workaround:
    """A symbol of torch and its replacement during a dry run."""

    symbol: str
    """``module:attribute.path``."""
    marker: str
    """A part of the symbol's source (for compiled code its name and docstring) on which the replacement relies."""
    why: str
    replace: Replace
    """Takes the original, returns the replacement."""
    only_accelerator: bool = False

    def find(self) -> tuple[Any, str, Any]:
        """Return the symbol, its object and attribute name. Raises MachineError if torch lacks or has changed it."""
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

    Raises MachineError, naming the first symbol that the installed torch lacks or has changed.
    """
    chosen = [entry for entry in WORKAROUNDS if accelerator or not entry.only_accelerator]
    places = [(entry, *entry.find()) for entry in chosen]
    with ExitStack() as stack:
        for entry, owner, name, found in places:
            stack.enter_context(mock.patch.object(owner, name, entry.replace(found)))
        yield


WORKAROUNDS: list[Workaround] = []


def workaround(symbol: str, why: str, marker: str = "", only_accelerator: bool = False) -> Callable[[Replace], Replace]:
    """Add a workaround; the decorated function takes the original and returns the replacement.

    ``marker`` is by default the symbol's own name, for compiled code.
    """

    def add(replace: Replace) -> Replace:
        given = marker or symbol.rpartition(":")[2].rpartition(".")[2]
        WORKAROUNDS.append(Workaround(symbol, given, why, replace, only_accelerator))
        return replace

    return add


@workaround(
    symbol="torch:UntypedStorage.data_ptr",
    why="FSDP1 asks by address whether a storage is allocated and whether two tensors share one; a fake one's is 0",
)
def _storage_address(original: Any) -> Any:
    def data_ptr(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":
            return original(storage)
        return storage._cdata if storage.nbytes() > 0 else 0

    return data_ptr


@workaround(
    symbol="torch._subclasses.fake_tensor:FakeTensor.data_ptr",
    why="the same for tensors (_runtime_utils._catch_all_reshard)",
)
def _tensor_address(_original: Any) -> Any:
    def data_ptr(tensor: Any) -> int:
        start = tensor.untyped_storage().data_ptr()
        return start + tensor.storage_offset() * tensor.element_size() if start else 0

    return data_ptr


@workaround(
    symbol="torch._subclasses.fake_impls:op_implementations_dict",
    marker="aten._local_scalar_dense.default",
    why="the gradient scalers read found_inf with item(), which a fake tensor refuses; with 0 they step as usual",
)
def _known_scalars(original: dict[Any, Any]) -> Any:
    read = torch.ops.aten._local_scalar_dense.default

    def zero(_mode: Any, _func: Any, tensor: torch.Tensor) -> float | int:
        return 0.0 if tensor.dtype.is_floating_point else 0

    return {**original, read: zero}


@workaround(
    symbol="torch.distributed._functional_collectives:wait_tensor",
    marker="_c10d_functional.wait_tensor",
    why="a collective's fake tensor is waited for by making another one (_wait_tensor_meta); the operator on real "
    "tensors returns its argument",
)
def _itself(_original: Any) -> Any:
    return lambda tensor: tensor


@workaround(
    symbol="torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    marker="FakeTensorMode()",
    why="DTensor tries an operator on fake tensors to learn its result's shape; torch 2.11 does so in every step "
    "of a fused optimizer, and between fake tensors those would count as the step's",
)
@workaround(
    symbol="torch.distributed.fsdp._fully_shard._fully_shard:_get_post_forward_mesh_info",
    marker="HSDPMeshInfo(",
    why="reshard_after_forward=N makes a mesh for every unit, which computes with rank numbers: its tensors must be"
    " real",
)
def _without_modes(original: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return run


@workaround(
    symbol="torch.nn.parallel.distributed:_verify_param_shape_across_processes",
    marker="_verify_params_across_processes",
    why="DDP compares the parameters' shapes over ranks by reading tensors in C++ (verify_params_across_processes in "
    "c10d/reducer.cpp); the same is allocated",
)
def _only_allocate(_original: Any) -> Any:
    def verify(process_group: dist.ProcessGroup, tensors: list[torch.Tensor], logger: Any = None) -> None:
        num_sizes, device = sum(2 * tensor.dim() for tensor in tensors), tensors[0].device
        # The number of parameters of each rank, one tensor each; all sizes and strides, and on the host again.
        _counts = torch.empty(1 + process_group.size(), dtype=torch.int64, device=device)
        _metadata = torch.empty(num_sizes, dtype=torch.int64, device=device)
        _control = torch.empty(num_sizes, dtype=torch.int64, device="cpu")

    return verify


class _RealIndices(TorchDispatchMode):
    """A mode in which int32 tensors are real."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        given = (kwargs or {}).get("dtype") if not tensors else tensors[0].dtype
        if given is not torch.int32:
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():
            return func(*args, **{**(kwargs or {}), **({} if tensors else {"device": "cpu"})})


@workaround(
    symbol="torch.distributed:Reducer._rebuild_buckets",
    why="DDP's reducer writes the buckets' indices into int32 tensors by pointer",
)
def _rebuild_with_real_indices(original: Any) -> Any:
    def rebuild(reducer: Any) -> Any:
        with _RealIndices():
            return original(reducer)

    return rebuild


@workaround(
    symbol="torch._subclasses.fake_tensor:FakeTensor.data",
    why="``x.data = y`` changes the storage but not the fake device, which CPU offload moves (flat_param_to), nor that "
    "of the base of a view",
    only_accelerator=True,
)
def _data_with_device(original: Any) -> Any:
    def assign(tensor: Any, value: Any) -> None:
        original.__set__(tensor, value)
        if isinstance(value, FakeTensor):
            tensor.fake_device = value.fake_device
            tensor.constant = None  # a small host tensor's value: what is computed from it would be of the host, too
            viewed = tensor.viewed() if hasattr(tensor, "viewed") else None
            if viewed is not None:
                assign(viewed, value.detach().reshape(viewed.shape))

    return property(original.__get__, assign)


@workaround(
    symbol="torch._subclasses.fake_tensor:FakeTensor.view",
    why="a view of a fake tensor holds what it is a view of, for its reverse view function (ADInplaceOrView makes "
    "one where Python dispatches), and with it the memory that ``x.data = y`` frees on a GPU",
    only_accelerator=True,
)
def _view_that_knows(original: Any) -> Any:
    def view(tensor: Any, *shape: Any) -> Any:
        found = original(tensor, *shape)
        found.viewed = weakref.ref(tensor)
        return found

    return view


@workaround(
    symbol="torch:Tensor._make_subclass",
    why="tensors of the fake accelerator get a CPU's dispatch keys: without a kernel for its own, torch decomposes "
    "operators that a GPU runs whole (silu_backward), and C++ refuses to swap a tensor's data between devices",
    only_accelerator=True,
)
def _with_cpu_keys(original: Any) -> Any:
    def make_subclass(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_for_backend_keys") is not None:
            kwargs["device_for_backend_keys"] = torch.device("cpu")
        return original.__func__(cls, *args, **kwargs)

    return staticmethod(make_subclass)


@workaround(
    symbol="torch._subclasses.fake_tensor:FakeTensor.pin_memory",
    why="pinning, which copies, has no fake kernel",
    only_accelerator=True,
)
def _pinned_copy(_original: Any) -> Any:
    return lambda tensor, device=None: tensor.clone()


@workaround(
    symbol="torch._subclasses.fake_tensor:FakeTensor.is_pinned",
    why="a fake host tensor is as if pinned",
    only_accelerator=True,
)
def _always(_original: Any) -> Any:
    return lambda *_args, **_kwargs: True


@workaround(
    symbol="torch._subclasses.fake_tensor:FakeTensor.record_stream",
    why="it has no fake kernel, and says nothing about live bytes",
    only_accelerator=True,
)
@workaround(
    symbol="torch.nn.parallel.distributed:DistributedDataParallel._check_comm_hook",
    marker="bf16_compress_hook",
    why="it refuses the bf16 compression hook on a build of torch without CUDA",
    only_accelerator=True,
)
def _nothing(_original: Any) -> Any:
    return lambda *_args, **_kwargs: None


@workaround(
    symbol="torch.amp.autocast_mode:autocast.__init__",
    marker="self.device = device_type",
    why="tensors with a CPU's dispatch keys obey a CPU's autocast, whose kernels fused_kernels.py replaces",
    only_accelerator=True,
)
def _autocast_of_cpu_keys(original: Any) -> Any:
    def init(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(context, "cpu" if device_type == NAME else device_type, *args, **kwargs)

    return init


@workaround(
    symbol="torch.accelerator:current_stream",
    marker="_accelerator_getStream",
    why="the fake accelerator's streams are Python's; fully_shard asks for one where it waits for a unit that was"
    " gathered and never used, as in backward of frozen blocks (finalize_backward)",
    only_accelerator=True,
)
def _stream_without_work(_original: Any) -> Any:
    return lambda *_args, **_kwargs: FakeStream()


@workaround(
    symbol="torch:clear_autocast_cache",
    why="fused_kernels.py keeps its own casts of parameters, which must end when torch's do",
    only_accelerator=True,
)
def _clear_both_caches(original: Any) -> Any:
    def clear() -> None:
        original()
        cast_parameters.clear()

    return clear
