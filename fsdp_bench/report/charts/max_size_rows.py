"""The chart of ``max-size``'s results: the order of the bars, their labels, and the conditions below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from fsdp_bench.plan.max_size import HardwareResult
from fsdp_bench.plan.search.quantity import Quantity
from fsdp_bench.plan.search.search import SearchResult
from fsdp_bench.report.charts.description import Slide
from fsdp_bench.report.charts.max_size import (
    CANNOT_RUN,
    MOST_BARS,
    MOST_ROWS,
    NONE_FITS,
    UNKNOWN,
    MaxSizeBar,
    nested,
    size_bars,
)
from fsdp_bench.report.charts.trial_facts import NESTING
from fsdp_bench.report.text.common import hardware_text
from fsdp_bench.report.text.max_size import host_line, kept_free, load_lines
from fsdp_bench.report.text.quantity_text import QUANTITY_TEXTS, model_line, value_text
from fsdp_bench.report.text.setups import SELDOM, SIZES, common_line, named, value_of
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Offload, TrainSetup
from fsdp_bench.spec.units import format_gib

SERVER = "server"
LEVELS = (SERVER, *NESTING)
"""Fields that may vary within a strategy, outermost level of labels first."""

MOST_REASONS = 3
"""Most notes and reasons for missing bars that the chart prints."""


@dataclass(frozen=True)
class Arrangement:
    """The fields that label the bars, and the field that distinguishes the rows of panels, if there are two rows."""

    levels: tuple[str, ...]
    rows: str | None


def arrange(places: Sequence[tuple[str, Sequence[Quantity]]]) -> Arrangement:
    """Choose levels and rows for the settings to search, before anything is predicted.

    Args:
        places: names of servers or GPUs, each with one quantity per setting.

    Raises:
        SpecError: for more settings than a chart shows legibly.
    """
    settings = [(name, quantity[0].setup) for name, quantities in places for quantity in quantities]
    values = {field: {_label(field, *setting) for setting in settings} for field in LEVELS}
    levels = tuple(field for field in LEVELS if len(values[field]) > 1)
    if len(settings) <= MOST_BARS:
        return Arrangement(levels, None)
    for field in levels:
        most = max(sum(_label(field, *setting) == word for setting in settings) for word in values[field])
        if len(values[field]) <= MOST_ROWS and most <= MOST_BARS:
            return Arrangement(tuple(level for level in levels if level != field), field)
    raise SpecError(
        f"chart: {len(settings)} settings are too many for one picture; at most {MOST_BARS}, or {MOST_ROWS} rows"
        f" of {MOST_BARS}; name fewer with --strategy, --precision, --checkpointing, --offload"
    )


def _label(field: str, name: str, setup: TrainSetup) -> str:
    if field == SERVER:
        return name
    text = value_of(setup, field)
    return named(field, text) if field in (*SELDOM, *SIZES) else text


def max_size_slide(results: Sequence[HardwareResult], arrangement: Arrangement) -> Slide:
    """Return the chart of predicted results."""
    first = results[0].cells[0]
    text = QUANTITY_TEXTS[first.quantity.name]
    cells = [(one.title, cell) for one in results for cell in one.cells]
    cells = nested(
        cells, arrangement.levels, lambda level, one: _label(level, one[0], one[1].setup), lambda c: c[1].setup
    )
    field, rows = arrangement.rows, dict[str, list[MaxSizeBar]]()
    for word in dict.fromkeys(_label(field, name, cell.setup) if field else "" for name, cell in cells):
        chosen = [(n, c) for n, c in cells if not field or _label(field, n, c.setup) == word]
        title = word if field in (None, SERVER, *SELDOM, *SIZES) else f"{field} {word}"
        rows[title] = [_bar(n, c, arrangement.levels) for n, c in chosen]
    name = first.quantity.name
    return Slide(
        f"{text.title} (predicted): {_servers(results)}",
        _subtitle(results),
        tuple(_conditions(results)),
        size_bars(rows, text.axes, arrangement.levels, lambda value: value_text(name, value), text.unit),
        notes=tuple(_notes(results)),
    )


def _bar(name: str, cell: SearchResult, levels: Sequence[str]) -> MaxSizeBar:
    setup = cell.setup
    group = setup.strategy.value
    if setup.effective_strategy is not setup.strategy:
        group += f"\n(runs {setup.effective_strategy.value})"
    note = CANNOT_RUN if cell.impossible else UNKNOWN if cell.unknown else NONE_FITS
    labels = tuple(_label(level, name, setup) for level in levels)
    fits, runs = cell.fits_value, cell.runs_value
    more = runs if runs is not None and fits is not None and runs > fits else None
    return MaxSizeBar(group, labels, fits, with_retries=more, note=note)


def _subtitle(results: Sequence[HardwareResult]) -> str:
    setup = results[0].cells[0].setup
    first = results[0].cells[0]
    name, model = first.quantity.name, first.quantity[0].model
    what = f"{model.kind} models" if name == "num_parameters" else model.name
    varying = {name, *(field for field in SIZES if len(_values(results, field)) > 1)}
    batch = {"micro_batch_size": f"{setup.sequence_length} tokens a sequence, "}
    batch["sequence_length"] = f"batch {setup.micro_batch_size} per GPU, "
    both = f"batch {setup.micro_batch_size} x {setup.sequence_length} tokens per GPU, "
    known = "" if varying.issuperset(SIZES) else next((batch[field] for field in SIZES if field in varying), both)
    return f"{what}, {known}by sharding strategy"


def _values(results: Sequence[HardwareResult], field: str) -> set[str]:
    return {value_of(cell.setup, field) for one in results for cell in one.cells}


def _servers(results: Sequence[HardwareResult]) -> str:
    names = [hardware_text(one.hardware, one.cells[0].setup.world_size) for one in results]
    if results[0].cells[0].quantity.name == "world_size":
        names = [one.hardware.name for one in results]
    *others, last = names
    return " and ".join([", ".join(others), last] if others else [last])


def _conditions(results: Sequence[HardwareResult]) -> list[str]:
    first = results[0].cells[0]
    setups = [cell.setup for one in results for cell in one.cells]
    varying = [level for level in (*LEVELS[1:], "world_size") if len(_values(results, level)) > 1]
    lines = ["source: predicted, not measured", f"model: {model_line(first)}"]
    lines.append(f"setup: {common_line(first.setup, varying, first.quantity.name)}")
    lines += [_hardware(one) for one in results]
    shown = [cell.shown.setup for one in results for cell in one.cells if cell.is_answered]
    groups = {str(setup.shard_group_size) for setup in shown if setup.strategy.is_hybrid}
    lines += [f"hybrid strategies in shard groups of {size}" for size in sorted(groups)]
    segments = ", expandable segments" if first.check.expandable_segments else ""
    lines += [f"torch {TORCH_VERSION} as modelled, CUDA kernels, rank 0{segments}", *load_lines(first)]
    lines += [
        f"fits: ends without allocation retries; {free}" for free in dict.fromkeys(map(kept_free, results)) if free
    ]
    if any(setup.offload is not Offload.NONE for setup in setups):
        lines += dict.fromkeys(host_line(one) for one in results)
    return lines


def _hardware(result: HardwareResult) -> str:
    gpu, first = result.gpu, result.cells[0]
    hardware = first.quantity[0].hardware or result.hardware
    name = f"{hardware.count(first.setup.world_size)} x {hardware.name_with_gpus}"
    up_to = "up to " if first.quantity.name == "world_size" else ""
    source = gpu.usable_memory_source
    read = f" ({source.title}, {source.date})" if source else ""
    return f"{up_to}{name}, {format_gib(gpu.usable_memory_bytes or 0)} usable on each{read}"


def _notes(results: Sequence[HardwareResult]) -> list[str]:
    missing = [
        (f"{CANNOT_RUN}: {cell.impossible}" if cell.impossible else f"{UNKNOWN}: {cell.unknown}")
        for one in results
        for cell in one.cells
        if not cell.is_answered
    ]
    notes = dict.fromkeys(note for one in results for cell in one.cells if cell.at for note in cell.at.notes)
    assumed = dict.fromkeys(each for one in results for cell in one.cells for each in cell.shown.assumptions)
    return [
        *(["as transformers' Trainer: " + "; ".join(assumed)] if assumed else []),
        *notes,
        *(reason for reason, _ in groupby(sorted(missing))),
    ][:MOST_REASONS]
