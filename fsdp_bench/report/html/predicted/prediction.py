"""The page of predicted setups: one, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_bench.report.charts.trade_off import boxes_apart
from fsdp_bench.report.html.blocks import (
    BarGroup,
    BarLine,
    Bars,
    Block,
    Cell,
    Facts,
    Legend,
    Page,
    Piece,
    Plot,
    Point,
    Row,
    Section,
    Shape,
    Table,
    Text,
    Tile,
    Tiles,
    table,
)
from fsdp_bench.report.html.documents import PredictedServer, PredictionDocument
from fsdp_bench.report.html.scales import around, from_zero, remarks_of
from fsdp_bench.report.html.step import breakdown_bars, phase_bars
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.setups import spaced
from fsdp_bench.report.text.speed import PART_LABELS
from fsdp_bench.spec.units import GIB, format_count, format_gib, format_seconds

SETTINGS = ("strategy", "api", "precision", "offload", "checkpointing", "optimizer", "loss", "micro_batch_size",
            "sequence_length")  # fmt: skip
NUMBERS = ("micro batch size", "sequence length", "#", "allocated", "needed", "headroom", "step", "exposed",
            "tokens/s per GPU", "MFU")  # fmt: skip


def hardware_of(server: PredictedServer) -> str:
    """Return the hardware as text."""
    if server.name is not None:
        nodes = f"{server.num_nodes} x {server.name}"
        return f"{nodes} ({(server.num_nodes or 1) * (server.gpus_per_node or 1)} {server.gpu})"
    return server.gpu or "no hardware named"


def _verdict(one: PredictionDocument) -> str:
    if one.impossible is not None:
        return "impossible"
    return {True: "fits", False: spaced(one.verdict or "does not fit"), None: f"fit {UNKNOWN}"}[one.fits]


def scalar(value: Any) -> str:
    """Return a value of a setup as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def prediction_page(predictions: Sequence[PredictionDocument]) -> Page:
    """Return the page of one predicted setup, or of several side by side."""
    first, model = predictions[0], str(predictions[0].model.get("name", UNKNOWN))
    sections = [Section("Conditions and versions", (_conditions(first),))]
    title = f"{model} on {hardware_of(first.server)}"
    if len(predictions) == 1:
        lead = [] if first.memory is None else [_tiles(first)]
        return Page(title, first.source, _answer(first), lead=tuple(lead), sections=(*_alone(first), *sections))
    best = max((one for one in predictions if one.fits), key=_tokens, default=None)
    fitting = sum(one.fits is True for one in predictions)
    answer = f"{fitting} of {len(predictions)} setups fit ({first.source})"
    if best is not None and _tokens(best):
        answer += f"; the fastest is {_name(best)}, {_tokens(best):,.0f} tokens/s per GPU"
    chart = _trade_off(predictions)
    compared = Section("All setups", (_setups(predictions, best),))
    return Page(title, first.source, answer, lead=(chart,) if chart else (), sections=(compared, *sections))


def _answer(one: PredictionDocument) -> str:
    if one.impossible is not None:
        return f"Impossible: {one.impossible}"
    memory, of = one.memory, one.server.gpu_memory_bytes
    needed = None if memory is None else memory.needed_bytes or memory.peak_allocated_bytes
    text = "" if needed is None else f": needs {format_gib(needed)}"
    usable = "" if of is None or not text else f" of {format_gib(of)} usable"
    return f"{_verdict(one).capitalize()} ({one.source}){text}{usable}"


def _tokens(one: PredictionDocument) -> float:
    return (one.time.tokens_per_second_per_gpu if one.time else None) or 0.0


def _name(one: PredictionDocument) -> str:
    return " ".join(scalar(one.setup.get(field)) for field in ("strategy", "api", "precision")) + (
        f" checkpointing {scalar(one.setup.get('checkpointing'))}"
    )


def _tiles(one: PredictionDocument) -> Tiles:
    memory, time = one.memory, one.time
    assert memory is not None
    tiles = [Tile("setting", _name(one)), Tile("peak allocated", format_gib(memory.peak_allocated_bytes))]
    if one.headroom_bytes is not None:
        kept = one.required_headroom_bytes
        note = "" if kept is None else f"{format_gib(kept)} are to be kept free"
        tiles.append(Tile("left on the GPU", format_gib(one.headroom_bytes), note))
    if time is not None and time.step_seconds is not None:
        tiles.append(Tile("step", format_seconds(time.step_seconds)))
        tiles.append(Tile("speed", f"{_tokens(one):,.0f} tokens/s" if _tokens(one) else UNKNOWN, "per GPU"))
        tiles.append(Tile("MFU", UNKNOWN if time.mfu is None else f"{time.mfu:.0%}"))
    return Tiles(tuple(tiles))


def _alone(one: PredictionDocument) -> list[Section]:
    memory, time = one.memory, one.time
    found = []
    if memory is not None:
        where = memory.peak_phase if memory.peak_block is None else f"{memory.peak_phase}, block {memory.peak_block}"
        blocks = (
            phase_bars(memory.phases, "Peak of each phase, on one GPU (predicted)"),
            breakdown_bars(memory.breakdown_bytes, "Alive at the peak (predicted)"),
            Text(f"The peak is in {where}, at {memory.peak_operator}."),
        )
        found.append(Section("Memory", blocks))
    if time is not None:
        found.append(Section("Time of a step", (_time(one),)))
    return found


