"""What a user asks (Question), and the answer (Prediction); document.py has its JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fsdp_bench.catalog.hf_config import sliding_window_note
from fsdp_bench.plan.estimate import KERNELS, Estimate, Verdict, estimate, read_allocator
from fsdp_bench.plan.speed import Speed, speed
from fsdp_bench.rates.communicators import Communicators
from fsdp_bench.rates.hardware import rates_of
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.replay.traffic import Traffic, collectives, traffic
from fsdp_bench.simulate.operators.kernels import Kernels, kernels_on, prefers_cudnn
from fsdp_bench.simulate.step import steady_step
from fsdp_bench.simulate.wrappers.units import why_impossible
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
        """The GPU; None where none is named."""
        return self.hardware.gpu if isinstance(self.hardware, Cluster) else self.hardware

    @property
    def kernel_set(self) -> Kernels:
        """The operators with the cuBLAS workspace of the GPU, as ``estimate`` takes it."""
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
    known_speed: Speed | None = None
    """``speed`` where it was predicted before."""

    @cached_property
    def needed_bytes(self) -> int:
        """What is reserved without retries: where the GPU is too small for that, on one without limit."""
        if self.known_needed_bytes is not None:
            return self.known_needed_bytes
        asked, reading = self.question, self.estimate.allocator
        if reading.out_of_memory is not None or reading.num_alloc_retries:
            reading = read_allocator(
                asked.model,
                asked.setup,
                asked.kernel_set,
                None,
                asked.expandable_segments,
                self.estimate.memory.peak_rank,
                asked.hardware,
            )
            assert reading.out_of_memory is None, "a GPU without limit is never full"
        return reading.peak_reserved_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Peak reserved; None where the GPU was full before, and for CPU kernels, which have no caching allocator."""
        reading = self.estimate.allocator
        return reading.peak_reserved_bytes if self._on_gpu and reading.out_of_memory is None else None

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None when a size is unknown or the kernels are not a GPU's."""
        return self.estimate.fits if self._on_gpu else None

    @property
    def verdict(self) -> Verdict | None:
        """Fits, runs with allocation retries, or does not fit; None when a size is unknown."""
        return self.estimate.verdict if self._on_gpu else None

    @property
    def headroom_bytes(self) -> int | None:
        """What a process can use of the GPU beyond what is reserved without retries.

        It fits where that is no less than the headroom that is required; None where the GPU's memory is not known.
        """
        usable = self.estimate.gpu_bytes
        return usable - self.needed_bytes if self._on_gpu and usable is not None else None

    @property
    def required_headroom_bytes(self) -> int | None:
        """What is kept free of the GPU for the CUDA context and NCCL; None where the GPU's memory is not known."""
        known = self._on_gpu and self.estimate.gpu_bytes is not None
        return self.estimate.required_headroom.num_bytes if known else None

    @property
    def communicators(self) -> Communicators | None:
        """What NCCL takes of the GPU; None for the kernels of a CPU."""
        return self.estimate.communicators if self._on_gpu else None

    @property
    def largest_category(self) -> str:
        """The category that holds the most at the peak."""
        breakdown = self.estimate.memory.breakdown_bytes
        return max(breakdown, key=lambda category: breakdown[category])

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know before trusting the answer."""
        setup, model = self.question.setup, self.question.model
        notes = []
        if self.estimate.for_eager:
            notes.append("the setup compiles; this is the prediction for eager")
        gpu = self.question.gpu
        if gpu is not None and self._on_gpu and setup.precision.compute != "fp32" and prefers_cudnn(gpu):
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
        return self.known_speed or speed_of(self.question)

    @property
    def _on_gpu(self) -> bool:
        return self.question.kernels == "cuda"


def speed_of(question: Question) -> Speed:
    """Predict how fast a setup trains, for eager."""
    return speed(question.model, question.setup, question.hardware, question.kernels, question.profile)


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
