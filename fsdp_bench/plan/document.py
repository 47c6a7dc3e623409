"""The JSON form of an answer, whatever its source: bytes, seconds, null for what is unknown. Pages read it back."""

from dataclasses import asdict, fields
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from fsdp_bench.catalog.lookup import place_names
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.speed import Speed
from fsdp_bench.replay.host_memory import HostMemory
from fsdp_bench.replay.schedule import StepTime
from fsdp_bench.replay.traffic import Traffic
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.hardware import Gpu, Hardware, Source
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import MemoryAtStart

Positive = Annotated[float, Meta(gt=0, le=1e18)]
Bytes = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Setting = bool | int | float | str | None
"""The value of a field of a setup."""

Document = TypeVar("Document", bound=msgspec.Struct)
ABSENT: Any = msgspec.UNSET
"""The value of a key that the documents of a source do not have."""


class ModelDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The model of an answer. The JSON form has its other sizes too."""

    name: str = "unknown"
    family: str | None = None
    code: str = "benchmark"
    lora: LoRA | None = None
    description: str | None = None
    """The model in words, which the JSON form does not have."""
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    num_parameters: Count | None = None


class HardwareDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware of an answer."""

    name: str | None = None
    gpu: str | None = None
    gpu_power_watts: float | None = None
    gpu_power_source: Source | None = None
    """Who says it, if it is not the GPU's default."""
    gpu_memory_bytes: Bytes | None = None
    gpu_memory_source: Source | None = None
    context_bytes: Bytes | None = None
    num_nodes: Count | None = None
    gpus_per_node: Count | None = None
    host_memory_bytes: Bytes | None = None

    @property
    def stated_power_watts(self) -> float | None:
        """The power limit of each GPU, if it is not the GPU's default."""
        return None if self.gpu_power_source is None else self.gpu_power_watts


class OutOfMemoryDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Where a GPU runs out of memory."""

    phase: str
    block: int | None
    operator: str
    num_bytes: Bytes
    reserved_bytes: Bytes


class MemoryDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one GPU, and of the host beside it."""

    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes | None = None
    peak_reserved_source: str | None = None
    needed_bytes: Bytes | None = None
    peak_active_bytes: Bytes | None = None
    communicators_bytes: dict[str, Bytes] | None = None
    """NCCL's GPU memory, without the CUDA context."""
    communicators: tuple[dict[str, Any], ...] | None = None
    peak_device_bytes: Bytes | None = None
    peak_host_bytes_per_node: Bytes | None = None
    peak_phase: str
    peak_block: int | None = None
    peak_operator: str | None = None
    peak_rank: int | None = None
    phases: dict[str, Bytes]
    load_bytes: Bytes | None = None
    resident: MemoryAtStart | None = None
    breakdown_bytes: dict[str, Bytes]
    host_breakdown_bytes: dict[str, Bytes] | None = None
    """Host memory of one node by category: ``load`` is before training, the others are during training."""
    num_alloc_retries: int | None = None
    num_alloc_retries_later: int | None = None
    out_of_memory: OutOfMemoryDocument | None = None

    @property
    def peak_place(self) -> str | None:
        """The operator at the peak, with its block."""
        if self.peak_operator is None or self.peak_block is None:
            return self.peak_operator
        return f"{self.peak_operator}, block {self.peak_block}"

    @property
    def largest_category(self) -> str:
        """The category with the most bytes at the peak."""
        return max(self.breakdown_bytes, key=lambda category: self.breakdown_bytes[category])


class TimeDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one step."""

    step_seconds: Positive | None = None
    step_seconds_range: tuple[float, float] | None = None
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    exposed_communication_seconds: float | None = None
    host_copy_seconds: float | None = None
    cpu_optimizer_seconds: float | None = None
    parts_seconds: dict[str, float] | None = None
    slowed_by_collectives_seconds: float | None = None
    retries_seconds: float | None = None
    """The seconds in which allocation retries of every step free and reserve memory; not in ``step_seconds``."""
    tokens_per_second_per_gpu: Positive | None = None
    mfu: float | None = None
    hfu: float | None = None
    rates: str | None = None
    unknown: tuple[str, ...] = ()

    @property
    def exposed_fraction(self) -> float | None:
        """The fraction of a step in which collectives run and no operator does."""
        if self.step_seconds is None or self.exposed_communication_seconds is None:
            return None
        return self.exposed_communication_seconds / self.step_seconds


class AnswerDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one setup, as ``predict --json`` and ``dry-run --json`` print it. Defaults are unknown values."""

    source: str
    torch: str | None = None
    kernels: str | None = None
    device: str | None = None
    expandable_segments: bool | None = None
    load: str | None = None
    model: ModelDocument
    setup: dict[str, Setting]
    assumptions: tuple[str, ...] = ()
    server: HardwareDocument
    impossible: str | None = None
    for_eager: bool | None = None
    notes: tuple[str, ...] | None = None
    memory: MemoryDocument | None = None
    time: TimeDocument | None = None
    communication: tuple[Traffic, ...] | None = None
    fits: bool | None = None
    verdict: Verdict | None = None
    headroom_bytes: int | None = None
    required_headroom_bytes: Bytes | None = None
    required_headroom_source: str | None = None
    seconds: float | None = None

    @property
    def values(self) -> dict[str, Any]:
        """Values by field in which setups may differ: its own fields, what it runs on, its model."""
        places = {name: getattr(self.server, name) for name in ("gpu", "num_nodes", "gpus_per_node")}
        lora = self.model.lora and self.model.lora.text()
        model = {"model": self.model.name, "code": self.model.code, "lora": lora}
        return {**self.setup, "server": self.server.name, **places, **model}

    @property
    def exceeds(self) -> str | None:
        """The memory that a setup exceeds: ``gpu`` or ``host``; None if neither, or if that is not known."""
        if self.memory is None or self.verdict in (None, Verdict.FITS):
            return None
        is_host = self.verdict == Verdict.DOES_NOT_FIT and self.memory.out_of_memory is None
        return "host" if is_host else "gpu"


def partly(kind: type[Document], **given: Any) -> Document:
    """Return a document that has only the given keys."""
    return kind(**{**dict.fromkeys(kind.__struct_fields__, ABSENT), **given})


def encoded(answer: AnswerDocument, model: Model) -> dict[str, Any]:
    """Return the JSON form of an answer, with all sizes of its model."""
    return {**to_builtins(answer), "model": model.document()}


def setup_document(setup: TrainSetup, can_run: bool = True) -> dict[str, Setting]:
    """Return the fields of a setup, the strategy that runs, and the size of its shard groups."""
    runs = {"effective_strategy": setup.effective_strategy.value}
    return {**to_builtins(setup), **runs, "shard_size": setup.shard_group_size if can_run else None}


def hardware_document(hardware: Hardware | None) -> HardwareDocument:
    """Return the hardware of an answer."""
    gpu = hardware.gpu if hardware else None
    server, gpu_name, num_nodes, gpus_per_node = place_names(hardware)
    return HardwareDocument(
        name=server,
        gpu=gpu_name,
        gpu_power_watts=gpu.limit_watts if gpu else None,
        gpu_power_source=gpu.power_limit_source if gpu else None,
        gpu_memory_bytes=gpu.usable_memory_bytes if gpu else None,
        gpu_memory_source=gpu.usable_memory_source if gpu else None,
        context_bytes=gpu.context_bytes if gpu else None,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        host_memory_bytes=hardware.server.host_memory_bytes if hardware else None,
    )


def gpu_document(hardware: Hardware | None, gpu: Gpu | None) -> HardwareDocument:
    """Return the hardware of an answer that depends on the GPU alone."""
    return partly(
        HardwareDocument,
        name=place_names(hardware)[0],
        gpu=gpu.name if gpu else None,
        gpu_memory_bytes=gpu.usable_memory_bytes if gpu else None,
    )


def time_document(found: Speed) -> TimeDocument:
    """Return the predicted time of a step."""
    time, span = found.time, found.range
    return TimeDocument(
        **{name: getattr(time, name) for name in _TIMES},
        step_seconds_range=span.step_seconds(time.step_seconds) if span and time.step_seconds else None,
        parts_seconds={part.value: seconds for part, seconds in time.parts.items()} or None,
        slowed_by_collectives_seconds=time.slowed_seconds if time.step_seconds is not None else None,
        retries_seconds=found.retries_seconds,
        tokens_per_second_per_gpu=found.tokens_per_second_per_gpu,
        mfu=found.mfu,
        hfu=found.hfu,
        rates=found.source,
    )


_TIMES = {one.name for one in fields(StepTime)} & {*TimeDocument.__struct_fields__}
"""Times of a schedule, which documents have under the same names."""


def host_document(host: HostMemory) -> dict[str, int]:
    """Return host memory of one node by category."""
    sizes = {name.removesuffix("_bytes"): size for name, size in asdict(host).items()}
    order = ("load", "pinned_parameters", "pinned_gradients", "pinned_activations")
    return {**{name: sizes[name] for name in order}, **sizes}
