"""The work of one rehearsed step of a script, in order, as rehearse/inside/observe/issued.py writes it."""

import msgspec


class IssuedTensor(msgspec.Struct, frozen=True):
    """A kind of tensor: many tensors of a step are alike."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Empty for sparse tensors."""
    dtype: str
    itemsize: int
    device: str
    """``cuda`` or ``cpu``."""


class TensorNumbers(msgspec.Struct, frozen=True):
    """One argument's tensors, by their place in IssuedStep.tensors."""

    tensors: tuple[int, ...]


Argument = TensorNumbers | bool | int | tuple[int | None, ...] | None
"""Tensors, a number, or a few of them. None for anything else."""


class Issued(msgspec.Struct, frozen=True, tag_field="kind", kw_only=True):
    """The base of all that a step issues."""


class DispatchedOperator(Issued, frozen=True, kw_only=True):
    """An operator of PyTorch's dispatcher."""

    name: str
    """With its namespace, without its overload: ``aten::mm``."""
    arguments: dict[str, Argument]
    """By the names of its schema."""
    written: tuple[str, ...]
    """Arguments that it writes in place."""
    outputs: tuple[str, ...]
    """Arguments that it only writes (``out=``)."""
    results: tuple[int, ...]
    """Tensors that it made."""


class IssuedOperator(DispatchedOperator, frozen=True, tag="operator", kw_only=True):
    """An operator that launched something."""

    is_recomputed: bool
    """Whether activation checkpointing ran it again."""
    is_pointwise: bool = False
    """Whether PyTorch tags it ``pointwise``."""
    stream: int
    """The stream of its first launch, as the stand-in counts them."""


class HostOperator(DispatchedOperator, frozen=True, tag="host", kw_only=True):
    """An operator on large tensors in host memory, such as an optimizer's under offload."""


class TritonKernel(Issued, frozen=True, tag="triton", kw_only=True):
    """A kernel of Triton: torch.compile's, or a library's."""

    name: str
    names: tuple[str, ...]
    """The names of its arguments."""
    arguments: tuple[int | None, ...]
    """Its tensors; None for arguments that are none."""
    changed: tuple[str, ...]
    """Arguments that it changes in place, where that is known."""
    sizes: tuple[int, ...]
    """Points of Inductor's kernel along each dimension, rounded up to a power of two; empty if unknown."""
    is_inductors: bool
    """Whether torch.compile wrote it."""
    module: str
    """The module of Python in which a library has it; empty for torch.compile's."""
    stream: int


class LaunchedKernel(Issued, frozen=True, tag="kernel", kw_only=True):
    """A launch by no operator that PyTorch's dispatcher knows."""

    name: str
    stream: int


class IssuedCopy(Issued, frozen=True, tag="copy", kw_only=True):
    """A copy between the host and the GPU."""

    name: str
    """``to_device`` or ``to_host``."""
    num_bytes: int
    stream: int


class IssuedCollective(Issued, frozen=True, tag="collective", kw_only=True):
    """A collective, or a message from one rank to another."""

    name: str
    """The operator of the ``c10d`` namespace: ``allgather_base``, ``send``, ``recv``."""
    group: str
    ranks: tuple[int, ...] | None
    num_bytes: int
    """The whole message; of an all-to-all the larger of what this rank sends and what it receives."""
    is_asynchronous: bool
    """Whether the stream goes on without it."""
    stream: int
    """-1 for tensors of the host."""
    number: int = -1
    """Counts the collectives of the step, for those who wait for one."""
    peer: int | None = None
    """The other rank of a message."""
    batch: int | None = None
    """Messages with the same number were issued by one batch_isend_irecv."""


class RecordedEvent(Issued, frozen=True, tag="record", kw_only=True):
    """A CUDA event is recorded."""

    event: int
    stream: int


class StreamWait(Issued, frozen=True, tag="wait", kw_only=True):
    """A stream waits for a CUDA event as it was recorded last."""

    event: int
    stream: int


class HostWait(Issued, frozen=True, tag="host_wait", kw_only=True):
    """The host waits for a CUDA event, for a stream, or, where both are None, for the GPU."""

    event: int | None
    stream: int | None


class CollectivesWait(Issued, frozen=True, tag="collectives_wait", kw_only=True):
    """A stream waits for a collective that was started, or for all of them."""

    stream: int
    number: int | None = None
    """The collective's number; None: all."""


class HookCall(Issued, frozen=True, tag="hook", kw_only=True):
    """A hook of FSDP runs on the host: ``fsdp2 _pre_forward``."""

    name: str


class PhaseBegin(Issued, frozen=True, tag="phase", kw_only=True):
    """A phase begins: forward, backward or optimizer."""

    name: str


Step = (
    IssuedOperator
    | HostOperator
    | TritonKernel
    | LaunchedKernel
    | IssuedCopy
    | IssuedCollective
    | RecordedEvent
    | StreamWait
    | HostWait
    | CollectivesWait
    | HookCall
    | PhaseBegin
)
"""One thing of a step."""


class IssuedStep(msgspec.Struct, frozen=True):
    """One optimizer step."""

    number: int
    """From 1."""
    allows_tf32: bool
    """Whether products of float32 may run in TF32 (torch.set_float32_matmul_precision)."""
    tensors: tuple[IssuedTensor, ...]
    events: tuple[Step, ...]
