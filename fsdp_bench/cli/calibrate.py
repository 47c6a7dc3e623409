"""``fsdp-bench calibrate``: measure this machine's rates or its host's time, or scale a datasheet's by a run."""

import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from fsdp_bench.cli.common.assumptions import AssumptionOptions, assumption_options, read_questions
from fsdp_bench.cli.common.lists import Values
from fsdp_bench.cli.common.options import FILES, SetupCommand, SetupOptions, given_options, setup_options
from fsdp_bench.cli.common.printing import print_json, progress_bar
from fsdp_bench.plan.measured_run import MeasuredRun, read_run
from fsdp_bench.plan.scaling import scale_rates
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.terminal import describe, new_console, print_lines
from fsdp_bench.report.text.speed import range_text, step_text
from fsdp_bench.spec.calibration_profile import Profile, write_profile
from fsdp_bench.spec.errors import SpecError, nearest, shown
from fsdp_bench.spec.setup import OPTIONS

_OF_A_RUN = ("from_", "column", "total")
_OF_A_MACHINE = ("ranks", "host")


@click.command("calibrate", cls=SetupCommand)
@setup_options()
@click.option(
    "--from",
    "from_",
    metavar="RUN",
    help="Scale the datasheet's rates by a run of yours, whose setup the other options say: 5,762tok/s (of each GPU),"
    " 0.71s a step, a log, trainer_state.json, a CSV file, a torch.profiler trace, or a TOML file with both.",
)
@click.option("--column", metavar="NAME", help="With --from FILE.csv: the column; NAME=tok/s, =s or =ms says its unit.")
@click.option("--total", is_flag=True, help="With --from: tokens/s are those of all GPUs together.")
@click.option("--host", is_flag=True, help="Only what this host takes for each operator and hook; needs no GPU.")
@assumption_options(without=("kernels", "load", "gpu_memory", "headroom", "calibration", "expandable_segments"))
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.toml",
    help="Where the calibration goes; by default MACHINE.toml in this folder.",
)
@click.option(
    "--ranks", metavar="N,M", help="Numbers of ranks that measure at once; by default every GPU, or 2 and 4 on a CPU."
)
@click.option("--json", "as_json", is_flag=True, help="Print the calibration as one JSON document, too.")
def command(
    options: SetupOptions,
    assumed: AssumptionOptions,
    from_: str | None,
    column: str | None,
    total: bool,
    host: bool,
    out: Path | None,
    ranks: str | None,
    as_json: bool,
) -> None:
    """Measure this machine: matrix products, attention, memory, copies, optimizers, collectives; 3 minutes at most.

    Or, with --from, let a run of yours change a datasheet's rates; with --host, measure the host without a GPU.

    Nothing else should run meanwhile. Predictions then use the file instead of datasheets.

    \b
    fsdp-bench calibrate --out mine.toml
    fsdp-bench predict --params 8B --server p5.48xlarge --calibration mine.toml
    fsdp-bench calibrate --from 5,762tok/s --params 8B --server p5.48xlarge
    """
    given = [name for name in given_options() if name not in ("out", "as_json")]
    if from_ is not None:
        _refuse(given, _OF_A_MACHINE, "--from is of a run that was measured")
        _from_run(read_run(from_, column, total), options, assumed, out or Path("run.toml"), as_json)
        return
    _refuse(given, [name for name in given if name not in _OF_A_MACHINE], "it belongs to --from RUN")
    _refuse(given, ("ranks",) if host else (), "--host measures one process")
    from fsdp_bench.sweep.calibration import PARTS, calibrate, calibrate_host, rank_counts
    from fsdp_bench.sweep.machine import probe_machine
    from fsdp_bench.sweep.session import require_torch

    machine = probe_machine()
    require_torch()
    counts = _counts(ranks, len(machine.gpus)) if ranks else rank_counts(machine)
    path = out or Path("host.toml" if host else f"{machine.name}.toml")
    _check_writable(path)
    if host:
        write_profile(found := calibrate_host(machine, lambda ranks, part: None), path)
        hooks = ", ".join(f"{took * 1e6:.0f} us a hook of {api}" for api, took in found.hook_seconds.items())
        print_json(found) if as_json else print_lines(f"{path}: {found.source}; {hooks}")
        return
    with progress_bar(new_console(error=True)) as bar:
        task = bar.add_task("", total=len(counts) * PARTS)

        def say(ranks: int, part: str) -> None:
            bar.advance(task)
            describe(bar, task, f"{ranks} ranks: {part}")

        profile = calibrate(machine, counts, say)
    write_profile(profile, path)
    if as_json:
        print_json(profile)
    else:
        print_lines(_summary(profile, path))


