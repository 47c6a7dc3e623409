"""Activation checkpointing as torch/utils/checkpoint.py does it, symbol by symbol; activation offload.

Without reentrant autograd, forward replaces every saved tensor by a holder. The first holder that backward opens runs
the block's forward again, up to the last tensor that is needed (early stop). Selective checkpointing also keeps the
outputs of some operators, by default of matrix products and of attention, which the second forward then takes instead
of computing them. Every operator that a policy can name (spec/checkpointing_policy.py) calls
``Operators.saved_output``.
"""

import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from fsdp_bench.simulate.autograd import Engine, Gradients, accumulator, operator_node
from fsdp_bench.simulate.events import Stream
from fsdp_bench.simulate.operators.core import Operators, Saved
from fsdp_bench.simulate.tape import Storage, Tensor
from fsdp_bench.spec.checkpointing_policy import CheckpointingPolicy
from fsdp_bench.spec.pointwise import STRIDED

# -- Activation offload of blocks: torch.autograd.graph.save_on_cpu(pin_memory=True), which offload_wrapper is ---------
#
# A block's saved tensors are copied to pinned host memory when they are saved, parameters among them, each as often as
# it is saved, and back when backward needs them: all on the compute stream, without the host waiting. A checkpointed
# block saves its inputs alone (torch/utils/checkpoint.py, _CheckpointFrame.save_inputs).

ACTIVATIONS = "activations"
"""``Work.group`` of these copies, by which the host's memory is added up."""


