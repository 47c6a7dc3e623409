"""The answers of ``max-size``: for each setting the largest model, or other quantity, that fits; their JSON form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, Literal

import msgspec

from fsdp_bench.plan.document import (
    ABSENT,
    AnswerDocument,
    Bytes,
    Count,
    HardwareDocument,
    MemoryDocument,
    ModelDocument,
    Setting,
    TimeDocument,
    encoded,
    hardware_document,
)
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.remedies import GAIN, Remedy, remedies, with_twice_the_gpus
from fsdp_bench.plan.search.fit import NO_FLASH_ATTENTION, FitCheck, Limit
from fsdp_bench.plan.search.quantity import Quantity
from fsdp_bench.plan.search.search import SearchResult, find_all
from fsdp_bench.plan.table import MAX_SIZE_COLUMNS, Row, answer_row
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import FIELDS

TIMED = 30
"""By default step time is predicted for at most this many settings; each takes some hundredths of a second."""


@dataclass(frozen=True)
class HardwareResult:
    """All settings on one kind of hardware."""

    hardware: Hardware
    cells: tuple[SearchResult, ...]
    with_time: bool = False
    """Whether step time is predicted for the candidates that fit."""
    on_fewest: Prediction | None = None
    """Where the fewest GPUs are searched: a setting that fits fewer than any cell's, of all that a plan tries."""
    with_next: bool = True
    """Whether the document has the next candidates, whose reserved memory takes as long to predict as all else."""

    @cached_property
    def document(self) -> MaxSizeDocument:
        """The answers as a document."""
        first = self.cells[0]
        return MaxSizeDocument(
            source="predicted",
            torch=TORCH_VERSION,
            kernels="cuda",
            expandable_segments=first.check.expandable_segments,
            load=first.check.build.value,
            dial=first.quantity.name,  # type: ignore[arg-type]
            fits_means="no allocation retries, required_headroom_bytes of each GPU left for the CUDA context and NCCL,"
            " and within the host's memory where that is known",
            server=hardware_document(first.question.hardware),
            cells=tuple(map(_setting, self.cells, self.answers, repeat(self.with_next))),
            on_fewest=self.on_fewest.document() if self.on_fewest else ABSENT,
        )

    @cached_property
    def answers(self) -> list[AnswerDocument]:
        """The answer to each setting: for the largest candidate, or that of a setting under which nothing fits."""
        return [
            cell.at.document(self.with_time, with_communication=False) if cell.at else cell.question.document()
            for cell in self.cells
        ]

    @property
    def title(self) -> str:
        """Name and number: ``2 x g5.48xlarge``. Only the name if the number of GPUs is searched."""
        return title_of(self.hardware, self.cells[0].quantity)

    @property
    def answered(self) -> tuple[SearchResult, ...]:
        """The settings that have an answer."""
        return tuple(cell for cell in self.cells if cell.is_answered)

    @property
    def nothing_fits(self) -> bool:
        """Whether the smallest candidate of every answered setting does not fit."""
        return bool(self.answered) and all(cell.fits_value is None for cell in self.answered)


def title_of(hardware: Hardware, quantity: Quantity) -> str:
    """Return the name and number of what a quantity is searched on; only the name if the number is searched."""
    count = hardware.count(quantity[0].setup.world_size)
    is_alone = quantity.name == "world_size" or (hardware.has_server and count == 1)
    return hardware.name if is_alone else f"{count} x {hardware.name}"


def max_sizes(
    places: Iterable[tuple[Hardware, Sequence[Quantity]]],
    check: FitCheck,
    progress: Callable[[int, int], None] = lambda done, of: None,
    with_time: bool | None = None,
    with_next: bool = True,
) -> list[HardwareResult]:
    """Find the largest candidate of each quantity on each kind of hardware.

    Settings that cannot run are answered with the reason. ``progress`` is called with the number of settings answered
    so far and the number of all settings. ``with_time``: whether step time is predicted for the candidates that fit;
    None: if there are at most TIMED settings. ``with_next``: whether the documents have the next candidates.
    """
    asked = [(hardware, [_unanswered(quantity, check) for quantity in all_of]) for hardware, all_of in places]
    open_ones = [cell.quantity for _, cells in asked for cell in cells if cell.is_answered]
    with_time = len(open_ones) <= TIMED if with_time is None else with_time
    found = iter(find_all(open_ones, check, lambda done: progress(done, len(open_ones)), with_time, with_next))
    return [
        HardwareResult(
            hardware, tuple(next(found) if cell.is_answered else cell for cell in cells), with_time, with_next=with_next
        )
        for hardware, cells in asked
    ]


