"""What helps if nothing fits: more nodes, or why none are enough. ``fewest_gpus``: for ``max-size --of gpus``, too."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from fsdp_bench.plan.estimate import MemoryPrediction, predict_memory
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.purchase.fastest import Fastest
from fsdp_bench.plan.purchase.goal import Goal, settings, setup_of
from fsdp_bench.plan.purchase.offer import SettingOffer
from fsdp_bench.plan.purchase.searched import Searched, ServerType
from fsdp_bench.plan.purchase.simulated import Simulated
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.simulate.step import SimulatedSteps, without_collections
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import Checkpointing, Loss, Offload
from fsdp_bench.spec.units import format_gib

MOST_NODES = 512
"""The most nodes that a plan looks at."""
_SHOWN = 3
"""So many kinds of servers are proposed."""
_TIMES = (1, 1.25, 2)
"""The numbers of nodes that are tried, as multiples of those whose live bytes fit."""
NOT_SHARDED = {
    "activations": "no strategy shards activations: a shorter --seq",
    "logits": "no strategy shards logits: --loss chunked, or a shorter --seq",
    "unsharded_parameters": "a unit's parameters are gathered whole",
}
"""Why more GPUs do not help, by what takes the most."""


def number_of_nodes(count: int) -> str:
    """Return ``1 node``, ``2 nodes``, ..."""
    return "1 node" if count == 1 else f"{count} nodes"


def beyond(goal: Goal, kinds: Sequence[ServerType], most: int) -> tuple[tuple[SettingOffer, ...], str]:
    """Return the offers on the fewest nodes above ``most``, up to which nothing fits, and what to change."""
    goal = (
        goal
        if "offload" in goal.fixed
        else replace(goal, open={"offload": (Offload.NONE, Offload.PARAMS), **goal.open})
    )
    simulated = Simulated(goal, MOST_NODES)
    further = range(most + 1, MOST_NODES + 1)
    searched = [found for kind in kinds if (found := Searched(simulated, kind, further)).nodes and found.bound]
    searched.sort(key=lambda one: one.nodes[0] * one.kind.gpus_per_node)
    offers = [offer for one in searched[:_SHOWN] if (offer := _on_few(one)) is not None]
    offers.sort(key=lambda offer: (offer.cluster.world_size, inf if offer.per_hour is None else offer.per_hour))
    up_to = number_of_nodes(most)
    if offers:
        cluster, offload = offers[0].cluster, offers[0].timed.setup.offload
        offloaded = f" --offload {offload.value}" if offload is not Offload.NONE else ""
        return tuple(offers), (
            f"nothing fits on up to {up_to}; it fits on {cluster.num_nodes} x {cluster.server.name}:"
            f" --server {cluster.server.name} --nodes {cluster.num_nodes}{offloaded}"
        )
    if searched:
        return (), f"nothing fits on up to {up_to}, nor on a few times as many, by the rules of PyTorch's allocator"
    return (), f"nothing fits on up to {up_to}{_why_never(goal, kinds)}"


def _on_few(searched: Searched) -> SettingOffer | None:
    """Return an offer on few nodes. The allocator needs more than the live bytes, which fit all of them."""
    for times in _TIMES:
        count = next((one for one in searched.nodes if one >= times * searched.nodes[0]), None)
        if count is not None and (offer := searched.offer(count)) is not None:
            return offer
    return None


def _why_never(goal: Goal, kinds: Sequence[ServerType]) -> str:
    """Return what stays on each GPU of the most nodes, with the setting that saves the most."""
    if not kinds:
        return ""
    kind = max(kinds, key=lambda one: one.gpu.usable_memory_bytes or 0)
    cluster = Hardware(server=kind.server, gpu=kind.gpu, num_nodes=MOST_NODES, gpus_per_node=kind.gpus_per_node)
    least: MemoryPrediction | None = None
    for setting in settings(goal):
        saves = setting.checkpointing is Checkpointing.FULL and setting.loss is not Loss.PLAIN
        setup = setup_of(goal, setting, goal.fixed.get("micro_batch_size", 1), MOST_NODES, kind.gpus_per_node)
        if setup is not None and (saves or "checkpointing" in goal.fixed or "loss" in goal.fixed):
            memory = predict_memory(SimulatedSteps(goal.model, setup, kernels_on(CUDA, kind.gpu)))
            least = memory if least is None else min(least, memory, key=lambda one: one.peak_allocated_bytes)
    if least is None or least.peak_allocated_bytes <= (kind.gpu.usable_memory_bytes or 0):
        return ""
    category = max(least.breakdown_bytes, key=lambda name: least.breakdown_bytes[name])
    advice = NOT_SHARDED.get(category, "")
    return (
        f", and more GPUs do not help: on {cluster.world_size:,} {kind.gpu.name} at least"
        f" {format_gib(least.peak_allocated_bytes)} stay on each, {format_gib(least.breakdown_bytes[category])} of it"
        f" {category.replace('_', ' ')}{'; ' + advice if advice else ''}"
    )


def fewest_gpus(goal: Goal, kind: ServerType, nodes: Sequence[int] = range(1, MOST_NODES + 1)) -> Prediction | None:
    """Return a setting that fits the fewest nodes, or GPUs of one node, at the smallest micro-batch; None if none does.

    Live bytes say on how many nodes something may fit. From there on PyTorch's allocator decides, up to twice as many.
    """
    fastest = Fastest(Simulated(goal, max(nodes)), kind.server, kind.gpu, kind.gpus_per_node)
    with without_collections():
        first = bisect_left(nodes, True, key=fastest.anything_fits)
        for count in nodes[first : 2 * first + 2]:
            if (found := fastest.smallest_that_fits(count)) is not None:
                return found if count > 1 else _of_one_node(goal, kind, found)
    return None


def _of_one_node(goal: Goal, kind: ServerType, found: Prediction) -> Prediction:
    for each in reversed(range(1, kind.gpus_per_node)):
        fewer = Fastest(Simulated(goal, 1), kind.server, kind.gpu, each).smallest_that_fits(1)
        if fewer is None:
            break
        found = fewer
    return found
