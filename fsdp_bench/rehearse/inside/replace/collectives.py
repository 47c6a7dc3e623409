"""Collectives of one rank that has no peers: each ends at once, and its output is as large as the real one.

torch.distributed, DistributedDataParallel and torch.compile's functional collectives all call the operators of the
``c10d`` namespace (torch/csrc/distributed/c10d/Ops.cpp), so the operators are replaced there. Small outputs hold what
they would hold if every rank had sent what this one sends, so that objects can be exchanged and counts be summed. Large
ones are not written, on the assumption that nothing is decided by them. Integers that another rank broadcasts are
marked as unknown.

Small messages of integers from one rank to another have their values, because pipeline stages tell each other so which
shapes they send. They are reported, and given to the rehearsal of the rank that receives them (``give_messages``). A
rank that receives one which is not known yet ends there, and is run again once it is.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from . import integers
from .integers import SMALL_BYTES, tensors_in

calls: Counter[tuple[str, str]] = Counter()
"""Call counts by (process group, operator)."""

sizes: dict[str, int] = {}
"""The number of ranks of each process group that was used."""

members: dict[str, list[int]] = {}
"""The ranks of each of them, where torch says them."""

peers: set[int] = set()
"""Ranks to which this one sends, or from which it receives."""

sent: defaultdict[int, list[str]] = defaultdict(list)
"""Messages of integers by the rank that receives them, in hexadecimal digits."""

waits_for: int | None = None
"""The rank whose message is not known, if this one ended because of it."""

_ends_script: type[BaseException] = RuntimeError

_unread: dict[int, list[str]] = {}
"""Messages of integers by the rank that sends them."""

_batch: int | None = None
"""The number of the running batch of messages."""

MOST_MESSAGE_BYTES = 1 << 16
"""The largest message of integers whose values are exchanged."""

reduction: dist.ReduceOp.RedOpType | None = None
"""The ReduceOp of the running call of torch.distributed. None if C++ called the operator, as for DDP's gradients."""

_library: torch.library.Library | None = None


@dataclass(frozen=True)
class ScriptCollective:
    """One collective that the script issued."""

    name: str
    """The operator of the ``c10d`` namespace, without underscores at its ends."""
    group: str
    ranks: list[int] | None
    """The ranks of its process group; None if torch does not say."""
    message: Any
    """The tensors of the whole message: an all-gather's output, a reduce-scatter's input."""
    is_asynchronous: bool
    """Whether the current stream goes on without it (``async_op=True``)."""
    outputs: Any
    """The tensors by which whoever waits for it is recognized."""
    peer: int | None = None
    """The other rank of a message."""
    batch: int | None = None
    """The number of the batch_isend_irecv that a message is part of."""


on_call: Callable[[ScriptCollective, Callable[[], Any]], Any] | None = None
"""Is given each collective and what runs it, and runs it."""

on_wait: Callable[[Any], None] | None = None
"""Is called with a collective's outputs where the current stream waits for it (``Work.wait``)."""


def replace_collectives() -> None:
    """Replace the collectives of this process, for tensors of the CPU and of GPUs."""
    global _library
    for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
        note_reduction(name)
    _library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are overridden, which is the purpose
        for name, kernel in _KERNELS.items():
            for key in ("CPU", "CUDA"):
                _library.impl(name, _counted(name, kernel, torch.device(key.lower())), key)
    _observe_waits()
    _number_batches()


def give_messages(known: Mapping[str, list[str]], ends_script: type[BaseException]) -> None:
    """Take messages of integers by sending rank; ``ends_script`` is raised for one that is not known."""
    global _ends_script
    _ends_script = ends_script
    _unread.update({int(rank): list(messages) for rank, messages in known.items()})


