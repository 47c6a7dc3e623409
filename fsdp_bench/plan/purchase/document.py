"""The JSON form of a plan: bytes, seconds and prices."""

from __future__ import annotations

from datetime import date
from typing import Any

from fsdp_bench import __version__
from fsdp_bench.plan.chart_data.drawn import DrawnStep, drawn_memory, drawn_streams
from fsdp_bench.plan.chart_data.memory_timeline import memory_timeline
from fsdp_bench.plan.chart_data.step_streams import StepStreams
from fsdp_bench.plan.defaults import assumptions
from fsdp_bench.plan.purchase.goal import Goal
from fsdp_bench.plan.purchase.offer import Offer
from fsdp_bench.plan.purchase.planner import Plan
from fsdp_bench.plan.ranges import peak_range
from fsdp_bench.plan.speed import speed
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.recording.model import code_of


def document(found: Plan) -> dict[str, Any]:
    """Return a plan as a document."""
    goal, picked = found.goal, found.picked
    return {
        "source": "predicted",
        "model": goal.model.name,
        "code": code_of(goal.model),
        "tokens": goal.tokens,
        "deadline_seconds": goal.deadline_seconds,
        "budget": goal.budget,
        "global_batch_tokens": goal.global_batch_tokens,
        "winner": _offer(picked.winner),
        "reason": found.reason,
        "other_code": _other_code(found),
        "safest": _offer(picked.safest),
        "cheapest_allowed": _offer(picked.cheapest_allowed),
        "cheapest": _offer(picked.cheapest),
        "fastest": _offer(picked.fastest),
        "fewest_nodes": _offer(picked.fewest_nodes),
        "pareto": [_offer(one) for one in picked.pareto],
        "nearest": [_offer(one) for one in picked.nearest],
        "left_out": [{"server": left.server.name, "reason": left.reason} for left in found.left_out],
        "num_offers": found.num_offers,
        "looked_at": list(found.looked_at),
        "most_useful_nodes": found.most_useful_nodes,
        "fsdp_bench": __version__,
        "torch": TORCH_VERSION,
        "made_on": date.today().isoformat(),
        "model_description": goal.model.describe(),
        "tariff": goal.tariff.value if goal.stated_price is None else None,
        "stated_price": _stated_price(goal),
        "servers": _servers(picked.all()),
        "winner_step": None if picked.winner is None else to_builtins(_step(picked.winner)),
    }


def _other_code(found: Plan) -> dict[str, Any] | None:
    other = found.other_code
    if other is None:
        return None
    return {"code": other.code, "is_same_setting": other.is_same_setting, "offer": _offer(other.offer)}


def _stated_price(goal: Goal) -> dict[str, Any] | None:
    price = goal.stated_price
    if price is None:
        return None
    return {"per_hour": price.per_hour, "unit": "gpu" if price.is_per_gpu else "server", "currency": price.currency}


def _servers(offers: list[Offer]) -> list[dict[str, Any]]:
    """Return what the catalogue says of each kind of server, with its sources."""
    found = {offer.cluster.server.name: offer for offer in offers}
    return [
        {
            "name": offer.cluster.server.name,
            "provider": offer.cluster.server.provider,
            "gpu": offer.cluster.gpu.name,
            "gpus_per_node": offer.cluster.gpus_per_node,
            "source": to_builtins(offer.cluster.server.source),
            "gpu_memory_bytes": offer.cluster.gpu.usable_memory_bytes,
            "gpu_memory_source": to_builtins(offer.cluster.gpu.usable_memory_source),
            "price": offer.price
            and {
                "currency": offer.price.currency,
                "region": offer.price.region,
                "per_hour": offer.price.per_hour(offer.goal.tariff, offer.cluster.server.power_watts),
                "source": to_builtins(offer.price.source),
            },
        }
        for offer in found.values()
    ]


def _step(offer: Offer) -> DrawnStep:
    """Return one step of an offer as charts draw it; only the first few micro-batches are simulated."""
    asked = offer.prediction.question
    found = speed(asked.model, asked.setup, asked.hardware, asked.kernels, asked.profile, with_spans=True)
    return DrawnStep(
        num_micro_batches=asked.setup.gradient_accumulation_steps,
        memory=drawn_memory(memory_timeline(asked)),
        streams=drawn_streams(StepStreams(asked, found)),
    )


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
        "assumptions": assumptions(offer.goal.model, offer.timed.setup),
        "expandable_segments": offer.expandable_segments,
        "memory": {
            "peak_allocated_bytes": memory.estimate.memory.peak_allocated_bytes,
            "peak_reserved_bytes": memory.needed_bytes,
            "peak_reserved_bytes_range": None
            if peaks is None
            else [round(memory.needed_bytes * peaks.lowest), round(memory.needed_bytes * peaks.highest)],
            "range_because": None if peaks is None else peaks.because,
            "headroom_bytes": memory.headroom_bytes,
            "required_headroom_bytes": memory.required_headroom_bytes,
            "required_headroom_source": memory.estimate.required_headroom.source,
            "breakdown_bytes": memory.estimate.memory.breakdown_bytes,
        },
        "tokens_per_second_per_gpu": speed,
        "tokens_per_second_per_gpu_range": None if span is None else [speed * span.slowest, speed * span.fastest],
        "range_because": None if span is None else span.because,
        "seconds": offer.seconds,
        "fast_seconds": offer.fast_seconds,
        "slow_seconds": offer.slow_seconds,
        "price_per_hour": offer.per_hour,
        "cost": offer.cost,
        "fast_cost": offer.fast_cost,
        "slow_cost": offer.slow_cost,
        "energy_megawatt_hours": offer.megawatt_hours,
        "slow_energy_megawatt_hours": offer.slow_megawatt_hours,
    }
