"""A prediction and its JSON form: what was asked, what is answered, and ``null`` for what nobody knows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from fsdp_bench.catalog.hf_config import sliding_window_note
from fsdp_bench.plan.estimate import KERNELS, Estimate, Verdict, estimate, read_allocator
from fsdp_bench.plan.speed import Speed, speed
from fsdp_bench.rates.communicators import Communicators
from fsdp_bench.rates.hardware import rates_of
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.replay.traffic import Traffic, collectives, traffic
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.simulate.operators.kernels import Kernels, kernels_on, prefers_cudnn
from fsdp_bench.simulate.step import steady_step
from fsdp_bench.simulate.wrappers.units import why_impossible
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.profile import Profile
from fsdp_bench.spec.setup import TrainSetup


@dataclass(frozen=True)
class Question:
    """One setup to predict, and under which assumptions."""

    model: ModelShape
    setup: TrainSetup
    hardware: Cluster | Gpu | None = None
    kernels: str = "cuda"
    """``cuda`` or ``cpu``: whose operators run."""
    build: Build = Build.META
    expandable_segments: bool = False
    profile: Profile | None = None
    """A calibration, which predicts time in place of the datasheet."""
    headroom_bytes: int | None = None
    """What is kept free of each GPU for the CUDA context and NCCL; None: what is known of them, and else assumed."""
    sliding_window: int | None = None
    """Of a Hugging Face model: tokens that its attention looks back on. It is not modelled."""

    @property
    def gpu(self) -> Gpu | None:
        """The card, or None when nobody named one."""
        return self.hardware.gpu if isinstance(self.hardware, Cluster) else self.hardware

    @property
    def kernel_set(self) -> Kernels:
        """The operators with the cuBLAS workspace of the card, as ``estimate`` takes it."""
        return kernels_on(KERNELS[self.kernels], self.gpu)

    @property
    def impossible(self) -> str | None:
        """Why the setup cannot run, or None."""
        return why_impossible(self.model, self.setup, self.kernels)


@dataclass(frozen=True)
class Prediction:
    """A question that can be answered, with its answer."""

    question: Question
    estimate: Estimate
    known_needed_bytes: int | None = None
    """``needed_bytes`` where it was predicted before."""

    @cached_property
    def needed_bytes(self) -> int:
        """What is reserved without retries: where the card is too small for that, on one without limit."""
        if self.known_needed_bytes is not None:
            return self.known_needed_bytes
        asked, reading = self.question, self.estimate.allocator
        if reading.out_of_memory is not None or reading.num_alloc_retries:
            reading = read_allocator(asked.model, asked.setup, asked.kernel_set, None, asked.expandable_segments)
            assert reading.out_of_memory is None, "a card without limit is never full"
        return reading.peak_reserved_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Peak reserved; None where the card was full before, and for CPU kernels, which have no caching allocator."""
        reading = self.estimate.allocator
        return reading.peak_reserved_bytes if self._on_card and reading.out_of_memory is None else None

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None when a size is unknown or the kernels are not a GPU's."""
        return self.estimate.fits if self._on_card else None

    @property
    def verdict(self) -> Verdict | None:
        """Fits, runs with allocation retries, or does not fit; None when a size is unknown."""
        return self.estimate.verdict if self._on_card else None

    @property
    def headroom_bytes(self) -> int | None:
        """What a process can use of the card beyond what is reserved without retries.

        It fits where that is no less than the headroom that is required; None where the card's memory is not known.
        """
        card = self.estimate.card_bytes
        return card - self.needed_bytes if self._on_card and card is not None else None

    @property
    def required_headroom_bytes(self) -> int | None:
        """What is kept free of the card for the CUDA context and NCCL; None where the card's memory is not known."""
        known = self._on_card and self.estimate.card_bytes is not None
        return self.estimate.required_headroom.num_bytes if known else None

    @property
    def communicators(self) -> Communicators | None:
        """What NCCL takes of the card; None for the kernels of a CPU."""
        return self.estimate.communicators if self._on_card else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before trusting the answer."""
        setup, model = self.question.setup, self.question.model
        notes = []
        if self.estimate.for_eager:
            notes.append("the setup compiles; this is the prediction for eager")
        gpu = self.question.gpu
        if gpu is not None and self._on_card and setup.precision.compute != "fp32" and prefers_cudnn(gpu):
            notes.append(
                f"attention: FlashAttention's kernel; where cuDNN is above 9.15, torch takes cuDNN's on {gpu.name}"
            )
        is_cluster = isinstance(self.question.hardware, Cluster)
        if setup.strategy.is_hybrid and setup.shard_size is None and not is_cluster and setup.world_size > 1:
            notes.append(
                f"hybrid strategies: nothing says how many GPUs a node has, so shard groups of {setup.shard_group_size}"
                f" of {setup.world_size} ranks are assumed; --gpus-per-node or --shard-size says it"
            )
        if setup.sequence_length > model.max_position_embeddings:
            longest = model.max_position_embeddings
            notes.append(f"{setup.sequence_length} tokens are beyond the {longest} positions of {model.name}")
        window = self.question.sliding_window
        if window is not None and setup.sequence_length > window:
            notes.append(sliding_window_note(window))
        return tuple(notes)

    @property
    def host_bytes(self) -> int | None:
        """What the ranks of one node hold in its memory; None when how many ranks it has is unknown."""
        host = self.estimate.host.peak_bytes
        alone = self.estimate.cluster is not None or self.question.setup.world_size == 1
        return host if alone or host == 0 else None

    @cached_property
    def traffic(self) -> list[Traffic]:
        """What rank 0 sends and receives in a step, with its time where the links are documented or measured."""
        asked = self.question
        issued = collectives(steady_step(asked.model, asked.setup, asked.kernel_set))
        return traffic(issued, asked.setup, rates_of(asked.setup, asked.hardware, asked.kernels, asked.profile))

    @cached_property
    def speed(self) -> Speed:
        """How fast it trains, for eager."""
        asked = self.question
        return speed(asked.model, asked.setup, asked.hardware, asked.kernels, asked.profile)

    @property
    def _on_card(self) -> bool:
        return self.question.kernels == "cuda"


def answer(question: Question) -> Prediction:
    """Predict."""
    hardware, kernels = question.hardware, question.kernel_set
    found = estimate(
        question.model,
        question.setup,
        hardware,
        kernels,
        question.build,
        question.expandable_segments,
        headroom_bytes=question.headroom_bytes,
    )
    return Prediction(question, found)


def document(prediction: Prediction, with_time: bool = True, with_communication: bool = True) -> dict[str, Any]:
    """Return the JSON form of one prediction; sizes are in bytes, times in seconds, the unit in the name.

    Without time, or what is sent, where many are asked for: the step is simulated for each of them once more.
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
"""Keys that say whether it fits, and by how much."""