def _unanswered(quantity: Quantity, check: FitCheck) -> SearchResult:
    """Return the reason why a setting has no answer; without one it can be searched."""
    question = check.question(quantity[0])
    is_known = question.model.knows_attention(question.gpu, question.setup.precision.compute)
    impossible = question.impossible
    return SearchResult(
        quantity, check, impossible=impossible, unknown=None if impossible or is_known else NO_FLASH_ATTENTION
    )


def limit_text(limit: Limit) -> str:
    """Return a limit as text: ``activations in backward on the GPU``."""
    category = limit.category.replace("_", " ")
    if limit.place == "gpu":
        return f"{category} in {limit.phase} on the GPU"
    return f"host memory: {category}" + (" (while the model is built)" if limit.phase == "load" else "")


class LimitDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that the next candidate exceeds."""

    place: str | None = None
    phase: str | None = None
    category: str | None = None
    words: str


class NextDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The next candidate after the largest that fits, and the memory that it needs."""

    value: int
    model: str
    num_parameters: Count
    fits: bool | None
    verdict: Verdict | None
    needed_bytes: Bytes
    headroom_bytes: int | None
    memory: MemoryDocument


class SettingDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of ``max-size --json``, which has the strategy and other fields before it."""

    source: str = "predicted"
    impossible: str | None = None
    unknown: str | None = None
    fits_value: int | None = None
    runs_value: int | None = None
    model: str | None = None
    max_parameters: int | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    runs_parameters: int | None = None
    setup: dict[str, Setting]
    memory: MemoryDocument | None = None
    time: TimeDocument | None = None
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] | None = None
    fits: bool | None = None
    verdict: Verdict | None = None
    headroom_bytes: int | None = None
    required_headroom_bytes: Bytes | None = None
    required_headroom_source: str | None = None
    limited_by: LimitDocument | None = None
    next: NextDocument | None = None


class MaxSizeDocument(msgspec.Struct, frozen=True, kw_only=True):
    """All settings on one kind of hardware, as ``max-size --json`` prints them."""

    source: str
    torch: str | None = None
    kernels: str | None = None
    expandable_segments: bool | None = None
    load: str | None = None
    dial: Literal["num_parameters", "num_hidden_layers", "micro_batch_size", "sequence_length", "world_size"]
    fits_means: str = ""
    server: HardwareDocument
    cells: tuple[SettingDocument, ...]
    on_fewest: AnswerDocument | None = None


_ANSWER = {*AnswerDocument.__struct_fields__} & {*SettingDocument.__struct_fields__} - {"source", "model", "impossible"}
"""Keys that a setting shares with the answer to its largest candidate."""
_WORDS = ("strategy", "effective_strategy", *(name for name, one in FIELDS.items() if one.has_words and not one.seldom))
"""Fields of the setup that stand before the answer."""


def document_of(results: Sequence[HardwareResult]) -> dict[str, Any]:
    """Return the JSON form: the document of one server, or several documents under ``servers``."""
    made = [_encoded(one) for one in results]
    return made[0] if len(made) == 1 else {"servers": made}


def _encoded(result: HardwareResult) -> dict[str, Any]:
    made = to_builtins(result.document)
    cells = [{**{key: cell["setup"][key] for key in _WORDS}, **cell} for cell in made["cells"]]
    if result.on_fewest is not None:
        made["on_fewest"] = encoded(result.on_fewest.document(), result.on_fewest.model)
    return {**made, "cells": cells}


def _setting(cell: SearchResult, found: AnswerDocument, with_next: bool) -> SettingDocument:
    model = cell.at.model if cell.at else None
    return SettingDocument(
        impossible=cell.impossible,
        unknown=cell.unknown,
        fits_value=cell.fits_value,
        runs_value=cell.runs_value,
        model=model.name if model else None,
        max_parameters=model.num_parameters if model else None,
        num_hidden_layers=model.num_hidden_layers if model else None,
        hidden_size=model.hidden_size if model else None,
        runs_parameters=cell.quantity[cell.runs].model.num_parameters if cell.runs >= 0 else None,
        **{key: getattr(found, key) for key in _ANSWER},
        limited_by=_limit(cell),
        next=_next(cell) if with_next else None,
    )


def _limit(cell: SearchResult) -> LimitDocument | None:
    limit, positions = cell.limited_by, cell.quantity[0].model.learned_positions
    if limit is not None:
        return LimitDocument(place=limit.place, phase=limit.phase, category=limit.category, words=limit_text(limit))
    is_end = cell.is_answered and cell.quantity.name == "sequence_length" and positions is not None
    return LimitDocument(words=f"its {positions:,} learned positions") if is_end else None


def _next(cell: SearchResult) -> NextDocument | None:
    if cell.beyond is None:
        return None
    found = cell.beyond.document(with_time=False, with_communication=False)
    assert found.memory is not None
    return NextDocument(
        value=cell.quantity.values[cell.fits + 1],
        model=cell.beyond.model.name,
        num_parameters=cell.beyond.model.num_parameters,
        fits=found.fits,
        verdict=found.verdict,
        needed_bytes=cell.beyond.needed_bytes,
        headroom_bytes=found.headroom_bytes,
        memory=found.memory,
    )


def setting_rows(one: MaxSizeDocument, answers: Sequence[AnswerDocument] | None = None) -> list[Row]:
    """Return rows of MAX_SIZE_COLUMNS, with each setting's prediction from ``answers``, or what the document has."""
    answers = answers_of(one) if answers is None else answers
    return [_row(one.dial, cell, found) for cell, found in zip(one.cells, answers, strict=True)]