def _time(one: PredictionDocument) -> Block:
    time = one.time
    assert time is not None
    if time.step_seconds is None:
        return Text(f"Unknown: {', '.join(time.unknown) or 'no rates are known'}.")
    if time.parts_seconds:
        parts = {_part_label(name): seconds for name, seconds in time.parts_seconds.items() if seconds > 0}
        caption = f"What a step of {format_seconds(time.step_seconds)} consists of (predicted)"
    else:  # written before the parts were
        parts = {"operators": time.compute_seconds or 0.0}
        parts["exposed communication"] = time.exposed_communication_seconds or 0.0
        caption = f"Of a step of {format_seconds(time.step_seconds)} (predicted)"
    lines = [
        BarLine(name, format_seconds(value), (Piece(name, _color(name), _share(value, time.step_seconds)),))
        for name, value in sorted(parts.items(), key=lambda part: -part[1])
    ]
    return Bars(caption, (BarGroup("", tuple(lines)),), notes=(f"rates: {time.rates}",))


def _part_label(name: str) -> str:
    return PART_LABELS.get(name, spaced(name))


def _color(name: str) -> str:
    return "exposed" if name.startswith(("exposed", "waiting", "optimizer on the CPU")) else "role-forward"


def _share(value: float, whole: float) -> float:
    return min(max(100 * value / whole, 0.0), 100.0)


def _setups(predictions: Sequence[PredictionDocument], best: PredictionDocument | None) -> Table:
    titles = ["#", *(spaced(field) for field in SETTINGS), "fits", "allocated", "needed", "headroom", "step", "exposed",
              "tokens/s per GPU", "MFU", "reason"]  # fmt: skip
    rows = []
    for number, one in enumerate(predictions, start=1):
        memory, time = one.memory, one.time
        cells = [
            Cell(str(number), number),
            *(setting_cell(one.setup.get(field)) for field in SETTINGS),
            Cell(_verdict(one), is_warning=one.fits is False),
            bytes_cell(memory.peak_allocated_bytes if memory else None),
            bytes_cell(memory.needed_bytes if memory else None),
            bytes_cell(one.headroom_bytes),
            _seconds(time.step_seconds if time else None),
            _seconds(time.exposed_communication_seconds if time else None),
            Cell(f"{_tokens(one):,.0f}", _tokens(one)) if _tokens(one) else Cell(UNKNOWN),
            Cell(UNKNOWN) if time is None or time.mfu is None else Cell(f"{time.mfu:.0%}", time.mfu),
            Cell(one.impossible or ""),
        ]
        rows.append(Row(tuple(cells), one is best))
    return table("Setups (predicted)", titles, rows, NUMBERS)


def setting_cell(value: Any) -> Cell:
    """Return a value of a setup as a cell."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(scalar(value), float(value) if is_number else None)


def bytes_cell(size: int | None) -> Cell:
    """Return a size as a cell."""
    return Cell(UNKNOWN) if size is None else Cell(format_gib(size), size)


def _seconds(value: float | None) -> Cell:
    return Cell(UNKNOWN) if value is None else Cell(format_seconds(value), value)


def _trade_off(predictions: Sequence[PredictionDocument]) -> Plot | None:
    known = [
        (number, one, one.memory.needed_bytes / GIB, _tokens(one))
        for number, one in enumerate(predictions, start=1)
        if one.memory is not None and one.memory.needed_bytes and _tokens(one)
    ]
    if len(known) < 2:
        return None
    usable = (predictions[0].server.gpu_memory_bytes or 0) / GIB
    x, y = from_zero([usable, *(each[2] for each in known)]), around([each[3] for each in known])
    points = []
    for left, low, indices in boxes_apart([(x.at(each[2]) / 100, y.at(each[3]) / 100) for each in known]):
        own = [known[index - 1] for index in indices]
        title = "; ".join(f"{number}: {_name(one)}" for number, one, _, _ in own)
        color = "best" if any(one.fits for _, one, _, _ in own) else "unfit"
        points.append(Point(100 * left, 100 * low, ",".join(str(each[0]) for each in own), title, color))
    limit = (Shape("limit", f"M{10 * x.at(usable):.1f} 0V1000", is_line=True),) if usable else ()
    return Plot(
        "Memory against speed (predicted): the numbers are those of the table below",
        "memory that a GPU needs, GiB",
        "tokens/s per GPU",
        x.ticks(),
        y.ticks(),
        limit,
        tuple(points),
        legend=(Legend("best", "fits"), Legend("unfit", "does not fit"), *_limit_legend(usable)),
        remarks=remarks_of(y, "tokens/s", len(points) < len(known)),
    )


def _limit_legend(usable: float) -> tuple[Legend, ...]:
    return (Legend("limit", f"usable on the GPU, {usable:.1f} GiB"),) if usable else ()


def _conditions(one: PredictionDocument) -> Facts:
    source = one.server.gpu_memory_source
    numbers = one.model.get("num_parameters")
    size = f", {format_count(numbers)} parameters" if isinstance(numbers, int) else ""
    facts = [
        ("model", f"{scalar(one.model.get('name')) or UNKNOWN}{size}"),
        ("hardware", hardware_of(one.server)),
        ("usable memory", "" if source is None else f"{source.title} ({source.date})"),
        ("kept free", one.required_headroom_source or ""),
        ("kernels", one.kernels or UNKNOWN),
        ("PyTorch", f"{one.torch or UNKNOWN}, as modelled"),
        ("source", f"{one.source}: a simulation of the training step; no GPU was used"),
        ("as the Trainer", "; ".join(one.assumptions)),
        *(("note", note) for note in one.notes or ()),
    ]
    return Facts(tuple((name, value) for name, value in facts if value))
