"""The published chart of largest models, with predictions beside each bar."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fsdp_bench.report.charts.description import Slide
from fsdp_bench.report.charts.max_size import NONE_FITS, PUBLISHED, MaxSizeBar, size_bars
from fsdp_bench.report.charts.slide import CHARACTERS
from fsdp_bench.report.text.quantity_text import QUANTITY_TEXTS
from tools.validate.published.sizes import ASSUMED, CLAIM, NOT_STATED, SERVER, SizeComparison


def published_slide(found: Sequence[SizeComparison]) -> Slide:
    """Return the chart of published bars, each followed by its predictions."""
    bars = []
    for c in found:
        group = f"{c.published.strategy.value}\nbatch {c.published.micro_batch_size}"
        bars.append(MaxSizeBar(group, ("published 2022",), c.published.num_parameters, PUBLISHED))
        for precision, cell in c.cells():
            size = cell.at.question.model.num_parameters if cell.at else None
            bars.append(MaxSizeBar(group, (f"predicted, {precision}",), size, note="" if size else NONE_FITS))
    printed = ", ".join(c.published.as_printed.removesuffix(" of GPU") for c in found)
    return Slide(
        "Largest model, published in 2022 and predicted: 1 x g5.48xlarge (8 x A10G)",
        CLAIM,
        (
            f"published: {found[0].published.source}, {found[0].published.date}: {SERVER}, 8 x A10G, FSDP, batch per"
            f" GPU as above, {printed} of the GPU reserved",
            "predicted, not measured: the largest that reserves no more than that, without allocation retries",
        ),
        size_bars({"": bars}, QUANTITY_TEXTS["num_parameters"].axes, ("",)),
        notes=(
            f"the published chart does not state: {', '.join(NOT_STATED)}",
            *textwrap.wrap(f"assumed here: {'; '.join(ASSUMED)}", CHARACTERS),
        ),
    )
