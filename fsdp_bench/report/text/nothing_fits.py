"""Nothing fits: how far off the nearest setting is, and what would help, each with numbers that were predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_bench.plan.max_size import HardwareResult, SettingResult
from fsdp_bench.plan.question import Prediction
from fsdp_bench.plan.remedies import GAIN, Remedy, remedies, with_twice_the_gpus
from fsdp_bench.report.text.max_size_words import value_text, words_of
from fsdp_bench.report.text.prediction import remedy_line, title, varying_fields
from fsdp_bench.report.text.verdict import dominant
from fsdp_bench.spec.hardware import Cluster
from fsdp_bench.spec.units import format_gib


@dataclass(frozen=True)
class NothingFits:
    """The setting that is nearest to fitting, and what was tried to mend it."""

    cell: SettingResult
    prediction: Prediction
    """Of the dial's first step."""
    remedies: tuple[Remedy, ...]
    twice_the_gpus: Remedy | None

    @property
    def gpus_help(self) -> bool:
        """Whether twice the GPUs need noticeably less of each."""
        if self.twice_the_gpus is None:
            return False
        now, then = _needed(self.prediction), _needed(self.twice_the_gpus.prediction)
        return then <= (1 - GAIN) * now


def nothing_fits(sizes: Sequence[HardwareResult]) -> NothingFits | None:
    """Return the setting that needs the least beyond what there is; None where anything fits or is unknown."""
    if not sizes or not all(one.nothing_fits for one in sizes):
        return None
    cells = [cell for one in sizes for cell in one.answered if cell.beyond is not None]
    cell = min(cells, key=_shortage)
    prediction = cell.beyond
    assert prediction is not None
    is_turned_down = cell.quantity.name == "world_size"
    more = None if is_turned_down or _on_host(cell) else with_twice_the_gpus(prediction)
    return NothingFits(cell, prediction, tuple(remedies(prediction)), more)


def nothing_fits_lines(found: NothingFits, several: bool) -> list[str]:
    """Return the answer on one line, and a line for each thing that would help, or would not."""
    lines = [_sentence(found) + (f" ({_where(found)})" if several else "")]
    if found.cell.runs is not None:
        runs = value_text(found.cell.quantity.name, found.cell.runs)
        what = found.cell.quantity.name.replace("_", " ")
        lines.append(f"  with allocation retries, which cost throughput, {what} {runs} would run (predicted)")
    lines += [f"  {remedy_line(remedy)}" for remedy in found.remedies]
    if found.twice_the_gpus is not None and not found.gpus_help:
        need = format_gib(_needed(found.twice_the_gpus.prediction))
        lines.append(
            f"  more GPUs do not help: {found.twice_the_gpus.switch} still needs {need} (predicted);"
            " activations and logits are not sharded"
        )
    elif not found.remedies:
        tried = "--api, --optimizer, --loss, --strategy, --checkpointing, --batch, --offload, more GPUs"
        lines.append(f"  nothing that was tried helps: {tried}")
    return lines


def nothing_fits_document(found: NothingFits) -> dict[str, Any]:
    """Return the JSON form."""
    estimate, setup = found.prediction.estimate, found.prediction.question.setup
    tried = [*found.remedies, *([found.twice_the_gpus] if found.twice_the_gpus else [])]
    return {
        "model": found.prediction.question.model.name,
        "strategy": setup.strategy.value,
        "needed_bytes": found.prediction.needed_bytes,
        "gpu_memory_bytes": estimate.gpu_bytes,
        "phase": estimate.memory.peak_phase,
        "category": dominant(found.prediction),
        "message": _sentence(found),
        "remedies": [
            {"switch": r.switch, "fits": r.prediction.fits, "needed_bytes": r.prediction.needed_bytes} for r in tried
        ],
    }


def _sentence(found: NothingFits) -> str:
    """Return what the smallest needs, of how much, in which phase, and what most of it is."""
    prediction = found.prediction
    words, model = words_of(found.cell), prediction.question.model.name
    smallest = words.smallest.format(model=model, value=f"{found.cell.quantity.values[0]:,}")
    estimate = prediction.estimate
    if _on_host(found.cell):
        need, has = format_gib(estimate.host.peak_bytes), format_gib(estimate.host_bytes or 0)
        return f"nothing fits: {smallest} needs {need} of {has} of host memory on a node (predicted)"
    need, has = format_gib(_needed(prediction)), format_gib(estimate.gpu_bytes or 0)
    phase = estimate.memory.peak_phase
    mostly = dominant(prediction).replace("_", " ")
    return f"nothing fits: {smallest} needs {need} of {has} in phase {phase}, mostly {mostly} (predicted)"


def _where(found: NothingFits) -> str:
    question = found.prediction.question
    hardware = question.hardware
    name = hardware.server.name if isinstance(hardware, Cluster) else hardware.name if hardware else ""
    return f"nearest: {name}, " + title(question, [*varying_fields([question]), "checkpointing"])


def _on_host(cell: SettingResult) -> bool:
    return cell.limit is not None and cell.limit.place == "host"


def _needed(prediction: Prediction) -> int:
    return prediction.needed_bytes


def _shortage(cell: SettingResult) -> float:
    """Return how many times what there is is needed."""
    assert cell.beyond is not None
    estimate = cell.beyond.estimate
    if _on_host(cell):
        return estimate.host.peak_bytes / (estimate.host_bytes or 1)
    return cell.beyond.needed_bytes / (estimate.gpu_bytes or 1)
