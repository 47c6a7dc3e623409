"""The same question on more GPUs: which world sizes are possible, and the smallest on which the setup fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from fsdp_bench.plan.defaults import USUAL_GPUS_PER_NODE
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.search.quantity import MOST_GPUS
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import ShardingStrategy


def larger_worlds(question: Question) -> list[int]:
    """Return the larger world sizes to try: up to a full node, then whole nodes."""
    hardware, now = question.hardware, question.setup.world_size
    if hardware is not None and hardware.has_server:
        node = _gpus_per_node(hardware)
    else:
        usual = USUAL_GPUS_PER_NODE
        node = usual if now <= usual or now % usual == 0 else now
    return [*range(now + 1, node), *(count for count in range(node, MOST_GPUS + 1, node) if count > now)]


def on_world(question: Question, world: int) -> tuple[str, str, Question] | None:
    """Return the CLI option to change, its value, and the question on ``world`` GPUs; None if it cannot run there.

    A model that one GPU trains without FSDP is sharded there.
    """
    option, count, hardware = _hardware(question.hardware, world)
    strategy = ShardingStrategy.FULL_SHARD if question.setup.is_bare else question.setup.strategy
    value = f"{count} --strategy {strategy.value}" if question.setup.is_bare else str(count)
    try:
        setup = msgspec.structs.replace(question.setup, world_size=world, strategy=strategy)
    except SpecError:
        return None
    changed = replace(question, setup=setup, hardware=hardware)
    return None if changed.impossible else (option, value, changed)


def _hardware(hardware: Hardware | None, world: int) -> tuple[str, int, Hardware | None]:
    if hardware is None or not hardware.has_server:
        return "--world-size", world, hardware
    each = _gpus_per_node(hardware)
    if world <= each:
        return "--gpus-per-node", world, msgspec.structs.replace(hardware, gpus_per_node=world)
    return "--nodes", world // each, msgspec.structs.replace(hardware, num_nodes=world // each, gpus_per_node=each)


def _gpus_per_node(hardware: Hardware) -> int:
    """Return the GPUs of a node among several like it: all of a lone node's, as many as several nodes already use."""
    return hardware.server.gpus_per_node if hardware.num_nodes == 1 else hardware.gpus_per_node


def fewest(
    worlds: Sequence[int], may_fit: Callable[[int], bool], fits: Callable[[int], bool], below: int = 2
) -> int | None:
    """Return the smallest world size on which a setup fits. None if it does not fit on the largest.

    A larger world size nearly always needs less memory on each GPU, so the search bisects. Then it tries the next
    ``below`` smaller world sizes, in case one of them fits too.

    Args:
        worlds: the world sizes to try, in increasing order.
        may_fit: takes an index into ``worlds``; returns whether the setup may fit there. It is a necessary condition
            that takes little time.
        fits: takes an index into ``worlds``; returns whether the setup fits there.
        below: how many smaller world sizes are tried after the bisection.
    """
    if not worlds or not may_fit(len(worlds) - 1):
        return None
    low, high = -1, len(worlds) - 1  # the last index that cannot fit, and one that may
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if may_fit(middle) else (middle, high)
    lowest = high
    index, stride, failed = lowest, 1, lowest - 1
    while not fits(index):
        if index == len(worlds) - 1:
            return None
        failed, index, stride = index, min(index + stride, len(worlds) - 1), 2 * stride
    while index - failed > 1:
        middle = (failed + index) // 2
        failed, index = (failed, middle) if fits(middle) else (middle, index)
    for smaller in range(index - 1, max(lowest, index - below) - 1, -1):
        index = smaller if fits(smaller) else index
    return worlds[index]
