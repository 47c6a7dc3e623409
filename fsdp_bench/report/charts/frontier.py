"""The charts of a frontier sweep: measured or rehearsed bars, each with a mark and an error for the predicted value.

Cells of other models, worlds or sizes of the batch are in different charts. Those of one chart that would make more
than MOST_BARS bars are split by the fields in which they differ.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fsdp_bench.plan.setup_text import setup_line, values_of
from fsdp_bench.report.charts.description import Slide
from fsdp_bench.report.charts.max_size import MOST_BARS, NONE_FITS, UNKNOWN, MaxSizeBar, label_of, nested, size_bars
from fsdp_bench.report.charts.slide import draw, in_file_name
from fsdp_bench.report.charts.trial_facts import NESTING
from fsdp_bench.report.measured.frontier_text import at_an_end, memory_text
from fsdp_bench.report.text.max_size import QUANTITY_TEXTS
from fsdp_bench.spec.frontier import FrontierCell, FrontierRecord
from fsdp_bench.spec.setup import FIELDS
from fsdp_bench.spec.units import format_count

LEVELS = tuple(name for name in NESTING if not FIELDS[name].is_size)
"""Fields that label the bars within a strategy, outermost first."""


def draw_frontier(record: FrontierRecord, folder: Path) -> list[Path]:
    """Draw every chart of a record into a folder; return the files. Raises OSError if a file cannot be written."""
    paths = []
    taken: Counter[str] = Counter()
    for name, slide in frontier_slides(record):
        part = in_file_name(name)
        taken[part] += 1
        number = str(taken[part]) if taken[part] > 1 else ""
        path = folder / ("-".join(word for word in ("max-size", part, number) if word) + ".png")
        draw(slide, path)
        paths.append(path)
    return paths


def frontier_slides(record: FrontierRecord) -> list[tuple[str, Slide]]:
    """Return every chart of a record that has a bar, with the suffix of its file's name."""
    searched = [cell for cell in record.cells if cell.status != "skipped"]
    return [
        (name, frontier_slide(record, cells))
        for name, cells in _by_chart(searched)
        if any(cell.measured is not None and cell.measured.fits for cell in cells)
    ]


def _by_chart(cells: Sequence[FrontierCell]) -> list[tuple[str, list[FrontierCell]]]:
    found: dict[tuple[str, ...], list[FrontierCell]] = {}
    for cell in cells:
        found.setdefault(_conditions_of(cell), []).append(cell)
    several = {place for place in range(3) if len({key[place] for key in found}) > 1}
    charts = [("-".join(["", *(key[place] for place in sorted(several))]), own) for key, own in found.items()]
    return [part for name, own in charts for part in _split(name, own, LEVELS[::-1])]


def _conditions_of(cell: FrontierCell) -> tuple[str, ...]:
    """Return the model, the ranks and the work of a cell as words for file names; cells of one chart share them."""
    setup = cell.setup
    model = cell.model.name if cell.model is not None else cell.family.value
    return model, f"{setup.world_size}-ranks", f"{setup.micro_batch_size}x{setup.sequence_length}"


def _split(name: str, cells: list[FrontierCell], fields: Sequence[str]) -> list[tuple[str, list[FrontierCell]]]:
    if len(cells) <= MOST_BARS or not fields:
        return [(name, cells)]
    field, *rest = fields
    words = dict.fromkeys(str(getattr(cell.setup, field)) for cell in cells)
    if len(words) == 1:
        return _split(name, cells, rest)
    chosen = {word: [cell for cell in cells if str(getattr(cell.setup, field)) == word] for word in words}
    return [part for word, own in chosen.items() for part in _split(f"{name}-{word}", own, rest)]


def frontier_slide(record: FrontierRecord, cells: Sequence[FrontierCell]) -> Slide:
    """Return the chart of cells that share a model, a number of ranks and their work."""
    levels = tuple(level for level in LEVELS if len({label_of(level, values_of(cell.setup)) for cell in cells}) > 1)
    first, text = cells[0], QUANTITY_TEXTS[cells[0].quantity.name]
    rows = {"": nested(_bar(record, cell, levels) for cell in cells)}
    number = format_count if first.quantity.name == "num_parameters" else str
    return Slide(
        f"{text.title} ({record.source}, and predicted): {first.setup.world_size} ranks",
        _subtitle(record, first),
        tuple(_conditions(record, cells, levels)),
        size_bars(rows, text.axes, levels, number, text.unit),
        notes=tuple(dict.fromkeys(f"{UNKNOWN}: {cell.reason}" for cell in cells if cell.status == "unknown"))[:2],
    )


def _bar(record: FrontierRecord, cell: FrontierCell, levels: Sequence[str]) -> MaxSizeBar:
    measured, predicted = cell.measured, cell.predicted
    value = measured.fits if measured is not None and measured.fits else None
    return MaxSizeBar(
        group=cell.setup.strategy.value,
        labels=tuple(label_of(level, values_of(cell.setup)) for level in levels),
        value=value,
        source=record.source,
        predicted=predicted.fits if value is not None and predicted is not None and predicted.fits else None,
        with_retries=None if measured is None or value is None else measured.runs,
        note=UNKNOWN if measured is None else NONE_FITS,
    )


def _subtitle(record: FrontierRecord, cell: FrontierCell) -> str:
    setup = cell.setup
    what = cell.model.name if cell.model is not None else f"{cell.family.value} models"
    work = {
        "micro_batch_size": f"{setup.sequence_length} tokens a sequence",
        "sequence_length": f"batch {setup.micro_batch_size} per rank",
    }.get(cell.quantity.name, f"batch {setup.micro_batch_size} x {setup.sequence_length} tokens per rank")
    return f"{what} on {setup.world_size} ranks of {record.machine}; {work}"


def _conditions(record: FrontierRecord, cells: Sequence[FrontierCell], levels: Sequence[str]) -> list[str]:
    first, rehearsed_on = cells[0], record.run.rehearsed_on
    quantity = first.quantity
    place: str = record.device
    if rehearsed_on is not None:
        place = "rank 0 of the world in PyTorch's CUDA build on a stand-in for NVIDIA's libraries, kernels do nothing"
    elif record.run.emulate:
        place = f"rank 0 of the world alone on one {record.device} (emulated)"
    lines = [f"{record.source}: real training steps, {place}; every bar ran, and the step above it did not fit"]
    highest = sum(cell.measured is not None and cell.measured.fits == cell.quantity.largest for cell in cells)
    if highest:
        lines.append(f"but {highest} are at the end of the search: nothing larger was tried")
    model = f"ladder of {first.family.value} models" if first.model is None else first.model.describe()
    steps = f"{quantity.print(quantity.smallest)} to {quantity.print(quantity.largest)} in {quantity.num_steps} steps"
    lines.append(f"{model}, vocabulary {first.vocab_size}; {quantity.name} {steps}")
    lines.append(f"setup: {setup_line(first.setup, ('strategy', *levels), first.quantity.name)}")
    lines.append(f"memory: {memory_text(record)}")
    lines.append("gloo" if record.device == "cpu" else "fits: ends without allocation retries")
    hybrid = {cell.setup.shard_group_size for cell in cells if cell.setup.strategy.is_hybrid}
    lines += [f"hybrid strategies in shard groups of {size}" for size in sorted(hybrid)]
    apart = [abs(cell.steps_apart) for cell in cells if cell.steps_apart is not None and not at_an_end(cell)]
    if apart:
        what = "rehearsal" if rehearsed_on else "measurement"
        lines.append(f"prediction and {what} at the same step in {apart.count(0)} of {len(apart)} cells")
    return lines
