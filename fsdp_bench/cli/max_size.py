"""``fsdp-bench max-size``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace as struct_replace

from fsdp_bench.cli.common.hardware import sized, stated_headroom
from fsdp_bench.cli.common.options import (
    SetupCommand,
    SetupWords,
    calibration_option,
    given_options,
    headroom_option,
    setup_options,
)
from fsdp_bench.cli.common.pictures import check_picture, save_picture
from fsdp_bench.cli.common.setups import read_model, read_setups, warn_of_sliding_window
from fsdp_bench.cli.predict import LISTS
from fsdp_bench.plan.max_size import Assumptions, HardwareResult, document_of, max_sizes
from fsdp_bench.plan.search.quantity import LONGEST_SEQUENCE, OF_ONE_MODEL, Quantity, gpu_counts, size_ladder
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.report.terminal import print_answer, print_line, print_lines
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.profile import read_profile
from fsdp_bench.spec.setup import TrainSetup

if TYPE_CHECKING:
    from fsdp_bench.report.charts.max_size_bars import Arrangement

DEFAULTS = {
    "strategy": "all",
    "offload": "none",
    "checkpointing": "none,full",
    "api": "fsdp1",
}

DIALS = ("params", "num_hidden_layers", "micro_batch_size", "sequence_length", "gpus")
_TURNED = {
    "params": ("model", "hf_config", "params"),
    "num_hidden_layers": (),
    "micro_batch_size": ("batch",),
    "sequence_length": ("seq",),
    "gpus": ("nodes", "gpus_per_node", "world_size"),
}
"""Options that a dial turns, so that giving them contradicts it."""

WIDTH = 90
"""Of the line that says how far it is."""

Place = tuple[Cluster | Gpu, list[Quantity]]
Known = Callable[[Cluster | Gpu | None], Cluster | Gpu]
"""Makes hardware of hardware whose card's usable memory is known, or refuses it."""


