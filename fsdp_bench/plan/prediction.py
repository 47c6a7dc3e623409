"""Prediction: the answer to a question, which ``predict``, ``max-size``, ``plan`` and Python's ``estimate()`` have.

Live bytes are added up, in milliseconds. A replay of PyTorch's caching allocator tells the reserved memory, which
decides whether a setup fits. It, speed and traffic are predicted when they are asked for.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from typing import Any

from fsdp_bench.plan.document import (
    ABSENT,
    AnswerDocument,
    MemoryDocument,
    OutOfMemoryDocument,
    host_document,
    time_document,
)
from fsdp_bench.plan.estimate import (
    LARGEST_PEAK,
    MemoryPrediction,
    Verdict,
    predict_memory,
    read_allocator,
    refuse_flash_attn_package,
    refuse_too_slow,
    refuse_without_float8,
    start_replay,
)
from fsdp_bench.plan.headroom import Headroom
from fsdp_bench.plan.question import Question, notes_of, speed_of
from fsdp_bench.plan.setup_text import setup_line
from fsdp_bench.plan.speed import Speed, with_full_gpu
from fsdp_bench.plan.table import Row, answer_row
from fsdp_bench.rates.calibrated import rates_of
from fsdp_bench.rates.communicators import Communicators
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading
from fsdp_bench.replay.host_memory import HostMemory, host_memory
from fsdp_bench.replay.traffic import Traffic, collectives, traffic
from fsdp_bench.simulate.compiled.choose import why_eager
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.recording.model import Model, code_of
from fsdp_bench.spec.setup import Checkpointing, TrainSetup
from fsdp_bench.spec.units import GIB, format_count, format_gib, format_seconds


@dataclass(frozen=True, repr=False)
class Prediction:
    """The predicted memory, fit and time of one setup."""

    question: Question
    memory: MemoryPrediction
    host: HostMemory

    @cached_property
    def allocator(self) -> AllocatorReading:
        """Statistics of the caching allocator on this GPU. If its memory is not known: on a GPU of unlimited memory."""
        asked = self.question
        rank = self.memory.peak_rank
        return read_allocator(asked.simulated, asked.available_bytes, asked.expandable_segments, rank)

    @property
    def model(self) -> Model:
        """The model."""
        return self.question.model

    @property
    def setup(self) -> TrainSetup:
        """The training setup."""
        return self.question.setup

    @property
    def hardware(self) -> Hardware | None:
        """The servers, or a GPU. None if none is named."""
        return self.question.hardware

    @property
    def values(self) -> dict[str, Any]:
        """Values by field in which setups may differ."""
        return self.question.values

    @property
    def gpu(self) -> Gpu | None:
        """The GPU. None if none is named."""
        return self.question.gpu

    @cached_property
    def why_eager(self) -> str | None:
        """Why the prediction is for eager mode although the setup compiles; None if it is not, or nothing compiles."""
        return why_eager(self.model, self.setup, self.question.simulated.kernels)

    @property
    def for_eager(self) -> bool:
        """Whether the setup uses torch.compile, and the prediction is for eager mode."""
        return self.why_eager is not None

    @property
    def gpu_bytes(self) -> int | None:
        """Usable memory of the GPU. None if it is not documented."""
        return self.gpu.usable_memory_bytes if self.gpu else None

    @property
    def available_bytes(self) -> int | None:
        """GPU memory that torch's allocator can reserve: all but the headroom. None if that is not known."""
        return self.question.available_bytes

    @property
    def required_headroom(self) -> Headroom:
        """GPU memory kept free for the CUDA context and NCCL."""
        return self.question.required_headroom

    @property
    def required_headroom_bytes(self) -> int | None:
        """The bytes of ``required_headroom``. None if the GPU's memory is not known, and for CPU kernels."""
        known = self.question.is_on_gpu and self.gpu_bytes is not None
        return self.required_headroom.num_bytes if known else None

    @property
    def knows_attention(self) -> bool:
        """Whether the GPU runs the kernels of attention that are predicted."""
        return self.model.knows_attention(self.gpu, self.setup.precision.compute)

    @property
    def least_bytes(self) -> int:
        """Bytes that are allocated at one time whichever kernel computes attention; at most the peak.

        Parameters, gradients and optimizer states do not depend on it. Where heads are a multiple of 8, which
        FlashAttention does not pad, memory-efficient and unfused attention save no less than FlashAttention: queries,
        keys, values, the output and a number for each row. Memory that a kernel allocates for itself does not count.
        """
        memory, model = self.memory, self.model
        certain = [memory.phases.get(phase, 0) for phase in ("load", "optimizer")]
        is_saved_by_name = self.setup.checkpointing is Checkpointing.SELECTIVE
        if model.head_dim % 8 == 0 and not is_saved_by_name and "attention" not in memory.peak_operator:
            certain.append(memory.peak_allocated_bytes)
        return max(certain)

    @property
    def largest_category(self) -> str:
        """The category with the most bytes at the peak."""
        breakdown = self.memory.breakdown_bytes
        return max(breakdown, key=lambda category: breakdown[category])

    @property
    def host_memory_bytes(self) -> int | None:
        """Host memory that a node has. None if it is not known."""
        return self.hardware.server.host_memory_bytes if self.hardware else None

    @property
    def peak_host_bytes_per_node(self) -> int | None:
        """Host memory that all ranks of one node need. None if the number of ranks on a node is unknown."""
        host = self.host.peak_bytes
        is_known = self.question.has_server or self.setup.world_size == 1
        return host if is_known or host == 0 else None

    @property
    def verdict(self) -> Verdict | None:
        """Whether the setup fits with the headroom kept free. None if a size is unknown, and for CPU kernels.

        It runs with retries if allocations fail but succeed once the allocator has emptied its cache. Where a GPU runs
        other kernels of attention than are predicted, known is only what does not fit with any.
        """
        if self.gpu_bytes is None or not self.question.is_on_gpu:
            return None
        if not self.knows_attention:
            return Verdict.DOES_NOT_FIT if self.least_bytes > (self.available_bytes or 0) else None
        if self.allocator.out_of_memory is not None:
            return Verdict.DOES_NOT_FIT
        on_gpu = Verdict.RUNS_WITH_RETRIES if self.allocator.num_alloc_retries else Verdict.FITS
        if self.host.peak_bytes == 0:
            return on_gpu
        if self.host_memory_bytes is None:  # it is known not to fit where the GPU is too small
            return None if on_gpu is Verdict.FITS else on_gpu
        return on_gpu if self.host.peak_bytes <= self.host_memory_bytes else Verdict.DOES_NOT_FIT

    @property
    def fits(self) -> bool | None:
        """Whether it runs without allocation retries and within host memory. None if ``verdict`` is None."""
        return None if self.verdict is None else self.verdict is Verdict.FITS

    @property
    def communicators(self) -> Communicators | None:
        """NCCL's communicators of one rank, and the GPU memory that they take beside torch's. None for CPU kernels."""
        return self.question.communicators if self.question.is_on_gpu else None

    @property
    def context_bytes(self) -> int | None:
        """Memory of the CUDA context, if a calibration measured it; ``gpu_bytes`` then does not contain it."""
        return self.gpu.context_bytes if self.gpu else None

    @property
    def reserved_bytes(self) -> int | None:
        """Peak reserved memory. None if memory ran out before, and for CPU kernels, which have no caching allocator."""
        known = self.question.is_on_gpu and self.allocator.out_of_memory is None
        return self.allocator.peak_reserved_bytes if known else None

    @cached_property
    def needed_bytes(self) -> int:
        """Peak reserved memory without allocation retries. If the GPU is too small, predicted for unlimited memory."""
        reading, asked = self.allocator, self.question
        if reading.out_of_memory is not None or reading.num_alloc_retries:
            reading = read_allocator(asked.simulated, None, asked.expandable_segments, self.memory.peak_rank)
            assert reading.out_of_memory is None, "a GPU without limit is never full"
        return reading.peak_reserved_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """Usable GPU memory minus ``needed_bytes``: ``required_headroom_bytes`` or more if it fits. None if unknown."""
        usable = self.gpu_bytes
        return usable - self.needed_bytes if self.question.is_on_gpu and usable is not None else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about assumptions of this answer."""
        return notes_of(self.question, self.why_eager)

    @cached_property
    def traffic(self) -> list[Traffic]:
        """Bytes that rank 0 sends and receives in a step, with times if the links are documented or measured."""
        asked = self.question
        issued = collectives(asked.simulated.step())
        return traffic(issued, asked.setup, rates_of(asked.setup, asked.hardware, asked.kernels, asked.profile))

    @cached_property
    def speed(self) -> Speed:
        """Step time, tokens per second and MFU. Its fields are None if the rates are not known."""
        found = speed_of(self.question)
        if self.gpu_bytes is None or not self.question.is_on_gpu:
            return found
        return with_full_gpu(found, self.allocator, self.needed_bytes, self.gpu_bytes)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of one optimizer step. None if the rates of the GPU or its links are not known."""
        return self.speed.time.step_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """Tokens per second of one GPU. None if ``step_seconds`` is None."""
        return self.speed.tokens_per_second_per_gpu

    def document(self, with_time: bool = True, with_communication: bool = True) -> AnswerDocument:
        """Return the answer as a document. Time and communication each cost one more simulation."""
        required = self.required_headroom_bytes
        return self.question.document(
            for_eager=self.for_eager,
            notes=self.notes,
            memory=self._memory_document(),
            time=time_document(self.speed) if with_time else None,
            communication=tuple(self.traffic) if with_communication else None,
            fits=self.fits,
            verdict=self.verdict,
            headroom_bytes=self.headroom_bytes,
            required_headroom_bytes=required,
            required_headroom_source=None if required is None else self.required_headroom.source,
        )

    def _memory_document(self) -> MemoryDocument:
        reading, communicators = self.allocator, self.communicators
        full, nccl = reading.out_of_memory, communicators.num_bytes if communicators else None
        known = self.reserved_bytes is not None
        parts = self.reserved_bytes, self.context_bytes, nccl.high if nccl else None
        return MemoryDocument(
            **vars(self.memory),
            peak_reserved_bytes=self.reserved_bytes,
            peak_reserved_source=ABSENT,
            needed_bytes=self.needed_bytes if self.question.is_on_gpu else None,
            peak_active_bytes=reading.peak_active_bytes if known else None,
            communicators_bytes=asdict(nccl) if nccl else None,
            communicators=tuple(map(asdict, communicators.each)) if communicators else None,
            peak_device_bytes=None if None in parts else sum(filter(None, parts)),
            peak_host_bytes_per_node=self.peak_host_bytes_per_node,
            load_bytes=ABSENT,
            resident=ABSENT,
            host_breakdown_bytes=None if self.peak_host_bytes_per_node is None else host_document(self.host),
            num_alloc_retries=reading.num_alloc_retries if known else None,
            num_alloc_retries_later=reading.num_retries_later if known else None,
            out_of_memory=None
            if full is None
            else OutOfMemoryDocument(
                phase=full.phase,
                block=full.block if full.block >= 0 else None,
                operator=full.label,
                num_bytes=full.num_bytes,
                reserved_bytes=reading.peak_reserved_bytes,
            ),
        )

    def row(self) -> Row:
        """Return one row of a table, with the columns of ``predict --csv``: bytes and seconds, None for unknown."""
        return answer_row(self.document(with_communication=False))

    def _lines(self) -> list[tuple[str, str]]:
        memory, where, assumed = self.memory, self.hardware, "; ".join(self.question.assumptions)
        code = [] if code_of(self.model) == "benchmark" else [("code", self.model.describe())]
        server = [("server", f"{where.num_nodes} x {where.name}")] if where and where.has_server else []
        return [
            *([("as the Trainer", assumed)] if assumed else []),
            *code,
            *server,
            ("peak allocated", f"{format_gib(memory.peak_allocated_bytes)} in {memory.peak_phase}"),
            ("fits", _fits_text(self)),
            ("step time", _time_text(self.speed)),
        ]

    def __repr__(self) -> str:
        lines = [f"  {label:<14}  {text}" for label, text in self._lines()]
        return "\n".join([f"{self.model.name}: {setup_line(self.setup)}", *lines])

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in self._lines())
        return f"<table><caption>{escape(f'{self.model.name}: {setup_line(self.setup)}')}</caption>{rows}</table>"


