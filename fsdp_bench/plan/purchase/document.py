"""The JSON form of a plan: bytes, seconds and prices."""

from __future__ import annotations

from typing import Any

from fsdp_bench.plan.purchase.offer import Offer
from fsdp_bench.plan.purchase.planner import Plan
from fsdp_bench.plan.purchase.ranges import peak_range
from fsdp_bench.spec.codec import to_builtins


def document(found: Plan) -> dict[str, Any]:
    """Return a plan as a document."""
    goal, picked = found.goal, found.picked
    return {
        "source": "predicted",
        "model": goal.model.name,
        "tokens": goal.tokens,
        "deadline_seconds": goal.deadline_seconds,
        "budget": goal.budget,
        "global_batch_tokens": goal.global_batch_tokens,
        "winner": _offer(picked.winner),
        "reason": found.reason,
        "cheapest": _offer(picked.cheapest),
        "fastest": _offer(picked.fastest),
        "fewest_nodes": _offer(picked.fewest_nodes),
        "pareto": [_offer(one) for one in picked.pareto],
        "nearest": [_offer(one) for one in picked.nearest],
        "left_out": [{"server": left.server.name, "reason": left.reason} for left in found.left_out],
        "num_offers": found.num_offers,
        "most_useful_nodes": found.most_useful_nodes,
    }


def _offer(offer: Offer | None) -> dict[str, Any] | None:
    if offer is None:
        return None
    span, memory = offer.range, offer.prediction
    speed, peaks = offer.timed.tokens_per_second_per_gpu, peak_range(offer.timed.setup.compile)
    return {
        "server": offer.cluster.server.name,
        "gpu": offer.cluster.gpu.name,
        "num_nodes": offer.cluster.num_nodes,
        "num_gpus": offer.cluster.world_size,
        "setup": to_builtins(offer.timed.setup),
        "expandable_segments": offer.expandable_segments,
        "memory": {
            "peak_allocated_bytes": memory.estimate.memory.peak_allocated_bytes,
            "peak_reserved_bytes": memory.needed_bytes,
            "peak_reserved_bytes_range": None
            if peaks is None
            else [round(memory.needed_bytes * peaks.lowest), round(memory.needed_bytes * peaks.highest)],
            "range_because": None if peaks is None else peaks.because,
            "headroom_bytes": memory.headroom_bytes,
        },
        "tokens_per_second_per_gpu": speed,
        "tokens_per_second_per_gpu_range": None if span is None else [speed * span.slowest, speed * span.fastest],
        "range_because": None if span is None else span.because,
        "seconds": offer.seconds,
        "slow_seconds": offer.slow_seconds,
        "price_per_hour": offer.per_hour,
        "cost": offer.cost,
        "slow_cost": offer.slow_cost,
        "energy_megawatt_hours": offer.megawatt_hours,
    }
