"""Question: a setup to predict. Prediction: the answer. document.py has its JSON form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fsdp_bench.catalog.hf_config import sliding_window_note
from fsdp_bench.catalog.recorded import compiled_catalog
from fsdp_bench.plan.defaults import assumptions
from fsdp_bench.plan.estimate import (
    KERNELS,
    Estimate,
    Verdict,
    available_bytes,
    communicators_for,
    estimate,
    refuse_too_slow,
    start_replay,
)
from fsdp_bench.plan.speed import Speed, speed
from fsdp_bench.rates.attention_time import CUDNN, kernel_of
from fsdp_bench.rates.calibrated import rates_of
from fsdp_bench.rates.collectives import socket_is_assumed
from fsdp_bench.rates.communicators import Communicators
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.replay.traffic import Traffic, collectives, traffic
from fsdp_bench.simulate.operators.kernels import Kernels, kernels_on, prefers_cudnn
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.lora import LARGEST_FUSED_PRODUCT
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import TrainSetup


@dataclass(frozen=True)
class Question:
    """One setup to predict, its hardware, and the assumptions."""

    model: Model
    setup: TrainSetup
    hardware: Hardware | None = None
    kernels: str = "cuda"
    """``cuda`` or ``cpu``: the device whose kernels run."""
    build: Build = Build.META
    expandable_segments: bool = False
    profile: Profile | None = None
    """A calibration that predicts time instead of the datasheet."""
    headroom_bytes: int | None = None
    """Memory kept free on each GPU for the CUDA context and NCCL. None: what headroom.py derives and assumes."""
    sliding_window: int | None = None
    """The sliding window of a Hugging Face model, in tokens. Predictions do not model it."""

    @property
    def gpu(self) -> Gpu | None:
        """The GPU. None if none is named."""
        return self.hardware.gpu if self.hardware else None

    @property
    def has_server(self) -> bool:
        """Whether a server is named, which says how many GPUs a node has."""
        return self.hardware is not None and self.hardware.has_server

    @property
    def kernel_set(self) -> Kernels:
        """The kernels as ``estimate`` takes them, with the cuBLAS workspace of the GPU."""
        return kernels_on(KERNELS[self.kernels], self.gpu, moves_model=self.build is not Build.META)

    @cached_property
    def simulated(self) -> SimulatedSteps:
        """The steps of the setup."""
        return SimulatedSteps(self.model, self.setup, self.kernel_set)

    def on_same_steps(self, **changes: Any) -> Question:
        """Return the question with other assumptions, under which the same is simulated."""
        changed = replace(self, **changes)
        changed.__dict__["simulated"] = self.simulated  # where cached_property finds it
        return changed

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions that follow transformers' Trainer, each with the option that says otherwise."""
        return assumptions(self.model, self.setup)

    @property
    def impossible(self) -> str | None:
        """Why the setup cannot run; None if it can."""
        return why_impossible(self.model, self.setup, self.kernels)


