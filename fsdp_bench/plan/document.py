"""The JSON form of a prediction. Unknown values are null."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fsdp_bench.catalog.lookup import place_names
from fsdp_bench.plan.question import Prediction, Question
from fsdp_bench.plan.speed import Speed
from fsdp_bench.rates.communicators import Communicators
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.spec.codec import to_builtins


def document(prediction: Prediction, with_time: bool = True, with_communication: bool = True) -> dict[str, Any]:
    """Return the JSON form of one prediction. Sizes are in bytes, times in seconds; keys name the unit.

    Time and communication can be omitted if many predictions are asked for: each costs one more simulation.
    """
    return {
        **_asked(prediction.question),
        "impossible": None,
        "for_eager": prediction.estimate.for_eager,
        "notes": prediction.notes,
        "memory": _memory(prediction),
        "time": _time(prediction.speed) if with_time else None,
        "communication": [asdict(one) for one in prediction.traffic] if with_communication else None,
        "fits": prediction.fits,
        "verdict": prediction.verdict,
        "headroom_bytes": prediction.headroom_bytes,
        "required_headroom_bytes": prediction.required_headroom_bytes,
        "required_headroom_source": None
        if prediction.required_headroom_bytes is None
        else prediction.estimate.required_headroom.source,
    }


ANSWERS = ("fits", "verdict", "headroom_bytes", "required_headroom_bytes", "required_headroom_source")
"""Keys that say whether a setup fits, and by how much."""


def refusal(question: Question) -> dict[str, Any]:
    """Return the JSON form of a setup that cannot run: the reason, and null for every key of ANSWERS."""
    nothing = dict.fromkeys(("for_eager", "notes", "memory", "time", "communication", *ANSWERS))
    return {**_asked(question), "impossible": question.impossible, **nothing}


def _asked(question: Question) -> dict[str, Any]:
    setup = question.setup
    described = {
        **to_builtins(setup),
        "effective_strategy": setup.effective_strategy.value,
        "shard_size": None if question.impossible else setup.shard_group_size,
    }
    return {
        "source": "predicted",
        "torch": TORCH_VERSION,
        "kernels": question.kernels,
        "expandable_segments": question.expandable_segments,
        "load": question.build.value,
        "model": question.model.document(),
        "setup": described,
        "assumptions": question.assumptions,
        "server": _server(question),
    }


def _server(question: Question) -> dict[str, Any]:
    gpu = question.gpu
    server, gpu_name, num_nodes, gpus_per_node = place_names(question.hardware)
    return {
        "name": server,
        "gpu": gpu_name,
        "gpu_memory_bytes": gpu.usable_memory_bytes if gpu else None,
        "gpu_memory_source": to_builtins(gpu.usable_memory_source) if gpu else None,
        "context_bytes": gpu.context_bytes if gpu else None,
        "num_nodes": num_nodes,
        "gpus_per_node": gpus_per_node,
        "host_memory_bytes": question.hardware.server.host_memory_bytes if question.hardware else None,
    }


def _time(found: Speed) -> dict[str, Any]:
    time = found.time
    return {
        "step_seconds": time.step_seconds,
        "step_seconds_range": found.range.step_seconds(time.step_seconds)
        if found.range and time.step_seconds
        else None,
        "compute_seconds": time.compute_seconds,
        "communication_seconds": time.communication_seconds,
        "exposed_communication_seconds": time.exposed_communication_seconds,
        "host_copy_seconds": time.host_copy_seconds,
        "cpu_optimizer_seconds": time.cpu_optimizer_seconds,
        "parts_seconds": {part.value: seconds for part, seconds in time.parts.items()} or None,
        "slowed_by_collectives_seconds": time.slowed_seconds if time.step_seconds is not None else None,
        "tokens_per_second_per_gpu": found.tokens_per_second_per_gpu,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "rates": found.source,
        "unknown": time.unknown,
    }


def _memory(prediction: Prediction) -> dict[str, Any]:
    memory, reading = prediction.estimate.memory, prediction.estimate.allocator
    full = reading.out_of_memory
    known = prediction.reserved_bytes is not None
    return {
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_reserved_bytes": prediction.reserved_bytes,
        "needed_bytes": prediction.needed_bytes if prediction.question.kernels == "cuda" else None,
        "peak_active_bytes": reading.peak_active_bytes if known else None,
        **_communicators(prediction.communicators),
        "peak_device_bytes": prediction.estimate.device_bytes if known else None,
        "peak_host_bytes_per_node": prediction.peak_host_bytes_per_node,
        "peak_phase": memory.peak_phase,
        "peak_block": memory.peak_block,
        "peak_operator": memory.peak_operator,
        "peak_rank": memory.peak_rank,
        "phases": memory.phases,
        "breakdown_bytes": memory.breakdown_bytes,
        "host_breakdown_bytes": _host(prediction),
        "num_alloc_retries": reading.num_alloc_retries if known else None,
        "num_alloc_retries_later": reading.num_retries_later if known and full is None else None,
        "out_of_memory": full and {
            "phase": full.phase,
            "block": full.block if full.block >= 0 else None,
            "operator": full.label,
            "num_bytes": full.num_bytes,
            "reserved_bytes": reading.peak_reserved_bytes,
        },
    }  # fmt: skip


def _communicators(found: Communicators | None) -> dict[str, Any]:
    """Return the GPU memory of NCCL's communicators as lower and upper bounds, without the CUDA context."""
    if found is None:
        return {"communicators_bytes": None, "communicators": None}
    total = found.num_bytes
    return {"communicators_bytes": total and asdict(total), "communicators": [asdict(one) for one in found.each]}


def _host(prediction: Prediction) -> dict[str, int] | None:
    """Return the host memory of one node by category. ``load`` is before training, the others are during training."""
    if prediction.peak_host_bytes_per_node is None:
        return None
    host = prediction.estimate.host
    return {
        "load": host.load_bytes,
        "pinned_parameters": host.pinned_parameters_bytes,
        "pinned_gradients": host.pinned_gradients_bytes,
        "pinned_activations": host.pinned_activations_bytes,
        "optimizer_state": host.optimizer_state_bytes,
        "temporary": host.temporary_bytes,
    }
