"""Reentrant activation checkpointing: torch/utils/checkpoint.py, CheckpointFunction.

Forward runs a block without a graph, and saves its inputs. Backward runs all of it again, on inputs without history,
and then its backward, as a pass of its own. The block's output and its gradient live until that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fsdp_bench.simulate.autograd import Engine, Gradients, accumulator, operator_node
from fsdp_bench.simulate.operators.core import Operators, Saved
from fsdp_bench.simulate.tape import Storage, Tensor


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
