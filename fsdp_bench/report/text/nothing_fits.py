"""The text if nothing fits: the memory that the nearest setting needs, and changes that would help."""

from __future__ import annotations

from fsdp_bench.plan.advice.nothing_fits import NothingFits, lacks_host_memory
from fsdp_bench.plan.advice.remedies import smaller_bases
from fsdp_bench.report.text.common import assumed_lines
from fsdp_bench.report.text.prediction import remedy_line
from fsdp_bench.report.text.quantity_text import quantity_text, value_text
from fsdp_bench.report.text.setups import title, varying_fields
from fsdp_bench.spec.units import format_gib


def nothing_fits_lines(found: NothingFits, several: bool) -> list[str]:
    """Return the answer as one line, then one line for each change that would help or would not."""
    lines = [nothing_fits_sentence(found) + (f" ({_where(found)})" if several else "")]
    lines += assumed_lines(found.cell.shown.assumptions)
    if found.cell.runs is not None:
        runs = value_text(found.cell.quantity.name, found.cell.runs)
        what = found.cell.quantity.name.replace("_", " ")
        lines.append(f"  with allocation retries, slower if they go on, {what} {runs} would run (predicted)")
    lines += [f"  {remedy_line(remedy)}" for remedy in found.remedies]
    lines += [f"  {words}" for words in smaller_bases(found.prediction)]
    if found.twice_the_gpus is not None and not found.gpus_help:
        need = format_gib(found.twice_the_gpus.prediction.needed_bytes)
        lines.append(
            f"  more GPUs do not help: {found.twice_the_gpus.switch} still needs {need} (predicted);"
            " activations and logits are not sharded"
        )
    elif not found.remedies:
        tried = "--api, --optimizer, --loss, --strategy, --checkpointing, --batch, --offload, more GPUs"
        lines.append(f"  nothing that was tried helps: {tried}")
    return lines


def nothing_fits_sentence(found: NothingFits) -> str:
    """Return the memory that the smallest candidate needs, the memory available, the phase and the largest category."""
    prediction = found.prediction
    text, model = quantity_text(found.cell), prediction.question.model.name
    smallest = text.smallest.format(model=model, value=f"{found.cell.quantity.values[0]:,}")
    estimate = prediction.estimate
    if lacks_host_memory(found.cell):
        need, has = format_gib(estimate.host.peak_bytes), format_gib(estimate.host_memory_bytes or 0)
        return f"nothing fits: {smallest} needs {need} of {has} of host memory on a node (predicted)"
    need, has = format_gib(prediction.needed_bytes), format_gib(estimate.gpu_bytes or 0)
    phase = estimate.memory.peak_phase
    mostly = prediction.largest_category.replace("_", " ")
    return f"nothing fits: {smallest} needs {need} of {has} in phase {phase}, mostly {mostly} (predicted)"


def _where(found: NothingFits) -> str:
    question = found.prediction.question
    name = question.hardware.name if question.hardware else ""
    return f"nearest: {name}, " + title(question, [*varying_fields([question]), "checkpointing"])
