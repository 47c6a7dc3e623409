"""``fsdp-bench report RESULTS``: print measured results, or write a report of any answer as one HTML file."""

from pathlib import Path

import click

from fsdp_bench.cli.common.options import FILE
from fsdp_bench.cli.common.printing import print_json, read_all_but_broken
from fsdp_bench.report.measured.tables import matrix_rate_line, print_communication, print_table
from fsdp_bench.report.terminal import new_console, print_line, print_lines
from fsdp_bench.spec.calibration_profile import Profile, read_profile
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.results.flat import communication_rows, flat_row
from fsdp_bench.validate.step_time import matrix_rates


@click.command("report")
@click.argument("results", type=FILE)
@click.option(
    "--communication",
    is_flag=True,
    help="Print collectives by kind: calls, bytes, seconds, bus bandwidth; exposed communication found in two ways.",
)
@click.option(
    "--calibration",
    type=FILE,
    metavar="FILE.toml",
    help="Also print the rate of this machine's matrix products, as fsdp-bench calibrate measured it. With --html:"
    " also predict the trials' times.",
)
@click.option(
    "--html",
    type=FILE,
    metavar="FILE.html",
    help="Write one HTML file instead, which needs no network. RESULTS may then also be a file that plan, predict,"
    " dry-run or max-size printed with --json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: one row per trial, bytes and seconds.")
def command(results: Path, communication: bool, calibration: Path | None, html: Path | None, as_json: bool) -> None:
    """Print the measured RESULTS in a folder as a table: a sweep's, a machine's, or all.

    \b
    fsdp-bench report results/MACHINE/SWEEP
    fsdp-bench report results/MACHINE/SWEEP --communication
    fsdp-bench report results/MACHINE/SWEEP --html sweep.html
    fsdp-bench report plan.json --html plan.html
    """
    if communication and calibration is not None:
        raise SpecError("--calibration is about matrix products, which --communication does not show; leave one out")
    if html is not None:
        if communication or as_json:
            raise SpecError("--html is a report of everything; leave --communication and --json out")
        from fsdp_bench.report.html import write

        write(results, html, read_profile(calibration) if calibration else None)
        print_line(html)
        return
    if results.is_file():
        raise SpecError(f"{results}: is a file, not a folder of results; --html FILE.html writes a report of it")
    records = read_all_but_broken(results)
    if not communication:
        _trials(records, read_profile(calibration) if calibration else None, as_json)
    elif as_json:
        print_json({"source": "measured", "trials": communication_rows(records)})
    else:
        print_communication(records, new_console())


def _trials(records: list[TrialRecord], profile: Profile | None, as_json: bool) -> None:
    rates = [] if profile is None else matrix_rates(records, profile)
    if as_json:
        source = " and ".join(dict.fromkeys(record.source for record in records))
        document: dict[str, object] = {"source": source, "trials": [flat_row(record) for record in records]}
        if profile is not None:
            document["matrix_rates"] = [{**to_builtins(rate), "share": rate.fraction} for rate in rates]
        print_json(document)
        return
    print_table(records, new_console())
    if profile is not None:
        for rate in rates:
            print_lines(matrix_rate_line(rate, profile))