@dataclass(frozen=True)
class Prediction:
    """The answer to a question."""

    question: Question
    estimate: Estimate
    known_needed_bytes: int | None = None
    """``needed_bytes``, if it was predicted before."""
    known_speed: Speed | None = None
    """``speed``, if it was predicted before."""

    @property
    def needed_bytes(self) -> int:
        """Peak reserved memory without allocation retries. If the GPU is too small, predicted for unlimited memory."""
        return self.estimate.needed_bytes if self.known_needed_bytes is None else self.known_needed_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Peak reserved memory. None if memory ran out before, and for CPU kernels, which have no caching allocator."""
        reading = self.estimate.allocator
        return reading.peak_reserved_bytes if self._on_gpu and reading.out_of_memory is None else None

    @property
    def fits(self) -> bool | None:
        """Whether it fits. None if a size is unknown, and for CPU kernels."""
        return self.estimate.fits if self._on_gpu else None

    @property
    def verdict(self) -> Verdict | None:
        """Fits, runs with allocation retries, or does not fit. None if a size is unknown."""
        return self.estimate.verdict if self._on_gpu else None

    @property
    def headroom_bytes(self) -> int | None:
        """Usable GPU memory minus ``needed_bytes``. None if the GPU's memory is not known.

        A setup fits if this is at least ``required_headroom_bytes``.
        """
        usable = self.estimate.gpu_bytes
        return usable - self.needed_bytes if self._on_gpu and usable is not None else None

    @property
    def required_headroom_bytes(self) -> int | None:
        """GPU memory kept free for the CUDA context and NCCL. None if the GPU's memory is not known."""
        known = self._on_gpu and self.estimate.gpu_bytes is not None
        return self.estimate.required_headroom.num_bytes if known else None

    @property
    def communicators(self) -> Communicators | None:
        """NCCL's communicators and their GPU memory. None for CPU kernels."""
        return self.estimate.communicators if self._on_gpu else None

    @property
    def largest_category(self) -> str:
        """The category with the most bytes at the peak."""
        breakdown = self.estimate.memory.breakdown_bytes
        return max(breakdown, key=lambda category: breakdown[category])

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about assumptions of this answer."""
        setup, model = self.question.setup, self.question.model
        notes = []
        if isinstance(model, RecordedModel):
            notes.append(_recorded_note(model))
            lora, num_tokens = model.code.origin.lora, setup.micro_batch_size * setup.sequence_length
            if lora is not None and lora.is_quantized and num_tokens <= LARGEST_FUSED_PRODUCT:
                notes.append(
                    f"QLoRA: up to {LARGEST_FUSED_PRODUCT} tokens in a micro-batch bitsandbytes may multiply without"
                    " unpacking the weights, by the GPU, and then needs less"
                )
        if self.estimate.for_eager:
            notes.append(f"the setup compiles, and {self.estimate.why_eager}; this is the prediction for eager")
        elif setup.compiles:
            notes.append(
                f"compiled blocks as torch {compiled_catalog().torch} compiles them; what compiling itself takes in the"
                " first step is not predicted"
            )
        gpu = self.question.gpu
        notes += self._of_attention()
        if gpu is not None and gpu.cuda is not None and self._on_gpu:
            notes.append(_cuda_note(gpu))
        is_assumed = setup.strategy.is_hybrid and setup.shard_size is None and not self.question.has_server
        if is_assumed and setup.world_size > 1:
            notes.append(
                f"hybrid strategies: nothing says how many GPUs a node has, so shard groups of {setup.shard_group_size}"
                f" of {setup.world_size} ranks are assumed; --gpus-per-node or --shard-size says it"
            )
        longest = model.max_position_embeddings
        if longest is not None and setup.sequence_length > longest:
            notes.append(f"{setup.sequence_length} tokens are beyond the {longest} positions of {model.name}")
        window = self.question.sliding_window
        if window is not None and setup.sequence_length > window:
            notes.append(sliding_window_note(window))
        return (*notes, *self._of_links())

    def _of_attention(self) -> Iterator[str]:
        """Yield what is assumed of fused attention in 16 bits on this GPU."""
        gpu, model, compute = self.question.gpu, self.question.model, self.question.setup.precision.compute
        if model.has_flash_attn:
            yield "attention: the flash-attn package as its source says; compared with no run of it"
            return
        if gpu is None or not self._on_gpu or not model.has_fused_attention or compute == "fp32":
            return
        if gpu.is_before_sm80 and self.estimate.knows_attention:
            yield _note_before_sm80(gpu)
        if kernel_of(gpu) == CUDNN:
            yield (
                "attention: the memory of FlashAttention's kernel and the time of cuDNN's, which torch takes on"
                f" {gpu.name} with cuDNN above 9.15"
            )

    def _of_links(self) -> Iterator[str]:
        """Yield what is assumed of links that nobody documents."""
        hardware = self.question.hardware
        if self._on_gpu and self.question.profile is None and hardware is not None and socket_is_assumed(hardware):
            yield (
                f"nobody documents which GPUs of a {hardware.name} share a processor, or what joins its"
                " processors: that is taken to be no slower than PCIe"
            )

    @property
    def peak_host_bytes_per_node(self) -> int | None:
        """Host memory that all ranks of one node need. None if the number of ranks on a node is unknown."""
        host = self.estimate.host.peak_bytes
        is_known = self.question.has_server or self.question.setup.world_size == 1
        return host if is_known or host == 0 else None

    @cached_property
    def traffic(self) -> list[Traffic]:
        """Bytes that rank 0 sends and receives in a step, with times if the links are documented or measured."""
        asked = self.question
        issued = collectives(asked.simulated.step())
        return traffic(issued, asked.setup, rates_of(asked.setup, asked.hardware, asked.kernels, asked.profile))

    @cached_property
    def speed(self) -> Speed:
        """The predicted speed of the setup in eager mode."""
        return self.known_speed or speed_of(self.question)

    @property
    def _on_gpu(self) -> bool:
        return self.question.kernels == "cuda"


def speed_of(question: Question) -> Speed:
    """Predict how fast a setup trains in eager mode."""
    return speed(question.simulated, question.hardware, question.profile)


def answer(question: Question, reading: AllocatorReading | None = None) -> Prediction:
    """Predict the memory, fit and time of a setup. ``reading`` is the result of a replay, if there was one."""
    found = estimate(
        question.simulated,
        question.hardware,
        question.build,
        question.expandable_segments,
        reading,
        question.headroom_bytes,
    )
    return Prediction(question, found)


def answer_if_it_fits(question: Question) -> Prediction | None:
    """Predict a question's setup. Return None if it does not fit, which the first allocation retry shows."""
    refuse_too_slow(question.model, question.setup)
    communicators = communicators_for(question.model, question.setup, question.hardware)
    replay = start_replay(
        question.simulated,
        available_bytes(question.gpu, communicators, question.headroom_bytes),
        question.expandable_segments,
    )
    if replay.is_full():
        return None
    found = answer(question, replay.until())
    return found if found.fits else None


