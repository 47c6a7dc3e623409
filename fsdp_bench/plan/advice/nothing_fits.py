"""If no setting fits: how much memory the nearest setting lacks, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_bench.plan.advice.remedies import GAIN, Remedy, remedies, with_twice_the_gpus
from fsdp_bench.plan.max_size import HardwareResult
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.search.search import SearchResult


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
    """Return required memory / available memory."""
    assert cell.beyond is not None
    beyond = cell.beyond
    if lacks_host_memory(cell):
        return beyond.host.peak_bytes / (beyond.host_memory_bytes or 1)
    return beyond.needed_bytes / (beyond.gpu_bytes or 1)