def answers_of(one: MaxSizeDocument) -> list[AnswerDocument]:
    """Return the answers to settings, with what the document has of them."""
    shared: dict[str, Any] = {
        name: getattr(one, name) for name in ("torch", "kernels", "expandable_segments", "server")
    }
    return [
        AnswerDocument(
            source=cell.source,
            model=ModelDocument(name=cell.model or "unknown", num_parameters=cell.max_parameters),
            impossible=cell.impossible,
            **shared,
            **{key: getattr(cell, key) for key in _ANSWER},
        )
        for cell in one.cells
    ]


def _row(dial: str, cell: SettingDocument, found: AnswerDocument) -> Row:
    row = dict.fromkeys(MAX_SIZE_COLUMNS) | answer_row(found)
    if cell.fits_value is None:
        is_answered = cell.impossible is None and cell.unknown is None
        row |= {"model": None, "num_parameters": None, "fits": False if is_answered else None}
    names = ("impossible", "unknown", "fits_value", "runs_value", "num_hidden_layers", "hidden_size")
    return row | {
        **{name: getattr(cell, name) for name in names},
        "quantity": dial,
        "limited_by": cell.limited_by and cell.limited_by.words,
        "next_value": cell.next and cell.next.value,
        "next_needed_bytes": cell.next and cell.next.needed_bytes,
    }


# -- If no setting fits: how much memory the nearest setting lacks, and what would help --------------------------------


@dataclass(frozen=True)
class NothingFits:
    """The setting that exceeds its memory by the least, and predictions of changes that may help."""

    cell: SearchResult
    prediction: Prediction
    """The prediction of the smallest candidate."""
    remedies: tuple[Remedy, ...]
    twice_the_gpus: Remedy | None

    @property
    def gpus_help(self) -> bool:
        """Whether each GPU needs noticeably less memory on twice the GPUs."""
        if self.twice_the_gpus is None:
            return False
        now, then = self.prediction.needed_bytes, self.twice_the_gpus.prediction.needed_bytes
        return then <= (1 - GAIN) * now


def nothing_fits(sizes: Sequence[HardwareResult]) -> NothingFits | None:
    """Return the setting that exceeds its memory by the least. None if a setting fits or an answer is unknown."""
    if not sizes or not all(one.nothing_fits for one in sizes):
        return None
    cells = [cell for one in sizes for cell in one.answered if cell.beyond is not None]
    cell = min(cells, key=_shortage)
    prediction = cell.beyond
    assert prediction is not None
    searches_fewest_gpus = cell.quantity.name == "world_size"
    more = None if searches_fewest_gpus or lacks_host_memory(cell) else with_twice_the_gpus(prediction)
    return NothingFits(cell, prediction, tuple(remedies(prediction)), more)


def nothing_fits_document(found: NothingFits, message: str) -> dict[str, Any]:
    """Return the JSON form. ``message`` is the sentence that is printed."""
    prediction, setup = found.prediction, found.prediction.setup
    tried = [*found.remedies, *([found.twice_the_gpus] if found.twice_the_gpus else [])]
    return {
        "model": prediction.model.name,
        "strategy": setup.strategy.value,
        "needed_bytes": prediction.needed_bytes,
        "gpu_memory_bytes": prediction.gpu_bytes,
        "phase": prediction.memory.peak_phase,
        "category": prediction.largest_category,
        "message": message,
        "remedies": [
            {"switch": r.switch, "fits": r.prediction.fits, "needed_bytes": r.prediction.needed_bytes} for r in tried
        ],
    }


def lacks_host_memory(cell: SearchResult) -> bool:
    """Return whether the next size does not fit into host memory."""
    return cell.limited_by is not None and cell.limited_by.place == "host"


def _shortage(cell: SearchResult) -> float:
    assert cell.beyond is not None
    beyond = cell.beyond
    if lacks_host_memory(cell):
        return beyond.host.peak_bytes / (beyond.host_memory_bytes or 1)
    return beyond.needed_bytes / (beyond.gpu_bytes or 1)
