"""The instructions of a recorded step: forward as calls of modules, backward as nodes of the autograd graph.

Storages and nodes are numbered in the order in which they were made. A reference to one is text:

    12          the storage or node of that number
    .1.5        in a loop's body: the sixth that was made in the iteration before (.0.5: in this one)
    L0.1.5      elsewhere: the sixth that was made in the last iteration of loop 0; L0.*.5: in each of them
    p:NAME      the storage of a parameter
    b:3  i:0    the storage of a buffer, of a tensor in the batch
    ?           a storage that is not on the device

An edge of the graph is a reference to a node and one of its outputs, ``12/0``, or the parameter ``p:NAME`` itself;
empty where no gradient is needed. Sizes are numbers of formulas in ``Variant.formulas``.

In the name of a module or parameter ``layers.<0>.mlp`` is the first block of an iteration, and after the loop
``layers.<end+0>.mlp`` the first block behind it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Size = Annotated[int, msgspec.Meta(ge=0)]
"""The number of a formula."""


class TensorRef(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor that a module is given, or returns, or that a node saves."""

    storage: str
    numel: Size
    itemsize: int
    edge: str = ""
    """The edge that its gradient takes."""


class Allocation(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A storage that an operator makes."""

    number: int
    num_bytes: Size
    category: str = ""
    """``l``: as wide as the logits. ``g``: the gradient of a parameter."""


class Operator(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="o"):
    """An operator runs."""

    name: int
    """Number of its name in ``Variant.names``."""
    num_bytes: Size
    """Bytes that it reads and writes."""
    itemsize: int
    dims: tuple[Size, ...]
    """m, n, k of a matrix product; of attention and of sums see train/recording/operators.py. Mostly empty."""
    makes: tuple[Allocation, ...]


def operator_name(text: str) -> tuple[str, str, str]:
    """Split an entry of ``Variant.names``: ``aten::mm nt in bitsandbytes::gemm_4bit``.

    Returns:
        the operator's name; which matrices of a product are transposed, or nothing; the operator of another library
        that runs it, or nothing. Dispatch modes do not see operators inside of another one, so that selective
        checkpointing cannot keep their outputs.
    """
    name, _, outer = text.partition(" in ")
    name, _, layout = name.partition(" ")
    return name, layout, outer


class Drop(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="d"):
    """Python holds a storage no longer; autograd may."""

    storage: str


class MakeNode(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="n"):
    """Autograd makes a node."""

    number: int


class Save(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="s"):
    """A node saves a tensor for backward."""

    node: str
    tensor: TensorRef
    is_strided: bool = False
    """Whether its elements do not follow each other in memory. Known inside of blocks."""


class Call(msgspec.Struct, array_like=True, frozen=True, tag="c"):
    """A module is called."""

    module: str
    inputs: tuple[TensorRef, ...]
    code: tuple[Instruction, ...]
    outputs: tuple[TensorRef, ...]
    num_positional: int = -1
    """The number of a block's inputs that are positional arguments, the first ones; -1 if unknown."""


class Loop(msgspec.Struct, array_like=True, frozen=True, tag="l"):
    """Blocks that are alike run one after another."""

    number: int


class HeadWithLoss(msgspec.Struct, array_like=True, frozen=True, tag="h"):
    """A loss that includes the head runs instead of it. It is never recorded; own_loss.py puts it in."""

    hidden_states: TensorRef
    weight: str
    """The name of the head's weight."""


Instruction = Operator | Drop | MakeNode | Save | Call | Loop | HeadWithLoss


class GradientRef(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A gradient that a node returns."""

    source: str
    """``n``: a storage that the node made. ``g``: one of the gradients that it was given. ``s``: a tensor that it
    saved. ``?``: none of these."""
    index: int
    numel: Size
    itemsize: int
    is_view: bool


class NodeRecord(msgspec.Struct, array_like=True, frozen=True):
    """The work of a graph's node in backward."""

    name: str
    edges: tuple[str, ...]
    num_outputs: int
    code: tuple[Instruction, ...]
    """Operators and drops. Its storages are numbered from 0, and referred to by these numbers alone."""
    gradients: tuple[GradientRef | None, ...]
    adapts: tuple[tuple[Instruction, ...], ...]
    """For each gradient what torch does to give it the shape and dtype of the input (validate_outputs)."""


class LoopRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive blocks of which every iteration does the same."""

    path: str
    """The name of the nn.ModuleList."""
    first: int
    """Index of the block with which the first iteration begins."""
    period: int
    """Blocks of one iteration."""
    iterations: int
    """The number that was recorded."""
    code: tuple[Instruction, ...]
    num_storages: int
    """That one iteration makes."""
    nodes: tuple[NodeRecord, ...]
    """That one iteration makes."""
    storages_before: tuple[tuple[int, ...], ...]
    """The storages that were made by the iterations before the first, which are no part of the loop; last one first."""
    nodes_before: tuple[tuple[int, ...], ...]
