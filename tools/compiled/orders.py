"""The orders in which Inductor can run a block's backward, each forced, and without reuse of buffers.

Inductor estimates the peak memory of several topological orders and takes the lowest (reorder_for_peak_memory in
torch/_inductor/memory.py, torch 2.13). Which one that is depends on sizes, and so does which buffers it uses again,
because they must be equally large. In float8 nearly every size has code of its own. Recorded one by one, and without
reuse, which never raises the peak (should_reuse_buffer in torch/_inductor/codegen/wrapper.py), few orders are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._inductor import config, memory
from torch._inductor.virtualized import V

from fsdp_bench.spec.recording.compiled import Order

_METHODS = {
    Order.BREADTH_FIRST: memory.topological_sort_bfs,
    Order.DEPTH_FIRST: memory.topological_sort_dfs,
}


@contextmanager
def forced_order(order: Order) -> Iterator[None]:
    """Let Inductor write backward in an order, forward as it is, and neither with reuse."""

    def reorder(nodes: list[Any], *planned: Any) -> list[Any]:
        memory.prepare_planning_info(nodes, *planned)  # notes what the methods sort by
        method = _METHODS.get(order) if V.graph.is_backward else None
        return nodes if method is None else method(nodes)

    with patch.object(memory, "reorder_for_peak_memory", reorder), config.patch(allow_buffer_reuse=False):
        yield
