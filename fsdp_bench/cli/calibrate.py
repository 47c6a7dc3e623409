"""``fsdp-bench calibrate``: measure this machine's rates."""

import tempfile
from contextlib import suppress
from pathlib import Path

import click

from fsdp_bench.cli.common.printing import print_json, progress_bar
from fsdp_bench.report.terminal import describe, new_console, print_lines
from fsdp_bench.spec.calibration_profile import Profile, write_profile
from fsdp_bench.spec.errors import SpecError, shown


@click.command("calibrate")
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
def command(out: Path | None, ranks: str | None, as_json: bool) -> None:
    """Measure this machine: matrix products, attention, memory, copies, optimizers, collectives; 3 minutes at most.

    Nothing else should run meanwhile. Predictions then use the file instead of datasheets.

    \b
    fsdp-bench calibrate --out mine.toml
    fsdp-bench predict --params 8B --server p5.48xlarge --calibration mine.toml
    """
    from fsdp_bench.sweep.calibration import PARTS, calibrate, rank_counts
    from fsdp_bench.sweep.machine import probe_machine
    from fsdp_bench.sweep.session import require_torch

    machine = probe_machine()
    require_torch()
    counts = _counts(ranks, len(machine.gpus)) if ranks else rank_counts(machine)
    path = out or Path(f"{machine.name}.toml")
    _check_writable(path)
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
