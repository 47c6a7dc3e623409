"""The ends of a model whose code is not ours: the modules before its blocks and behind them, by what they own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

NO_ENDS = (
    "wrap = block-and-ends: of this model it is not known which modules those are: it takes one list of blocks, a table"
    " of tokens before it, and behind it the final norm and a head that is not the table (tie_word_embeddings); use"
    " wrap = block"
)
"""The reason against units of ends that are not found. A parameter that two modules share has to be in one unit."""

OwnParameters = tuple[str, Collection[tuple[Any, ...]]]
"""The name of a module, and the shapes of the parameters that are its own; a shared one is the first module's."""


class Ends(NamedTuple):
    """The modules of the unit before the blocks and of the one behind them, by name, in the order of forward."""

    before: tuple[str, ...]
    after: tuple[str, ...]


def find_ends(modules: Iterable[OwnParameters], block_lists: Collection[str]) -> Ends | None:
    """Return the ends of a decoder; None for another model, and where the head is the table of tokens.

    Args:
        modules: in the order of nn.Module.named_modules, in which decoders register them as they run.
        block_lists: the names of the lists that hold blocks.
    """
    if len(block_lists) != 1:
        return None
    (path,) = block_lists
    before: list[OwnParameters] = []
    after: list[OwnParameters] = []
    found = before
    for name, shapes in modules:
        if name == path:
            found = after
        elif shapes and not name.startswith(f"{path}."):
            found.append((name, shapes))
    if len(before) != 1 or len(after) != 2:
        return None
    (table,), (norm, head) = before, after
    is_table = len(table[1]) == 1 and all(len(shape) == 2 for shape in table[1])
    is_norm = all(len(shape) == 1 for shape in norm[1])
    if not (is_table and is_norm and set(table[1]) <= set(head[1])):
        return None
    return Ends((table[0],), (norm[0], head[0]))