def refusal(question: Question) -> dict[str, Any]:
    """Return the JSON form of a combination that cannot run: the reason, and null for every answer."""
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
        "model": {**to_builtins(question.model), "num_parameters": question.model.num_parameters},
        "setup": described,
        "server": _server(question),
    }


def _server(question: Question) -> dict[str, Any]:
    cluster = question.hardware if isinstance(question.hardware, Cluster) else None
    gpu = question.gpu
    return {
        "name": cluster.server.name if cluster else None,
        "gpu": gpu.name if gpu else None,
        "gpu_memory_bytes": gpu.usable_memory_bytes if gpu else None,
        "gpu_memory_source": to_builtins(gpu.usable_memory_source) if gpu else None,
        "context_bytes": gpu.context_bytes if gpu else None,
        "num_nodes": cluster.num_nodes if cluster else None,
        "gpus_per_node": cluster.gpus_per_node if cluster else None,
        "host_memory_bytes": cluster.server.host_memory_bytes if cluster else None,
    }


def _time(found: Speed) -> dict[str, Any]:
    time = found.time
    return {
        "step_seconds": time.step_seconds,
        "compute_seconds": time.compute_seconds,
        "communication_seconds": time.communication_seconds,
        "exposed_communication_seconds": time.exposed_communication_seconds,
        "host_copy_seconds": time.host_copy_seconds,
        "cpu_optimizer_seconds": time.cpu_optimizer_seconds,
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
        "peak_host_bytes_per_node": prediction.host_bytes,
        "peak_phase": memory.peak_phase,
        "peak_block": memory.peak_block,
        "peak_operator": memory.peak_operator,
        "peak_rank": memory.peak_rank,
        "phases": memory.phases,
        "breakdown_bytes": memory.breakdown_bytes,
        "host_breakdown_bytes": _host(prediction),
        "num_alloc_retries": reading.num_alloc_retries if known else None,
        "out_of_memory": full and {
            "phase": full.phase,
            "block": full.unit if full.unit >= 0 else None,
            "operator": full.label,
            "num_bytes": full.num_bytes,
            "reserved_bytes": reading.peak_reserved_bytes,
        },
    }  # fmt: skip


def _communicators(found: Communicators | None) -> dict[str, Any]:
    """Return what NCCL's communicators take, each time as the least and the most; the CUDA context is not in it."""
    if found is None:
        return {"communicators_bytes": None, "communicators": None}
    total = found.num_bytes
    return {"communicators_bytes": total and asdict(total), "communicators": [asdict(one) for one in found.each]}


def _host(prediction: Prediction) -> dict[str, int] | None:
    """Return what one node holds, by what it is for; ``load`` is before training, the others are together."""
    if prediction.host_bytes is None:
        return None
    host = prediction.estimate.host
    return {
        "load": host.load_bytes,
        "pinned_parameters": host.pinned_parameters_bytes,
        "pinned_gradients": host.pinned_gradients_bytes,
        "optimizer_state": host.optimizer_state_bytes,
        "temporary": host.temporary_bytes,
    }
