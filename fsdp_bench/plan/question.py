"""Question: a setup to predict, its hardware and assumptions, and warnings about them; prediction.py answers it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import msgspec

from fsdp_bench.catalog.hf_config import sliding_window_note
from fsdp_bench.catalog.lookup import place_names
from fsdp_bench.catalog.recorded import compiled_catalog
from fsdp_bench.plan.defaults import assumptions
from fsdp_bench.plan.document import ABSENT, AnswerDocument, ModelDocument, hardware_document, setup_document
from fsdp_bench.plan.estimate import KERNELS, available_bytes, communicators_for
from fsdp_bench.plan.headroom import Headroom, headroom_of
from fsdp_bench.plan.setup_text import HARDWARE, values_of
from fsdp_bench.plan.speed import Speed, speed
from fsdp_bench.rates.attention_time import CUDNN, kernel_of
from fsdp_bench.rates.collectives import socket_is_assumed
from fsdp_bench.rates.communicators import Communicators
from fsdp_bench.rates.datasheet import products_efficiency
from fsdp_bench.replay.host_memory import Build, host_memory
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.simulate.operators.kernels import Kernels, kernels_on, prefers_cudnn
from fsdp_bench.simulate.optimizers.torch_optim import why_optimizer_is_not_predicted
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.calibration_profile import Calibration, Profile
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.lora import LARGEST_FUSED_PRODUCT
from fsdp_bench.spec.recording.model import Model, RecordedModel, code_of, lora_of
from fsdp_bench.spec.setup import Float8, TrainSetup


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
    profile: Calibration | None = None
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

    def on_same_steps(self, **changes: Any) -> Self:
        """Return the question with other assumptions, under which the same is simulated."""
        return replace(self, **changes).with_steps(self.simulated)

    def with_steps(self, simulated: SimulatedSteps) -> Self:
        """Return the question with its steps as they are simulated already, or on kernels that have no name."""
        changed = replace(self)
        changed.__dict__["simulated"] = simulated  # where cached_property finds it
        return changed

    @property
    def is_on_gpu(self) -> bool:
        """Whether the kernels are CUDA's. Only these have an allocator with reserved memory."""
        return self.kernels == "cuda"

    @cached_property
    def communicators(self) -> Communicators:
        """NCCL's communicators of one rank, and the GPU memory that they take beside torch's."""
        return communicators_for(self.model, self.setup, self.hardware)

    @property
    def required_headroom(self) -> Headroom:
        """GPU memory kept free for the CUDA context and NCCL."""
        return headroom_of(self.gpu, self.communicators, self.headroom_bytes)

    @property
    def available_bytes(self) -> int | None:
        """GPU memory that torch's allocator can reserve: all but the headroom. None if that is not known."""
        return available_bytes(self.gpu, self.communicators, self.headroom_bytes)

    @cached_property
    def host_memory_fraction(self) -> float:
        """The fraction of a node's host memory that its ranks need. 0 if the host memory is not known."""
        where = self.hardware
        if where is None or where.server.host_memory_bytes is None:
            return 0.0
        if not self.setup.uses_host_memory and self.build is Build.META:
            return 0.0
        return host_memory(self.simulated, where.gpus_per_node, self.build).peak_bytes / where.server.host_memory_bytes

    @cached_property
    def values(self) -> dict[str, Any]:
        """Values by field in which setups may differ: its own fields, what it runs on, its model."""
        values = values_of(self.setup) | dict(zip(HARDWARE, place_names(self.hardware), strict=False))
        values |= {"shard_size": None} if self.impossible else {}
        if self.model is None:  # a dry run of a user's own module
            return values
        lora = lora_of(self.model)
        return {**values, "model": self.model.name, "code": code_of(self.model), "lora": lora and lora.text()}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions that follow transformers' Trainer, each with the option that says otherwise."""
        return assumptions(self.model, self.setup)

    @property
    def impossible(self) -> str | None:
        """Why the setup cannot run, or is not predicted; None if it is."""
        return why_impossible(self.model, self.setup, self.kernels) or why_optimizer_is_not_predicted(self.setup)

    def document(self, **answered: Any) -> AnswerDocument:
        """Return the document of an answer. Without one it is that of a setup that cannot run: it has the reason."""
        reason = self.impossible
        return AnswerDocument(
            source="predicted",
            torch=TORCH_VERSION,
            kernels=self.kernels,
            device=ABSENT,
            expandable_segments=self.expandable_segments,
            load=self.build.value,
            model=msgspec.convert({**self.model.document(), "description": self.model.describe()}, ModelDocument),
            setup=setup_document(self.setup, reason is None),
            assumptions=self.assumptions,
            server=hardware_document(self.hardware),
            impossible=reason,
            seconds=ABSENT,
            **answered,
        )


