"""``fsdp-bench max-size``: find the largest model, batch or sequence that fits, or the fewest GPUs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import click
from msgspec.structs import replace as struct_replace

from fsdp_bench.catalog.lookup import place_names
from fsdp_bench.cli.common.assumptions import AssumptionOptions, assumption_options
from fsdp_bench.cli.common.options import FILE, SETUP_LISTS, SetupCommand, SetupOptions, given_options, setup_options
from fsdp_bench.cli.common.printing import (
    PICTURES,
    AnswerTable,
    check_file,
    print_json,
    print_text,
    save_chart,
    show_progress,
    table_options,
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
from fsdp_bench.plan.table import MAX_SIZE_COLUMNS
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.report.terminal import print_line
from fsdp_bench.spec.errors import ExitCode, SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import PLANNED, TrainSetup

DEFAULTS = {"strategy": "all", "offload": "none", "checkpointing": "none,full"}

_CONTRADICTED = {
    "params": ("model", "hf_config", "recorded", "params"),
    "num_hidden_layers": (),
    "micro_batch_size": ("batch",),
    "sequence_length": ("seq",),
    "gpus": ("nodes", "gpus_per_node", "world_size"),
}
"""The quantities of ``--of``, each with the options that contradict it."""

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
    type=click.Choice(list(_CONTRADICTED)),
    help="What to look for: the largest model by parameters or layers, the largest batch, the longest sequence, or the"
    " fewest GPUs.",
)
@assumption_options(without=("kernels", "cuda"))
@click.option("--time/--no-time", default=None, help="Also predict step time (default: up to 30 configurations).")
@click.option("--chart", type=FILE, metavar="FILE.png", help="Draw bars by strategy; .svg too.")
@table_options(MAX_SIZE_COLUMNS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: bytes and counts.")
def command(
    options: SetupOptions,
    server: tuple[str, ...],
    gpu: tuple[str, ...],
    quantity: str,
    assumed: AssumptionOptions,
    time: bool | None,
    chart: Path | None,
    table: AnswerTable,
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
    fsdp-bench max-size --of bs --server p5.48xlarge -- torchrun train.py {bs}

    The last one is about your own script, in rehearsals: fsdp-bench max-size --help -- has its options.

    Exit codes: 0 something fits or that is unknown, 3 nothing fits under any setting, 2 bad input.
    """
    if chart is not None:
        check_file(chart, "chart", PICTURES)
    to_known = partial(sized, gpu_memory=assumed.gpu_memory, profile=assumed.profile)
    targets = _targets(options, server, gpu, quantity, to_known)
    if chart is not None:
        from fsdp_bench.report.charts.max_size import arrange, max_size_slide

        arrangement = arrange([(title_of(hardware, quantities[0]), quantities) for hardware, quantities in targets])
    show_progress(0, sum(len(quantities) for _, quantities in targets))
    kept = [stated_headroom(assumed.headroom, hardware) for hardware, _ in targets]
    check = FitCheck(
        build=Build(assumed.load),
        expandable_segments=assumed.expandable_segments,
        headroom_bytes=kept[0],
        profile=assumed.profile,
    )
    with_next = as_json or table.options.is_given or table.csv is not None
    found = max_sizes(targets, check, show_progress, time, with_next)
    if quantity == "gpus" and server:
        found = [_with_fewest(one, options, kept[0]) for one in found]
    cells = [cell for one in found for cell in one.cells]
    if all(cell.impossible for cell in cells):
        raise SpecError(cells[0].impossible)
    if chart is not None:
        if any(cell.fits_value is not None for cell in cells):
            save_chart(max_size_slide(found, arrangement), chart)
        else:
            print_line("no picture: there is no bar to draw", error=True)
    if table.csv is not None:
        from fsdp_bench.report.text.max_size import all_rows

        table.write(all_rows(found, table.options))
    return _print(found, table, as_json)


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


def _print(results: Sequence[HardwareResult], table: AnswerTable, as_json: bool) -> int:
    from fsdp_bench.plan.max_size import nothing_fits, nothing_fits_document
    from fsdp_bench.report.text.max_size import nothing_fits_sentence, report

    failure = None if any(one.on_fewest for one in results) else nothing_fits(results)
    if as_json:
        failed = {"nothing_fits": nothing_fits_document(failure, nothing_fits_sentence(failure)) if failure else None}
        print_json({**document_of(results), **failed})
    elif not table.is_all_output:
        print_text(report(results, failure, table.options), "red" if failure else None)
    return ExitCode.DOES_NOT_FIT if failure else ExitCode.DONE


def _targets(
    options: SetupOptions, servers: Sequence[str], gpus: Sequence[str], quantity: str, to_known: Known
) -> list[Target]:
    if servers and gpus:
        raise SpecError("--server and --gpu each name the GPU; keep one")
    if not servers and not gpus:
        raise SpecError("no GPU is named; --server NAME or --gpu NAME")
    _refuse_contradictions(options, quantity)
    names = dict.fromkeys(name.strip() for word in servers or gpus for name in word.split(","))
    named = [options.with_values({"server" if servers else "gpu": name}) for name in names]
    return [target for one in named for target in _targets_on(one, quantity, to_known)]


def _refuse_contradictions(options: SetupOptions, quantity: str) -> None:
    given = [name for name in _CONTRADICTED[quantity] if options.is_given(name)]
    adapters = [name for name in ("lora", "qlora") if options.is_given(name)]
    if quantity == "params" and adapters and not given:
        raise SpecError(
            f"--{adapters[0]}: adapters go into one model; name it with --model, and what to look for: --of"
        )
    if given and quantity == "params":
        allowed = ", ".join(list(_CONTRADICTED)[1:])
        raise SpecError(f"--{given[0].replace('_', '-')} names one model; say what to look for: --of {allowed}")
    if given:
        raise SpecError(f"--{given[0].replace('_', '-')} is what --of {quantity} looks for; leave one out")
    if quantity == "gpus" and "shard_size" in options.several:
        raise SpecError("shard-size: --of gpus looks for the number of GPUs; name one shard size")


def _targets_on(options: SetupOptions, quantity: str, to_known: Known) -> Iterator[Target]:
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
