"""The return values of estimate() and largest_model(), and their repr."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from fsdp_bench.plan.defaults import assumptions
from fsdp_bench.plan.document import answer_document
from fsdp_bench.plan.estimate import Estimate, Verdict
from fsdp_bench.plan.question import Prediction, Question
from fsdp_bench.plan.search.search import SearchResult
from fsdp_bench.plan.speed import Speed
from fsdp_bench.plan.table import Row, answer_row
from fsdp_bench.spec.recording.model import Model, code_of
from fsdp_bench.spec.setup import (
    Checkpointing,
    Offload,
    TrainSetup,
)
from fsdp_bench.spec.units import format_count, format_gib, format_seconds


@dataclass(frozen=True, repr=False, kw_only=True)
class TimedEstimate(Estimate):
    """The prediction of one setup: ``memory``, ``fits``, and how fast it trains (``speed``)."""

    speed: Speed
    """Step time, tokens per second and MFU, in eager mode. Its fields are None if the rates are not known."""

    @property
    def step_seconds(self) -> float | None:
        """Seconds of one optimizer step. None if the rates of the GPU or its links are not known."""
        return self.speed.time.step_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """Tokens per second of one GPU. None if ``step_seconds`` is None."""
        return self.speed.tokens_per_second_per_gpu

    @property
    def prediction(self) -> Prediction:
        """The same as the answer to a question, as ``predict`` has it."""
        return Prediction(Question(self.model, self.setup, self.hardware), self, known_speed=self.speed)

    def row(self) -> Row:
        """Return the answer as one row of a table: ``pandas.DataFrame([found.row() for found in several])``.

        Columns are those of ``predict --csv``: sizes are in bytes, times in seconds; None is what is not known.
        """
        return answer_row(answer_document(self.prediction, with_communication=False))

    def _lines(self) -> list[tuple[str, str]]:
        memory = self.memory
        code = [] if code_of(self.model) == "benchmark" else [("code", self.model.describe())]
        assumed = "; ".join(assumptions(self.model, self.setup))
        where = self.hardware
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
        return "\n".join([f"{self.model.name}: {_setup_text(self.setup)}", *lines])

    def _repr_html_(self) -> str:
        """Return the answer as a table, for notebooks."""
        rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in self._lines())
        return f"<table><caption>{escape(f'{self.model.name}: {_setup_text(self.setup)}')}</caption>{rows}</table>"


@dataclass(frozen=True, repr=False)
class LargestModel(SearchResult):
    """The largest model of the size ladder that fits, and which memory the next one exceeds."""

    @property
    def model(self) -> Model | None:
        """The largest model that fits. None if the smallest does not fit."""
        return None if self.at is None else self.at.model

    def __repr__(self) -> str:
        largest = "nothing fits" if self.model is None else f"largest model that fits: {self.model.name}"
        lines = [f"{largest}: {_setup_text(self.quantity[0].setup)}"]
        if self.beyond is None or self.limited_by is None:
            return "\n".join([*lines, "  the size ladder ends there"])
        limit = self.limited_by
        place = "GPU" if limit.place == "gpu" else limit.place
        short = f"  {self.beyond.model.name} is short of {place} memory in {limit.phase}"
        return "\n".join([*lines, f"{short}, most of it {limit.category.replace('_', ' ')}"])


def _setup_text(setup: TrainSetup) -> str:
    gpus = "1 GPU" if setup.world_size == 1 else f"{setup.world_size} GPUs"
    parts = [setup.strategy.value, setup.api.value, str(setup.precision), gpus]
    if setup.checkpointing is not Checkpointing.NONE:
        parts.append(f"{setup.checkpointing.value} checkpointing")
    if setup.offload is not Offload.NONE:
        parts.append("offload" if setup.offload is Offload.PARAMS else "offload optimizer")
    parts += [one.phrase(getattr(setup, one.name)) for one in setup.changed()]
    return ", ".join([*parts, f"batch {setup.micro_batch_size} x {setup.sequence_length}"])


def _fits_text(found: Estimate) -> str:
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