@click.command("max-size", cls=SetupCommand)
@setup_options(lists=LISTS, defaults=DEFAULTS, repeatable=("server", "gpu"))
@click.option(
    "--dial", default="params", show_default=True, type=click.Choice(DIALS), help="What is turned up, or GPUs down."
)
@click.option("--gpu-memory", metavar="24GiB", help="What a process can use of the card, instead of the catalogue's.")
@headroom_option
@click.option(
    "--load",
    default=Build.META.value,
    show_default=True,
    type=click.Choice([build.value for build in Build]),
    help="Who builds the model in host memory before it is sharded.",
)
@calibration_option
@click.option("--time/--no-time", default=None, help="Predict the time of what fits; by default up to 30 settings.")
@click.option("--expandable-segments", is_flag=True, help="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.")
@click.option("--published", is_flag=True, help="The one published chart of this kind (2022) beside predictions.")
@click.option("--chart", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw grouped bars; .svg too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: bytes and counts.")
def command(
    words: SetupWords,
    server: tuple[str, ...],
    gpu: tuple[str, ...],
    dial: str,
    gpu_memory: str | None,
    headroom: str | None,
    load: str,
    calibration: Path | None,
    time: bool | None,
    expandable_segments: bool,
    published: bool,
    chart: Path | None,
    as_json: bool,
) -> int:
    """Find the largest model that fits a server, for each strategy, precision, offload and checkpointing mode.

    With --dial it finds the deepest model, the largest batch, the longest sequence or the fewest GPUs instead.
    --server and --gpu may be given several times.

    \b
    Exit codes: 0 something fits or that is unknown, 3 nothing fits under any setting, 2 bad input.
    """
    if chart is not None:
        check_picture(chart)
    if published:
        return _published(chart, as_json)
    profile = read_profile(calibration) if calibration else None
    places = _places(words, server, gpu, dial, partial(sized, gpu_memory=gpu_memory, profile=profile))
    arrangement = None
    if chart is not None:
        from fsdp_bench.report.charts.max_size_bars import arrange

        arrangement = arrange([(_name(hardware), dials) for hardware, dials in places])
    tell = _tell if sys.stderr.isatty() else _silent
    tell(0, sum(len(dials) for _, dials in places))
    kept = [stated_headroom(headroom, hardware) for hardware, _ in places]
    sizes = max_sizes(places, Assumptions(Build(load), expandable_segments, profile, time, kept[0]), tell)
    cells = [cell for one in sizes for cell in one.cells]
    if all(cell.impossible for cell in cells):
        raise SpecError(cells[0].impossible)
    if chart is not None and arrangement is not None:
        _draw(sizes, arrangement, chart)
    return _print(sizes, as_json)


def _tell(done: int, total: int) -> None:
    """Say on the terminal how far it is; the line is taken away at the end."""
    said = f"{done} of {total} settings"
    if not done:
        said += "; the first time, the allocator's rules are compiled for some seconds"
    click.echo(f"\r{said:<{WIDTH}}" if done < total else f"\r{'':<{WIDTH}}\r", nl=False, err=True)


def _silent(_done: int, _total: int) -> None:
    """Say nothing where standard error is no terminal."""


def _draw(sizes: Sequence[HardwareResult], arrangement: Arrangement, chart: Path) -> None:
    from fsdp_bench.report.charts.max_size import draw
    from fsdp_bench.report.charts.max_size_bars import picture

    if any(cell.fits is not None for one in sizes for cell in one.cells):
        save_picture(lambda path: draw(picture(sizes, arrangement), path), chart)
    else:
        print_line("no picture: there is no bar to draw", error=True)


def _print(sizes: Sequence[HardwareResult], as_json: bool) -> int:
    from fsdp_bench.report.text.nothing_fits import nothing_fits, nothing_fits_document

    failure = nothing_fits(sizes)
    if as_json:
        failed = {"nothing_fits": nothing_fits_document(failure) if failure else None}
        sys.stdout.write(to_json({**document_of(sizes), **failed}).decode())
    else:
        from fsdp_bench.report.text.max_size import report

        first, *rest = report(sizes, failure).split("\n")
        print_answer(first, "red" if failure else None)
        print_lines("\n".join(rest))
    return 3 if failure else 0


def _places(words: SetupWords, servers: Sequence[str], gpus: Sequence[str], dial: str, known: Known) -> list[Place]:
    """Return the dials of every server or GPU that is named."""
    if servers and gpus:
        raise SpecError("--server and --gpu each name the GPU; keep one")
    if not servers and not gpus:
        raise SpecError("no GPU is named; --server NAME or --gpu NAME")
    _check_dial(words, dial)
    named = [replace(words, server=name) for name in dict.fromkeys(servers)]
    named += [replace(words, gpu=name) for name in dict.fromkeys(gpus)]
    return [_place(one, dial, known) for one in named]


def _check_dial(words: SetupWords, dial: str) -> None:
    given = [name for name in _TURNED[dial] if getattr(words, name) is not None]
    if given and dial == "params":
        allowed = ", ".join(DIALS[1:])
        raise SpecError(f"--{given[0].replace('_', '-')} names one model; say what to turn: --dial {allowed}")
    if given:
        raise SpecError(f"--{given[0].replace('_', '-')} is what --dial {dial} turns; leave one out")


def _place(words: SetupWords, dial: str, to_known: Known) -> Place:
    if dial == "gpus":  # the dial has its own counts; these only let hybrid strategies be read
        shard = words.shard_size or 2
        counts = {"world_size": 2 * shard} if words.gpu is not None else {"nodes": words.shard_size}
        words = replace(words, **counts)
    setups, hardware = read_setups(words)
    known = to_known(hardware)
    if dial == "params":
        family = Family(words.family or Family.LLAMA)
        return known, [size_ladder(family, setup, known) for setup in setups]
    is_sequence = dial == "sequence_length"
    model = read_model(replace(words, seq=1) if is_sequence else words)
    warn_of_sliding_window(words, LONGEST_SEQUENCE if is_sequence else setups[0].sequence_length)
    return known, [_dial(dial, model, setup, known) for setup in setups]


def _dial(name: str, model: ModelShape, setup: TrainSetup, hardware: Cluster | Gpu) -> Quantity:
    if name == "gpus":
        return gpu_counts(model, _in_nodes(setup, hardware), hardware)
    return OF_ONE_MODEL[name](model, setup, hardware)


def _in_nodes(setup: TrainSetup, hardware: Cluster | Gpu) -> TrainSetup:
    """Return a hybrid setup with the GPUs of a node as its shard group, as it has on several nodes."""
    each = hardware.server.gpus_per_node if isinstance(hardware, Cluster) else 1
    if not setup.strategy.is_hybrid or setup.shard_size is not None or each == 1:
        return setup
    return struct_replace(setup, world_size=2 * each, shard_size=each)


def _name(hardware: Cluster | Gpu) -> str:
    return hardware.server.name if isinstance(hardware, Cluster) else hardware.name


def _published(chart: Path | None, as_json: bool) -> int:
    own = ("published", "chart", "as_json")
    given = [name for name in given_options() if name not in own]
    if given:
        raise SpecError(f"--{given[0].replace('_', '-')}: --published has its own settings; leave one out")
    from fsdp_bench.report.validation.published_sizes import published_text
    from fsdp_bench.validate.published.sizes import compare_published_sizes, published_document

    found = compare_published_sizes()
    if chart is not None:
        from fsdp_bench.report.charts.max_size import draw
        from fsdp_bench.report.charts.published_sizes import published_picture

        save_picture(lambda path: draw(published_picture(found), path), chart)
    if as_json:
        sys.stdout.write(to_json(published_document(found)).decode())
    else:
        print_lines(published_text(found))
    return 0