def _refuse(given: Sequence[str], names: Collection[str], why: str) -> None:
    for name in given:
        if name in names:
            raise SpecError(f"--{name.strip('_').replace('_', '-')}: {why}; leave one out")


def _from_run(
    measured: MeasuredRun, options: SetupOptions, assumed: AssumptionOptions, path: Path, as_json: bool
) -> None:
    """Scale the datasheet's rates by a run, write them, and print what changed."""
    _check_writable(path)
    asked = read_questions(_with_file(options, measured.options), assumed)
    found = scale_rates(asked[0], measured)
    write_profile(found.scaling, path)
    headers, steps = ("work in a step", "datasheet", "scaled", "factor"), (found.before, found.after)
    before, after = (one.time.step_seconds or 0.0 for one in steps)
    if as_json:
        changes = [
            dict(zip(("class", "before_seconds", "after_seconds", "factor"), one, strict=True)) for one in found.changes
        ]
        seconds = {"measured": found.measured_step_seconds, "before": before, "after": after}
        return print_json({"calibration": found.scaling, "step_seconds": seconds, "changes": changes})
    took, *predicted = map(step_text, (found.measured_step_seconds, before, after))
    rows = [(name.replace("_", " "), *map(step_text, both), f"{factor:.3f}") for name, *both, factor in found.changes]
    lines = [
        f"{path}: rates of {found.scaling.gpu}, scaled by {found.scaling.source}",
        f"a step took {took}; predicted {predicted[0]}, now {predicted[1]}",
        *table_lines(table_columns(headers, rows, headers[1:]), indent=2),
        *found.notes,
        f"range by the datasheet: {range_text(found.before.range, before)}",
        f"range now, of a step like it: {range_text(found.after.range, after)}",
    ]
    return print_lines("\n".join(lines))


def _with_file(options: SetupOptions, stated: Mapping[str, Any]) -> SetupOptions:
    """Return the options with a file's, which the command line overrides. Raises SpecError for an unknown one."""
    known = [one.name for one in fields(SetupOptions) if one.name not in ("step", "several")] + list(OPTIONS)
    values = {}
    for name, value in stated.items():
        if name not in known:
            raise SpecError(f"from: {shown(name)} is no option of the setup{nearest(name, known)}")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        values[name] = Path(text) if name in FILES else Values(name).convert(text, None, None)
        if isinstance(values[name], tuple):
            raise SpecError(f"from: {name}: {shown(text)} is several values; a run has one")
    return options.with_values({name: value for name, value in values.items() if not options.is_given(name)})


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SpecError(f"out: {path} cannot be written: {error.strerror}; name a file in a folder of yours") from None


def _counts(text: str, num_gpus: int) -> tuple[int, ...]:
    most = num_gpus or 64
    with suppress(ValueError):
        counts = tuple(map(int, text.split(",")))
        if all(1 <= count <= most for count in counts):
            return counts
    raise SpecError(f"ranks: {shown(text)} is not allowed; numbers from 1 to {most} with commas between them")


def _summary(profile: Profile, path: Path) -> str:
    lines = [f"{path}: {profile.machine}, torch {profile.versions['torch']}"]
    for one in profile.ranks:
        ranks = "rank" if one.num_ranks == 1 else "ranks"
        best = max((2e-12 * m.m * m.n * m.k / m.seconds, m.dtype) for m in one.matmul)
        moved = max(op.num_bytes / op.seconds for op in one.operator if op.operator == "aten::copy_") / 1e9
        bus = max(
            (c.message_bytes * (c.group_size - 1) / c.group_size / c.seconds / 1e9 for c in one.collective),
            default=None,
        )
        lines.append(
            f"{one.num_ranks} {ranks}: {best[0]:.2f} TFLOP/s in {best[1]}, {moved:.1f} GB/s copied,"
            f" {'no collectives' if bus is None else f'{bus:.2f} GB/s bus bandwidth'},"
            f" {one.launch_seconds * 1e6:.0f} us an operator"
        )
        lines += [f"  lost in the noise, and 0 in the file: {name}; measure again" for name in one.lost_in_noise]
    return "\n".join(lines)