def note_reduction(name: str) -> None:
    """Let a function of torch.distributed note its ReduceOp, which the c10d operator does not pass on to Python."""
    original = getattr(c10d, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def instead(*arguments: Any, **keywords: Any) -> Any:
        global reduction
        given = signature.bind(*arguments, **keywords).arguments.get("op", dist.ReduceOp.SUM)
        reduction = getattr(given, "op", given)  # PREMUL_SUM wraps its kind in a ReduceOp
        try:
            return original(*arguments, **keywords)
        finally:
            reduction = None

    setattr(c10d, name, instead)
    setattr(dist, name, instead)


_UNCHANGED = ("AVG", "MIN", "MAX", "BAND", "BOR")
"""Reductions of equal values to that value."""


def _reduce(tensor: torch.Tensor, group: Any) -> None:
    """Give a small tensor the value that it has after a reduction over ranks with equal values."""
    if tensor.device.type == "cuda" and tensor.is_floating_point():
        return  # unknown anyway
    name = getattr(reduction, "name", None)
    if name == "SUM" and tensor.nbytes <= SMALL_BYTES and tensor.dtype != torch.bool:
        tensor.mul_(_rank_and_size(group)[1])
    elif name not in _UNCHANGED:
        integers.forget(tensor)


def _counted(name: str, kernel: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    async_at, by_default = _place_of_async_op(name)

    def run(*arguments: Any) -> Any:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            return kernel(*arguments)

    def called(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
                group = ProcessGroup.unbox(argument)
                group._get_backend(device)  # as Ops.cpp does: an error where NCCL alone is to take a tensor of the CPU
                calls[group.group_name, name.strip("_")] += 1
                sizes[group.group_name] = group.size()
                if group.group_name not in members and (ranks := _ranks(group)) is not None:
                    members[group.group_name] = ranks
                break
        else:
            return run(*arguments)
        peer, plain = None, name.strip("_")
        if plain in ("send", "recv"):
            peer = _global_rank(group, arguments[2])
            peers.add(peer)
        if on_call is None:
            return run(*arguments)
        is_asynchronous = arguments[async_at] if async_at is not None and async_at < len(arguments) else by_default
        call = ScriptCollective(
            name=plain,
            group=group.group_name,
            ranks=_ranks(group),
            message=_message(plain, arguments),
            is_asynchronous=bool(is_asynchronous) or peer is not None,
            outputs=arguments[0],
            peer=peer,
            batch=None if peer is None else _batch,
        )
        return on_call(call, lambda: run(*arguments))

    return called


def _message(name: str, arguments: Sequence[Any]) -> Any:
    """Return the whole message: of an all-to-all the larger of what is sent and what is received."""
    if "alltoall" in name:
        return max(arguments[:2], key=lambda tensors: sum(tensor.nbytes for tensor in tensors_in(tensors)))
    return arguments["reduce_scatter" in name and len(arguments) > 1]


def _global_rank(group: Any, rank: int) -> int:
    ranks = _ranks(group)
    return rank if ranks is None else ranks[rank]


def _place_of_async_op(name: str) -> tuple[int | None, bool]:
    """Return where an operator takes whether it is asynchronous, and what holds if it is not said."""
    operator = getattr(torch.ops.c10d, name, None)
    arguments = operator.default._schema.arguments if operator is not None else ()
    for place, argument in enumerate(arguments):
        if argument.name in ("async_op", "asyncOp"):
            return place, bool(argument.default_value)
    return None, False


def _ranks(group: Any) -> list[int] | None:
    try:
        return list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return None


def _observe_waits() -> None:
    """Let ``Work.wait`` say that it was called; C++ calls its own."""
    original = dist.Work.wait

    @functools.wraps(original)
    def wait(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if on_wait is not None:
            on_wait(_outputs_of(self))
        return original(self, *arguments, **keywords)

    dist.Work.wait = wait


def _outputs_of(work: Any) -> Any:
    try:
        return work.get_future().value()
    except RuntimeError:  # work of the script's own, which has no future
        return None


def _number_batches() -> None:
    """Let ``batch_isend_irecv`` say which messages are one batch, which NCCL starts together."""
    original = c10d.batch_isend_irecv
    numbers = itertools.count()

    @functools.wraps(original)
    def instead(*arguments: Any, **keywords: Any) -> Any:
        global _batch
        _batch = next(numbers)
        try:
            return original(*arguments, **keywords)
        finally:
            _batch = None

    c10d.batch_isend_irecv = dist.batch_isend_irecv = instead


def _finished(tensors: Sequence[torch.Tensor]) -> Any:
    """Return work that is done, whose future holds the tensors: DistributedDataParallel's reducer takes them there."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(list(tensors))
    return _create_work_from_future(future).boxed()


def _fill(output: torch.Tensor, source: torch.Tensor, *_rest: Any) -> None:
    """Copy a small tensor, as often as it goes into the output; in one operator, which allocates nothing."""
    if 0 < output.nbytes <= SMALL_BYTES and 0 < source.numel() <= output.numel():
        times = output.numel() // source.numel()
        output.view(-1)[: times * source.numel()].view(times, -1).copy_(source.reshape(1, -1).expand(times, -1))


def _rank_and_size(group: Any) -> tuple[int, int]:
    found = ProcessGroup.unbox(group)
    return found.rank(), found.size()


def _reduce_each(tensors: Any, group: Any, *_rest: Any) -> None:
    for tensor in tensors:
        _reduce(tensor, group)


def _broadcast(tensors: Any, group: Any, root: int, *_rest: Any) -> None:
    """The root keeps what it has; of another rank it is not known."""
    if root != _rank_and_size(group)[0]:
        _receive(tensors)


def _receive(tensors: Any, *_rest: Any) -> None:
    for tensor in tensors:
        integers.forget(tensor)


def _is_exchanged(tensor: torch.Tensor) -> bool:
    return 0 < tensor.nbytes <= MOST_MESSAGE_BYTES and not (tensor.is_floating_point() or tensor.is_complex())


def _send(tensors: Any, group: Any, to: int, *_rest: Any) -> None:
    """Report a message of integers, which its receiver needs."""
    for tensor in filter(_is_exchanged, tensors):
        sent[_global_rank(ProcessGroup.unbox(group), to)].append(integers.values_of(tensor))


def _receive_message(tensors: Any, group: Any, source: int, *_rest: Any) -> None:
    """Write a message of integers that is known; end the script at one that is not."""
    global waits_for
    rank = _global_rank(ProcessGroup.unbox(group), source)
    for tensor in tensors:
        if not _is_exchanged(tensor):
            integers.forget(tensor)
        elif messages := _unread.get(rank):
            integers.set_values(tensor, messages.pop(0))
        else:
            waits_for = rank
            raise _ends_script


def _nothing(*_arguments: Any) -> None:
    """A barrier."""


def _each(compute: Callable[..., None]) -> Callable[..., None]:
    """Return a function for lists of outputs and sources."""

    def of_lists(outputs: Any, sources: Any, *rest: Any) -> None:
        for output, source in zip(outputs, sources, strict=False):
            compute(output, source, *rest)

    return of_lists


def _gather(outputs: Any, sources: Any, *_rest: Any) -> None:
    """Each input has a list of outputs, one for each rank."""
    for parts, source in zip(outputs, sources, strict=False):
        for part in parts:
            _fill(part, source)


def _gather_coalesced(outputs: Any, sources: Any, *_rest: Any) -> None:
    """``output_lists`` has a list for each rank, with a tensor for each input."""
    for parts in outputs:
        _each(_fill)(parts, sources)


def _keep_own_part(output: torch.Tensor, whole: torch.Tensor, group: Any, *_rest: Any) -> None:
    if output.nbytes <= SMALL_BYTES and output.numel():
        rank, _size = _rank_and_size(group)
        own = whole.reshape(-1)[rank * output.numel() : (rank + 1) * output.numel()]
        if own.numel() == output.numel():
            output.copy_(own.view_as(output))
            _reduce(output, group)


def _scatter(outputs: Any, lists: Any, group: Any, *_rest: Any) -> None:
    """Each rank's own of each list, which only the root has."""
    rank, _size = _rank_and_size(group)
    for output, parts in zip(outputs, lists, strict=False):
        if len(parts) > rank:
            _fill(output, parts[rank])
        else:
            integers.forget(output)


def _reduce_scatter(outputs: Any, lists: Any, group: Any, *_rest: Any) -> None:
    _scatter(outputs, lists, group)
    _reduce_each(outputs, group)


def _with_outputs(compute: Callable[..., None]) -> Callable[..., Any]:
    """Return a kernel that returns its outputs, which are its first argument, and work that is done."""

    def kernel(outputs: Any, *arguments: Any) -> Any:
        compute(outputs, *arguments)
        return outputs, _finished(tensors_in(outputs))

    return kernel


def _work_alone(compute: Callable[..., None]) -> Callable[..., Any]:
    """Return a kernel that returns work that is done."""
    return lambda outputs, *arguments: _with_outputs(compute)(outputs, *arguments)[1]


_KERNELS: dict[str, Callable[..., Any]] = {
    "allreduce_": _with_outputs(_reduce_each),
    "broadcast_": _with_outputs(_broadcast),
    "allreduce_coalesced_": _work_alone(_reduce_each),
    "reduce_": _work_alone(_reduce_each),
    "barrier": _work_alone(_nothing),
    "send": _work_alone(_send),
    "recv_": _work_alone(_receive_message),
    "recv_any_source_": _work_alone(_receive),
    "monitored_barrier_": _nothing,
    "_allgather_base_": _with_outputs(_fill),
    "allgather_": _with_outputs(_gather),
    "allgather_coalesced_": _work_alone(_gather_coalesced),
    "allgather_into_tensor_coalesced_": _work_alone(_each(_fill)),
    "_reduce_scatter_base_": _with_outputs(_keep_own_part),
    "reduce_scatter_": _with_outputs(_reduce_scatter),
    "reduce_scatter_tensor_coalesced_": _work_alone(_each(_keep_own_part)),
    "scatter_": _with_outputs(_scatter),
    "gather_": _work_alone(_gather),
    "gather_into_tensor_": _with_outputs(_fill),
    "alltoall_": _with_outputs(_each(_fill)),
    "alltoall_base_": _work_alone(_fill),
}
