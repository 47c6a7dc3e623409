"""``fsdp-bench max-size``: find the largest model, batch or sequence that fits, or the fewest GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace as struct_replace

from fsdp_bench.catalog.lookup import place_names
from fsdp_bench.cli.common.options import (
    SETUP_LISTS,
    SetupCommand,
    SetupOptions,
    calibration_option,
    given_options,
    headroom_option,
    setup_options,
)
from fsdp_bench.cli.common.printing import (
    check_chart,
    check_csv,
    read_table,
    save_chart,
    show_progress,
    table_options,
    write_csv,
)
from fsdp_bench.cli.common.setups import (
    Reading,
    read_choices,
    read_code,
    read_model,
    read_models,
    read_setups,
    warn_of_sliding_window,
)
from fsdp_bench.plan.headroom import sized, stated_headroom
from fsdp_bench.plan.max_size import HardwareResult, document_of, max_sizes, title_of
from fsdp_bench.plan.search.fit import FitCheck
from fsdp_bench.plan.search.quantity import LONGEST_SEQUENCE, OF_ONE_MODEL, Quantity, gpu_counts, size_ladder
from fsdp_bench.plan.table import MAX_SIZE_COLUMNS, TableOptions
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.report.terminal import print_answer, print_line, print_lines
from fsdp_bench.spec.calibration_profile import read_profile
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import ExitCode, SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import PLANNED, TrainSetup

if TYPE_CHECKING:
    from fsdp_bench.report.charts.max_size_rows import Arrangement

DEFAULTS = {
    "strategy": "all",
    "offload": "none",
    "checkpointing": "none,full",
}

QUANTITIES = ("params", "num_hidden_layers", "micro_batch_size", "sequence_length", "gpus")
_CONTRADICTED = {
    "params": ("model", "hf_config", "recorded", "params"),
    "num_hidden_layers": (),
    "micro_batch_size": ("batch",),
    "sequence_length": ("seq",),
    "gpus": ("nodes", "gpus_per_node", "world_size"),
}
"""Options that contradict ``--of QUANTITY``, by quantity."""

_COMPILED = "; the first time, the allocator's rules are compiled for some seconds"

Target = tuple[Hardware, list[Quantity]]
"""Hardware, and one quantity to search for each setting."""
Known = Callable[[Hardware | None], Hardware]
"""A function that returns hardware with known usable GPU memory, or raises SpecError."""


@click.command(
    "max-size",
    cls=SetupCommand,
    context_settings={"token_normalize_func": lambda name: "of" if name == "dial" else name},  # its older name
)
@setup_options(lists=SETUP_LISTS, defaults=DEFAULTS, repeatable=("server", "gpu"))
@click.option(
    "--of",
    "quantity",
    default="params",
    show_default=True,
    type=click.Choice(QUANTITIES),
    help="What to look for: the largest model by parameters or layers, the largest batch, the longest sequence, or the"
    " fewest GPUs.",
)
@click.option("--gpu-memory", metavar="24GiB", help="GPU memory that a process can use, instead of the catalogue's.")
@headroom_option
@click.option(
    "--load",
    default=Build.META.value,
    show_default=True,
    type=click.Choice([build.value for build in Build]),
    help="Where parameters are initialized before sharding: on meta, on rank 0's host memory, or on every rank's.",
)
@calibration_option
@click.option("--time/--no-time", default=None, help="Also predict step time (default: up to 30 configurations).")
@click.option("--expandable-segments", is_flag=True, help="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.")
@click.option("--chart", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw bars by strategy; .svg too.")
@table_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: bytes and counts.")
def command(
    options: SetupOptions,
    server: tuple[str, ...],
    gpu: tuple[str, ...],
    quantity: str,
    gpu_memory: str | None,
    headroom: str | None,
    load: str,
    calibration: Path | None,
    time: bool | None,
    expandable_segments: bool,
    chart: Path | None,
    sort: str | None,
    only_fits: bool,
    columns: str | None,
    csv: Path | None,
    as_json: bool,
) -> int:
    """Find the largest model that fits a server, for each strategy, precision, offload and checkpointing mode.

    With --of it finds the most layers, the largest batch, the longest sequence or the fewest GPUs of a model instead.
    Every option of the hardware and the setup takes several values by comma, or all: --seq 4096,8192 --compile on,off.
    --server and --gpu may also be given several times.

    \b
    fsdp-bench max-size --server p5.48xlarge --nodes 2 --chart size.png
    fsdp-bench max-size --server p4d.24xlarge --server p5.48xlarge --offload all
    fsdp-bench max-size --gpu H100-SXM --model gpt2-xl --of micro_batch_size

    Exit codes: 0 something fits or that is unknown, 3 nothing fits under any setting, 2 bad input.
    """
    table = read_table(MAX_SIZE_COLUMNS, sort, columns, only_fits, csv, as_json)
    check_csv(csv)
    if chart is not None:
        check_chart(chart)
    profile = read_profile(calibration) if calibration else None
    targets = _targets(options, server, gpu, quantity, partial(sized, gpu_memory=gpu_memory, profile=profile))
    arrangement = None
    if chart is not None:
        from fsdp_bench.report.charts.max_size_rows import arrange

        arrangement = arrange([(title_of(hardware, quantities[0]), quantities) for hardware, quantities in targets])
    show = _show_progress if sys.stderr.isatty() else _show_nothing
    show(0, sum(len(quantities) for _, quantities in targets))
    kept = [stated_headroom(headroom, hardware) for hardware, _ in targets]
    check = FitCheck(
        build=Build(load), expandable_segments=expandable_segments, headroom_bytes=kept[0], profile=profile
    )
    found = max_sizes(targets, check, show, time)
    if quantity == "gpus" and server:
        found = [_with_fewest(one, options, kept[0]) for one in found]
    cells = [cell for one in found for cell in one.cells]
    if all(cell.impossible for cell in cells):
        raise SpecError(cells[0].impossible)
    if chart is not None and arrangement is not None:
        _draw(found, arrangement, chart)
    if csv is not None:
        from fsdp_bench.report.text.max_size import all_rows

        write_csv(csv, MAX_SIZE_COLUMNS, all_rows(found, table))
    return _print(found, table, as_json, is_silent=str(csv) == "-")


def _with_fewest(result: HardwareResult, options: SetupOptions, headroom_bytes: int | None) -> HardwareResult:
    """Return the result with the setting of a plan that fits fewer GPUs than any in the table, if there is one."""
    from fsdp_bench.plan.purchase.beyond import fewest_gpus
    from fsdp_bench.plan.purchase.goal import Goal
    from fsdp_bench.plan.purchase.searched import ServerType

    given, hardware = given_options(), result.hardware
    searched = [name for name in DEFAULTS if name not in given]
    several = {name: values for name, values in options.several.items() if name not in searched}
    fixed, open_fields = read_choices(replace(options, several=several).with_values(dict.fromkeys(searched)))
    if not hardware.has_server or options.is_given("shard_size") or not open_fields.keys() <= set(PLANNED):
        return result
    fixed.setdefault("micro_batch_size", 1)
    goal = Goal(read_model(options), fixed=fixed, open=open_fields, headroom_bytes=headroom_bytes)
    found = fewest_gpus(goal, ServerType(hardware.server, hardware.gpu, None, hardware.server.gpus_per_node))
    listed = [cell.fits_value for cell in result.answered if cell.fits_value is not None]
    if found is None or min(listed, default=inf) <= found.setup.world_size:
        return result
    return replace(result, on_fewest=found)


def _show_progress(done: int, total: int) -> None:
    """Show the progress of the search on one line of the terminal; erase the line at the end."""
    show_progress(done, total, "settings", "" if done else _COMPILED)


def _show_nothing(_done: int, _total: int) -> None:
    """Show no progress, because standard error is not a terminal."""


def _draw(results: Sequence[HardwareResult], arrangement: Arrangement, path: Path) -> None:
    from fsdp_bench.report.charts.max_size_rows import max_size_slide

    if any(cell.fits_value is not None for one in results for cell in one.cells):
        save_chart(max_size_slide(results, arrangement), path)
    else:
        print_line("no picture: there is no bar to draw", error=True)


def _print(results: Sequence[HardwareResult], table: TableOptions, as_json: bool, is_silent: bool) -> int:
    from fsdp_bench.plan.max_size import nothing_fits, nothing_fits_document
    from fsdp_bench.report.text.max_size import nothing_fits_sentence

    failure = None if any(one.on_fewest for one in results) else nothing_fits(results)
    if as_json:
        failed = {"nothing_fits": nothing_fits_document(failure, nothing_fits_sentence(failure)) if failure else None}
        sys.stdout.write(to_json({**document_of(results), **failed}).decode())
    elif not is_silent:
        from fsdp_bench.report.text.max_size import report

        first, *rest = report(results, failure, table).split("\n")
        print_answer(first, "red" if failure else None)
        print_lines("\n".join(rest))
    return ExitCode.DOES_NOT_FIT if failure else ExitCode.DONE


def _targets(
    options: SetupOptions, servers: Sequence[str], gpus: Sequence[str], quantity: str, to_known: Known
) -> list[Target]:
    """Return every named server or GPU with the quantities to search on it."""
    if servers and gpus:
        raise SpecError("--server and --gpu each name the GPU; keep one")
    if not servers and not gpus:
        raise SpecError("no GPU is named; --server NAME or --gpu NAME")
    _refuse_contradictions(options, quantity)
    named = [replace(options, server=name) for name in _names(servers)]
    named += [replace(options, gpu=name) for name in _names(gpus)]
    return [target for one in named for target in _targets_on(one, quantity, to_known)]


def _names(words: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.strip() for word in words for name in word.split(",")))


def _refuse_contradictions(options: SetupOptions, quantity: str) -> None:
    given = [name for name in _CONTRADICTED[quantity] if options.is_given(name)]
    adapters = [name for name in ("lora", "qlora") if options.is_given(name)]
    if quantity == "params" and adapters and not given:
        raise SpecError(
            f"--{adapters[0]}: adapters go into one model; name it with --model, and what to look for: --of"
        )
    if given and quantity == "params":
        allowed = ", ".join(QUANTITIES[1:])
        raise SpecError(f"--{given[0].replace('_', '-')} names one model; say what to look for: --of {allowed}")
    if given:
        raise SpecError(f"--{given[0].replace('_', '-')} is what --of {quantity} looks for; leave one out")
    if quantity == "gpus" and "shard_size" in options.several:
        raise SpecError("shard-size: --of gpus looks for the number of GPUs; name one shard size")


def _targets_on(options: SetupOptions, quantity: str, to_known: Known) -> Iterator[Target]:
    """Yield a target for each number of nodes or GPUs of one server or GPU."""
    if quantity == "gpus":  # the search has its own counts; these only let hybrid strategies be read
        shard = options.value("shard_size")
        counts = {"world_size": 2 * (shard or 2)} if options.gpu is not None else {"nodes": shard}
        options = replace(options, **counts)
    if quantity == "sequence_length":
        options = options.with_values({"seq": 1})
    readings: dict[tuple[object, ...], list[Reading]] = {}
    for reading in _searched(options):
        readings.setdefault((place_names(reading.hardware), reading.setup.world_size), []).append(reading)
    for alike in readings.values():
        known = to_known(alike[0].hardware)
        yield known, _quantities(alike, quantity, known)


def _searched(options: SetupOptions) -> list[Reading]:
    """Read every combination of the options. Where the user states no strategy, one GPU that has no FSDP has one."""
    readings = read_setups(options)
    if "strategy" in given_options() or all(reading.setup.world_size > 1 for reading in readings):
        return readings
    several = {name: values for name, values in options.several.items() if name != "strategy"}
    open_options = replace(options, several=several).with_values({"strategy": None})
    bare = [one.setup for one in read_setups(open_options) if one.setup.is_bare]
    return [one for one in readings if not bare or one.setup.world_size > 1 or one.setup in bare]


def _quantities(readings: Sequence[Reading], quantity: str, hardware: Hardware) -> list[Quantity]:
    """Return what to search under each setting on one kind of hardware."""
    setups = [reading.setup for reading in readings]
    options = readings[0].options
    if quantity == "params":
        family = Family(options.family or Family.LLAMA)
        return [size_ladder(family, setup, hardware, code=read_code(options)) for setup in setups]
    longest = LONGEST_SEQUENCE if quantity == "sequence_length" else max(setup.sequence_length for setup in setups)
    warn_of_sliding_window(options, longest)
    pairs = zip(read_models(readings), setups, strict=True)
    if quantity == "gpus":
        return [gpu_counts(model, _in_nodes(setup, hardware), hardware) for model, setup in pairs]
    return [OF_ONE_MODEL[quantity](model, setup, hardware) for model, setup in pairs]


def _in_nodes(setup: TrainSetup, hardware: Hardware) -> TrainSetup:
    """Return a hybrid setup whose shard group is the GPUs of one node, the default on several nodes."""
    each = hardware.server.gpus_per_node
    if not setup.strategy.is_hybrid or setup.shard_size is not None or each == 1:
        return setup
    return struct_replace(setup, world_size=2 * each, shard_size=each)