def speed_of(question: Question) -> Speed:
    """Predict how fast a setup trains."""
    return speed(question.simulated, question.hardware, question.profile)


def notes_of(question: Question, why_eager: str | None) -> tuple[str, ...]:
    """Return the warnings. ``why_eager``: why a setup that compiles is predicted for eager mode."""
    setup, model = question.setup, question.model
    notes = []
    if isinstance(model, RecordedModel):
        notes.append(_recorded_note(model))
        lora, num_tokens = model.code.origin.lora, setup.micro_batch_size * setup.sequence_length
        if lora is not None and lora.is_quantized and num_tokens <= LARGEST_FUSED_PRODUCT:
            notes.append(
                f"QLoRA: up to {LARGEST_FUSED_PRODUCT} tokens in a micro-batch bitsandbytes may multiply without"
                " unpacking the weights, by the GPU, and then needs less"
            )
    if why_eager is not None:
        notes.append(f"the setup compiles, and {why_eager}; this is the prediction for eager")
    elif setup.compiles:
        notes.append(
            f"compiled blocks as torch {compiled_catalog().torch} compiles them; what compiling itself takes in the"
            " first step is not predicted"
        )
    gpu = question.gpu
    notes += [*_of_attention(question), *_of_float8(question)]
    if gpu is not None and gpu.cuda is not None and question.is_on_gpu:
        notes.append(_cuda_note(gpu))
    is_assumed = setup.strategy.is_hybrid and setup.shard_size is None and not question.has_server
    if is_assumed and setup.world_size > 1:
        notes.append(
            f"hybrid strategies: nothing says how many GPUs a node has, so shard groups of {setup.shard_group_size}"
            f" of {setup.world_size} ranks are assumed; --gpus-per-node or --shard-size says it"
        )
    longest = model.max_position_embeddings
    if longest is not None and setup.sequence_length > longest:
        notes.append(f"{setup.sequence_length} tokens are beyond the {longest} positions of {model.name}")
    window = question.sliding_window
    if window is not None and setup.sequence_length > window:
        notes.append(sliding_window_note(window))
    hardware = question.hardware
    is_measured = isinstance(question.profile, Profile)
    if question.is_on_gpu and not is_measured and hardware is not None and socket_is_assumed(hardware):
        notes.append(
            f"nobody documents which GPUs of a {hardware.name} share a processor, or what joins its"
            " processors: that is taken to be no slower than PCIe"
        )
    return tuple(notes)


def _of_attention(question: Question) -> Iterator[str]:
    """Yield what is assumed of fused attention in 16 bits on this GPU."""
    gpu, model, compute = question.gpu, question.model, question.setup.precision.compute
    if model.has_flash_attn:
        yield "attention: the flash-attn package as its source says; compared with no run of it"
        return
    if gpu is None or not question.is_on_gpu or not model.has_fused_attention or compute == "fp32":
        return
    if gpu.is_before_sm80 and model.knows_attention(gpu, compute):
        yield _note_before_sm80(gpu)
    if kernel_of(gpu) == CUDNN:
        yield f"attention: cuDNN's, which torch takes on {gpu.name} from 2.11 on, with cuDNN above 9.15"


def _of_float8(question: Question) -> Iterator[str]:
    """Yield what the predicted time of products in float8 rests on."""
    gpu = question.gpu
    if question.setup.float8 is Float8.NONE or gpu is None or question.profile is not None:
        return
    others = "" if gpu.name == "H100-SXM" else f", which {gpu.name} is taken to reach, too"
    yield (
        "float8: products, and kernels that find maxima and cast, reach the parts of the peak and of the memory's"
        f" bandwidth that were measured on one H100 of 700 W{others}; all-gathers are in 16 bits"
    )


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
    products = ""
    if gpu.has_older_cublas and gpu.older_cublas is not None:
        source = gpu.older_cublas.source
        products = f"matrix products at {products_efficiency(gpu):.0%} of the peak, with the older cuBLAS"
        products += f" ({source.title}, {source.date})"
    attention = "attention by FlashAttention-2" if prefers_cudnn(gpu) and kernel_of(gpu) != CUDNN else ""
    decided = ", ".join(filter(None, (products, attention))) or "no rate that is known to depend on it"
    return f"CUDA {gpu.cuda}: {decided}"