class SaveOnCpu:
    """save_on_cpu: the hooks of saved tensors, and what goes around a block, outside of its checkpointing."""

    def __init__(self, op: Operators) -> None:
        self._op = op

    def around(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        """Run a block whose saved tensors go to the host."""
        self._op.tape.hooks.append(self)
        try:
            return forward(*inputs)
        finally:
            self._op.tape.hooks.pop()

    def pack(self, saved: list[Tensor]) -> list[Tensor]:
        """Copy to the host. The GPU first makes a contiguous copy of other tensors (aten/native/cuda/Copy.cu)."""
        op, packed = self._op, list[Tensor]()
        for tensor in saved:
            if tensor.is_on_host:
                packed.append(tensor)
                continue
            if tensor.is_strided and not op.kernels.observed:
                contiguous = op.temporary(tensor.numel, tensor.itemsize, "aten::contiguous")
                op.run("aten::clone", contiguous, contiguous, path=STRIDED)
                del contiguous
            op.tape.copy("to_host", tensor.numel * tensor.itemsize, Stream.COMPUTE, ACTIVATIONS)
            packed.append(Tensor(None, tensor.numel, tensor.itemsize, tensor.node, tensor.output))
        return packed

    def unpack(self, packed: list[Tensor]) -> list[Tensor]:
        """Copy back to the GPU."""
        op, tensors = self._op, list[Tensor]()
        for one in packed:
            tensor = one
            if not one.is_on_host:
                tensor = op.temporary(one.numel, one.itemsize, "aten::_to_copy")
                op.tape.copy("to_device", one.numel * one.itemsize, Stream.COMPUTE, ACTIVATIONS)
                tensor.node, tensor.output = one.node, one.output
            tensors.append(tensor)
        return tensors


class _StopRecomputation(Exception):
    """_StopRecomputationError: everything that was saved in forward is there again."""


class _Holder(msgspec.Struct, eq=False, weakref=True):
    """_Holder: what a node keeps instead of a tensor.

    torch's holds the key of a weak dictionary of recomputed tensors; this one holds the tensor, for as long.
    """

    recomputed: Tensor | None = None


class _Kept:
    """The outputs that selective checkpointing keeps (_CachingTorchDispatchMode), then hands out (_Cached...)."""

    def __init__(self, policy: CheckpointingPolicy) -> None:
        self._names = {name.replace(".", "::", 1) for name in policy.saved}
        """Those of the dispatcher."""
        self._outputs: list[Tensor | None] = []
        self._next = -1
        """Negative while the first forward fills."""
        self._drops_every_second_product = policy.recomputes_every_second_product
        self._num_products = 0

    def hand_out(self) -> None:
        """Start the second forward."""
        self._next = 0
        self._num_products = 0

    def output(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return an operator's output: made and kept, or the one that was kept, or made again."""
        if name not in self._names:
            return make()
        if name == "aten::mm" and self._drops_every_second_product:
            self._num_products += 1
            if self._num_products % 2 == 0:
                return make()
        if self._next < 0:
            out = make()
            self._outputs.append(out.detach())
            return out
        kept = self._outputs[self._next]
        assert kept is not None
        self._outputs[self._next] = None
        self._next += 1
        return Tensor(kept.storage, kept.numel, kept.itemsize)


class _CheckpointFrame:
    """_CheckpointFrame and _checkpoint_hook: one call of one checkpointed block."""

    def __init__(
        self,
        op: Operators,
        forward: Callable[..., Any],
        inputs: tuple[Any, ...],
        kept: _Kept | None,
        num_positional: int | None,
    ) -> None:
        self.op = op
        self.autocast = op.autocast
        self.forward = forward
        self.outer = op.tape.hooks[-1] if op.tape.hooks else None
        """Saved-tensor hooks around the block, which pack its inputs."""
        self.inputs = self._through_outer_hooks("pack", inputs[:num_positional])
        self.named_inputs = inputs[num_positional:] if num_positional is not None else ()
        """Keyword arguments, which no hook packs."""
        self.kept = kept
        self.holders: list[weakref.ref[_Holder]] = []
        self.is_recomputed = False

    def _through_outer_hooks(self, direction: str, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """save_inputs and get_inputs."""
        return inputs if self.outer is None else tuple(getattr(self.outer, direction)(list(inputs)))

    def pack(self, saved: list[Tensor]) -> list[_Holder]:
        """Keep a holder instead of each tensor that a node saves."""
        holders = [_Holder() for _ in saved]
        self.holders += map(weakref.ref, holders)
        return holders

    def unpack(self, holders: list[_Holder]) -> list[Tensor]:
        """Recompute the block the first time; return the tensors, for the only time."""
        if not self.is_recomputed:
            self._recompute()
            self.is_recomputed = True
        tensors = []
        for holder in holders:
            tensor, holder.recomputed = holder.recomputed, None
            assert tensor is not None
            tensors.append(tensor)
        return tensors

    def _recompute(self) -> None:
        op, tape = self.op, self.op.tape
        inputs = self._through_outer_hooks("unpack", self.inputs)
        op.autocast = self.autocast
        grad_enabled, tape.grad_enabled = tape.grad_enabled, True
        kept, tape.kept = tape.kept, self.kept
        if self.kept is not None:
            self.kept.hand_out()
        tape.hooks.append(_Recomputation(self))
        try:
            self.forward(*inputs, *self.named_inputs)
        except _StopRecomputation:
            pass
        finally:
            tape.hooks.pop()
            tape.kept = kept
            tape.grad_enabled = grad_enabled
            if self.autocast is not None:
                op.end_autocast(in_one_block=True)


class _Recomputation:
    """_recomputation_hook: give each tensor that is saved again to its holder. The second graph is thrown away."""

    def __init__(self, frame: _CheckpointFrame) -> None:
        self._holders = frame.holders
        self._count = 0

    def pack(self, saved: list[Tensor]) -> list[Tensor]:
        """Hand the tensors to their holders; stop after the last."""
        tensors = [tensor.detach() for tensor in saved]
        for tensor in tensors:
            holder = self._holders[self._count]()
            self._count += 1
            if holder is not None:
                holder.recomputed = tensor
            if self._count == len(self._holders):
                raise _StopRecomputation
        return tensors


def checkpointed(
    op: Operators, policy: CheckpointingPolicy | None = None, num_positional: int | None = None
) -> Callable[..., Any]:
    """Return what goes around a block: checkpoint_wrapper with CheckpointImpl.NO_REENTRANT.

    ``policy`` is what selective checkpointing saves; without one it is full. So many of the inputs as
    ``num_positional`` says are positional arguments; None for all.
    """

    def around(forward: Callable[..., Any], *inputs: Any) -> Any:
        tape = op.tape
        if not tape.grad_enabled:
            return forward(*inputs)
        kept = None if policy is None else _Kept(policy)
        frame = _CheckpointFrame(op, forward, inputs, kept, num_positional)
        outer, tape.kept = tape.kept, frame.kept
        tape.hooks.append(frame)
        try:
            return forward(*inputs)
        finally:
            tape.hooks.pop()
            tape.kept = outer

    return around


# -- Reentrant activation checkpointing: torch/utils/checkpoint.py, CheckpointFunction ---------------------------------
#
# Forward runs a block without a graph, and saves its inputs. Backward runs all of it again, on inputs without history,
# and then its backward, as a pass of its own. The block's output and its gradient live until that has ended.


class Leaf(msgspec.Struct, eq=False):
    """A tensor that no operator made and that needs a gradient: its bytes, and ``.grad``; AccumulateGrad holds it."""

    storage: Storage | None
    grad: Tensor | None = None

    def accumulate(self, gradient: Tensor) -> None:
        """Take the gradient: the engine has added up all of them."""
        assert self.grad is None, "a leaf has one consumer's sum"
        self.grad = gradient


def requiring_grad(tensor: Tensor) -> tuple[Tensor, Leaf]:
    """Return a tensor as a leaf that needs a gradient (``requires_grad_``), and where the gradient will be."""
    leaf, found = Leaf(tensor.storage), tensor.detach()
    found.node = accumulator(leaf.accumulate)
    return found, leaf


def reentrant(op: Operators, engine: Engine) -> Callable[..., Any]:
    """Return what goes around a block, whose inputs are tensors; it returns one, or Outputs."""
    tape = op.tape

    def around(forward: Callable[..., Any], *inputs: Tensor) -> Any:
        if not tape.grad_enabled:
            return forward(*inputs)
        autocast = op.autocast
        tape.grad_enabled = False
        out = forward(*inputs)
        tape.grad_enabled = True
        if all(one.node is None for one in inputs):
            return out

        def backward(saved: Saved, gradients: list[Tensor]) -> Gradients:
            given, leaves = _detached(saved.copy())
            op.autocast, tape.grad_enabled = autocast, True
            again = forward(*given)
            tape.grad_enabled = False
            if autocast is not None:
                op.end_autocast(in_one_block=True)
            pairs = zip(_tensors(again), gradients, strict=True)
            engine.run_inside([(one, each) for one, each in pairs if one.node is not None and each is not None])
            return [None if leaf is None else leaf.grad for leaf in leaves]

        outputs = _tensors(out)
        node = operator_node(tape, backward, inputs, list(inputs), len(outputs))
        for number, one in enumerate(outputs):
            one.node, one.output = node, number
        return out

    return around


def _detached(inputs: list[Tensor]) -> tuple[list[Tensor], list[Leaf | None]]:
    """detach_variable: return the inputs without history, and those that need a gradient as leaves."""
    given: list[Tensor] = []
    leaves: list[Leaf | None] = []
    for one in inputs:
        detached, leaf = (one.detach(), None) if one.node is None else requiring_grad(one)
        given.append(detached)
        leaves.append(leaf)
    return given, leaves


def _tensors(out: Any) -> list[Tensor]:
    """Return the tensors that a block returns: one, or those of recorded/instructions.py, Outputs."""
    return [out] if isinstance(out, Tensor) else list(out.tensors)