def _fits_text(found: Prediction) -> str:
    name = "no GPU is named" if found.gpu is None else f"nobody documents how much of a {found.gpu.name} can be used"
    if found.fits is None or found.headroom_bytes is None or found.gpu is None:
        return f"unknown: {name}"
    if found.verdict is Verdict.RUNS_WITH_RETRIES:
        return f"no: it runs on {found.gpu.name}, with allocation retries"
    if not found.fits:
        return f"no, not on {found.gpu.name}"
    return f"yes, with {format_gib(found.headroom_bytes)} left of {found.gpu.name}"


def _time_text(found: Speed) -> str:
    seconds, tokens = found.time.step_seconds, found.tokens_per_second_per_gpu
    if seconds is None or tokens is None:
        return f"unknown: {', '.join(found.time.unknown)}"
    mfu = "" if found.mfu is None else f", MFU {found.mfu:.0%}"
    return f"{format_seconds(seconds)}, {format_count(tokens)} tokens/s per GPU{mfu} ({found.source})"


def answer(question: Question, reading: AllocatorReading | None = None) -> Prediction:
    """Predict the memory, fit and time of a setup. ``reading`` is the result of a replay, if there was one.

    Raises SpecError for more layers or micro-batches than are predicted, for a peak above LARGEST_PEAK, for attention
    heads that no fused kernel takes, and for float8 or the flash-attn package on a GPU without it.
    """
    model, setup, hardware, simulated = question.model, question.setup, question.hardware, question.simulated
    refuse_too_slow(model, setup)
    refuse_without_float8(setup, hardware)
    if model.has_flash_attn:
        refuse_flash_attn_package(hardware)
    memory = predict_memory(simulated)
    if memory.peak_allocated_bytes > LARGEST_PEAK:
        raise SpecError(
            f"{model.name}: a peak of {memory.peak_allocated_bytes / GIB:.2g} GiB on one GPU is not predicted;"
            f" up to {LARGEST_PEAK / GIB:.2g} GiB: fewer dimensions, layers or tokens"
        )
    ranks = hardware.ranks_per_node(setup.world_size) if hardware else setup.world_size
    on_cuda = simulated if simulated.kernels.is_cuda else simulated.on(CUDA)
    found = Prediction(question, memory, host_memory(on_cuda, ranks, question.build))
    if reading is not None:
        vars(found)["allocator"] = reading  # what cached_property would find again
    return found


def answer_if_it_fits(question: Question) -> Prediction | None:
    """Predict a question's setup. Return None if it does not fit, which the first allocation retry shows."""
    refuse_too_slow(question.model, question.setup)
    replay = start_replay(question.simulated, question.available_bytes, question.expandable_segments)
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