def answers(questions: Iterable[Question], progress: Callable[[int], None] = lambda done: None) -> Iterator[Prediction]:
    """Yield the prediction of every question, memory and time. ``progress`` gets the number of answers so far."""
    progress(0)
    for done, question in enumerate(questions, 1):
        found = answer(question)
        found.needed_bytes, found.speed, found.traffic  # noqa: B018 - predicted here, and kept
        question.simulated.forget()
        progress(done)
        yield found


def _recorded_note(model: RecordedModel) -> str:
    """Return whose code was recorded, and what was assumed of its batch and of what its kernels need."""
    origin = model.code.origin
    whose = {"huggingface": "Hugging Face's", "torchtitan": "torchtitan's"}.get(origin.code, "your own")
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    batch = "full sequences, no attention mask, no cache of keys and values" if model.has_tokens else "images"
    if len(model.counts) > 1:
        batch += ", as many target tokens as source tokens"
    routing = "; balanced routing" if any("_grouped_mm" in name for name in model.some_variant.names) else ""
    if origin.code == "torchtitan":
        batch += "; attention by F.scaled_dot_product_attention, the cross-entropy of all logits at once"
    return f"code: {whose} {origin.architecture}, recorded with {versions}; {batch}{routing}"


FIRST_WITH_CUDA_13 = 7.5
"""The oldest compute capability that torch's builds for CUDA 13 have kernels for (torch.cuda.get_arch_list)."""


def _note_before_sm80(gpu: Gpu) -> str:
    """Say which kernels of attention an older GPU runs, and which builds of torch have kernels for it at all."""
    builds = ""
    if (gpu.compute_capability or 0.0) < FIRST_WITH_CUDA_13:
        builds = f"; torch's builds for CUDA 13 have no kernels for compute capability {gpu.compute_capability}"
    return (
        "attention: torch has no FlashAttention for this GPU; it runs memory-efficient attention in fp16 without"
        f" grouped keys, else single operators, which keep the weights of all heads in fp32{builds}"
    )


def _cuda_note(gpu: Gpu) -> str:
    """Return what a version of CUDA decides on a GPU."""
    products = f"matrix products with the older cuBLAS of {gpu.name}'s entry" if gpu.has_older_cublas else ""
    attention = "attention by FlashAttention-2" if prefers_cudnn(gpu) and kernel_of(gpu) != CUDNN else ""
    decided = ", ".join(filter(None, (products, attention))) or "no rate that is known to depend on it"
    return f"CUDA {gpu.cuda}: {decided}"
