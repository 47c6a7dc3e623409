"""Dry runs as text: live bytes of PyTorch's own code, and whether the setup fits."""

from collections.abc import Sequence

from fsdp_bench.plan.dry_run import DryRun
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.setup_text import title, varying
from fsdp_bench.plan.table import answer_row
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.prediction import verdict
from fsdp_bench.report.text.prediction_table import RANK, answer_column, label_columns
from fsdp_bench.spec.units import format_count, format_gib, format_seconds


def verdict_line(run: DryRun) -> str:
    """Return whether a setup fits, with numbers and their sources, in one line."""
    usable = run.gpu.usable_memory_bytes if run.gpu else None
    if run.spec.kernels != "cuda":
        return "unknown whether it fits: kernels of a CPU; --kernels cuda for a GPU"
    if run.gpu is None:
        return "unknown whether it fits: no GPU is named; --server NAME or --gpu NAME"
    if usable is None:
        return f"unknown whether it fits: nobody documents how much of a {run.gpu.name} a process can use; --gpu-memory"
    live = format_gib(run.result.peak_allocated_bytes)
    available = f"{format_gib(usable)} usable less {format_gib(run.question.required_headroom.num_bytes)} kept free"
    if run.exceeds:
        return f"does not fit (dry run): live bytes alone peak at {live} of {available}"
    if run.prediction is not None:
        return verdict(run.prediction)
    return (
        f"unknown whether it fits (dry run): live bytes peak at {live} of {available}; what the caching allocator"
        " reserves beyond them is predicted for the benchmark models alone"
    )


def report(run: DryRun) -> str:
    """Return one dry run as about twenty lines; the first line is the answer."""
    setup, result = run.spec.setup, run.result
    phases = [[phase, format_gib(size)] for phase, size in result.phases.items()]
    parts = sorted(result.breakdown_bytes.items(), key=lambda item: -item[1])
    parts_held = [[kind.replace("_", " "), format_gib(size)] for kind, size in parts if size]
    reserved = run.prediction.reserved_bytes if run.prediction else None
    lines = [
        verdict_line(run),
        "",
        f"{run.spec.name}, {format_count(result.num_parameters)} parameters",
        f"{setup.api.value} {setup.effective_strategy.value}, {setup.precision}, rank 0 of {setup.world_size}; dry run "
        f"with torch {result.torch}, {result.kernels} kernels, in {format_seconds(result.seconds)}",
        f"peak allocated  {format_gib(result.peak_allocated_bytes)}, in {result.peak_phase}",
        *([f"peak reserved   {format_gib(reserved)} (predicted, not of the dry run)"] if reserved is not None else []),
        f"between steps   {format_gib(result.resident.total_bytes)}",
        "",
        *table_lines(table_columns(["phase", "peak"], phases, {"peak"})),
        "",
        *table_lines(table_columns(["at the peak", "size"], parts_held, {"size"})),
        "",
        "Not in live bytes: workspaces inside kernels, the caching allocator, the CUDA context, NCCL's buffers.",
    ]
    return "\n".join(lines)


def side_by_side(runs: Sequence[DryRun]) -> str:
    """Return the conclusion and one row per setup; setups that fit come first, then those with the lowest peak."""
    differing = varying([run.question.values for run in runs]) or ["strategy"]
    ordered = sorted(runs, key=lambda run: (RANK[run.verdict], run.result.peak_allocated_bytes))
    rows = [answer_row(run.document()) for run in ordered]
    first, world_sizes = runs[0], {run.spec.setup.world_size for run in runs}
    shown = ("peak_allocated_bytes", "peak_phase", "peak_reserved_bytes", "fits")
    columns = [answer_column(name, rows) for name in shown]
    return "\n".join([
        _conclusion(ordered, differing),
        "",
        f"{first.spec.name}, {format_count(first.result.num_parameters)} parameters",
        f"dry runs with torch {first.result.torch}, {first.result.kernels} kernels, rank 0"
        + ("" if len(world_sizes) > 1 else f" of {first.spec.setup.world_size}")
        + "; peak reserved is predicted",
        "",
        *table_lines([*label_columns([run.question for run in ordered], differing, 40), *columns]),
    ])  # fmt: skip


def _conclusion(runs: Sequence[DryRun], differing: Sequence[str]) -> str:
    best, name = runs[0], title(runs[0].question.values, differing)
    peak = f"{format_gib(best.result.peak_allocated_bytes)} allocated (dry run)"
    fitting = sum(run.verdict is Verdict.FITS for run in runs)
    if fitting and best.prediction:
        of = f"of the {fitting} that fit" if fitting > 1 else "the only one that fits"
        reserved = format_gib(best.prediction.needed_bytes)
        return f"{of}, {name} has the lowest peak: {peak}, {reserved} reserved (predicted)"
    if all(run.fits is False for run in runs):
        return f"none of {len(runs)} fits; {name} is nearest: {peak}"
    return f"whether any fits is unknown; {name} has the lowest peak of {len(runs)}: {peak}"
