"""The errors of predicted speed and memory, which plans print beside them (catalog/prediction_errors.json)."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import permutations
from math import inf, sqrt
from pathlib import Path
from statistics import mean, median, pvariance, variance

import msgspec

from fsdp_bench.plan.ranges import Errors, HeldOut, Nodes, OwnRunKind, PredictionErrors, ScriptErrors, SpeedErrors
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.spec.codec import to_builtins
from tools.validate.published.peaks import compare_published, left_out, taken
from tools.validate.published.speed import SpeedRow, SpeedSummary, compare_speed, kind_of

CENTRAL = 0.95
"""Fraction of the errors that the range with a run of one's own holds."""
EXPECTED = 0.9
"""Fraction of the runs of a further publisher that the range of speed is made for."""
STUDENTS_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""What 95 % of Student's distribution are below, with 1, 2, .. degrees of freedom; 90 % are between it and minus it
(NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2)."""


def errors_of_predictions() -> PredictionErrors:
    """Return the errors of all published runs: of speed the central ones, of memory the extremes by kind."""
    peaks = (("compiled" if row.compiled else "eager", row.family, row.error) for row in compare_published())
    rows = compare_speed()[0]
    return PredictionErrors(
        speed=speed_errors(rows), memory=_errors(peaks), scripts=script_errors(), own_run=own_run_errors(rows)
    )


MEASURED_SCRIPTS = [Path(__file__).parents[3] / "results" / one / "scripts" for one in ("nvidia-h100", "nvidia-h200")]
FIRST_STEADY_STEP = 3
"""Steps before it are left out, as in compare.py beside the records."""


def script_errors(folders: Sequence[Path] = MEASURED_SCRIPTS) -> ScriptErrors:
    """Return the extremes of the errors of rehearsed scripts: of speed, and of the peak of reserved memory."""
    speeds, peaks, gpus = [], [], []
    for folder in folders:
        measured = json.loads((folder / "measured.json").read_text())
        gpu = measured["gpu"].removeprefix("NVIDIA ").split()[0]
        gpus.append(gpu)
        for run in measured["scripts"]:
            rehearsed = json.loads((folder / "records" / f"{run['name']}.json").read_text())
            time, steps, name = rehearsed["time"], run["steps"], f"{run['name']} on {gpu}"
            if time["cpu_optimizer_seconds"]:
                continue
            if time["step_seconds"] is not None:
                seconds = median(step["seconds"] for step in steps[FIRST_STEADY_STEP:])
                speeds.append((name, seconds / time["step_seconds"] - 1))
            reserved = max(step["peak_reserved"] for step in steps)
            peaks.append((name, rehearsed["memory"]["peak_reserved_bytes"] / reserved - 1))
    return ScriptErrors(speed=_extremes(speeds), memory=_extremes(peaks), gpus=tuple(gpus))


def speed_errors(rows: Iterable[SpeedRow]) -> SpeedErrors:
    """Return the range of the errors of speed, and how many runs of each publisher the others' range holds."""
    compared = [row for row in rows if row.error is not None]
    families = sorted({row.publisher for row in compared})
    held_out = {}
    for family in families:
        own = [row for row in compared if row.publisher == family]
        others = expected_errors(row for row in compared if row.publisher != family)
        inside = sum(others[nodes_of(row)][0] <= (row.error or 0.0) <= others[nodes_of(row)][1] for row in own)
        held_out[family] = HeldOut(len(own), inside)
    return SpeedErrors(
        num_runs=len(compared),
        families=tuple(families),
        gpus=tuple(sorted({row.gpu for row in compared})),
        nodes={kind: (round(low, 4), round(high, 4)) for kind, (low, high) in expected_errors(compared).items()},
        held_out=held_out,
    )


def nodes_of(row: SpeedRow) -> Nodes:
    """Return whether a run was on one node or on several."""
    return "several nodes" if row.num_nodes > 1 else "one node"


def own_run_errors(rows: Iterable[SpeedRow]) -> dict[OwnRunKind, Errors]:
    """Return the central errors of runs that are predicted with another run of the same publisher and GPU, by kind.

    Such a run scales all rates alike, and so divides the error of every other run by its own (own_run.py).
    """
    found: dict[OwnRunKind, Errors] = {}
    for kind, pairs in own_run_pairs(rows).items():
        low, high = central_errors(pairs)
        families = tuple(sorted({pair.family.split()[0] for pair in pairs}))
        runs = len({pair.case for pair in pairs})
        found[kind] = Errors(num_runs=runs, families=families, lowest=round(low, 4), highest=round(high, 4))
    return dict(sorted(found.items()))


def own_run_pairs(rows: Iterable[SpeedRow]) -> dict[OwnRunKind, list[SpeedRow]]:
    """Return each run with its error when another one scales the rates, once for each such; by how alike the two are.

    The family of each is the publisher and the GPU, which count alike.
    """
    found: dict[OwnRunKind, list[SpeedRow]] = {}
    for own, asked in permutations([row for row in rows if row.error is not None], 2):
        if (own.family, own.gpu) == (asked.family, asked.gpu):
            is_alike = own.compiled == asked.compiled and (own.num_nodes > 1) == (asked.num_nodes > 1)
            kind: OwnRunKind = "otherwise" if not is_alike else "several nodes" if asked.num_nodes > 1 else "one node"
            error = (1 + (asked.error or 0.0)) / (1 + (own.error or 0.0)) - 1
            pair = msgspec.structs.replace(asked, family=f"{asked.family} {asked.gpu}", error=error)
            found.setdefault(kind, []).append(pair)
    return found


def fraction_inside(errors: SpeedErrors) -> float:
    """Return the fraction of runs inside of a range that they did not make."""
    return sum(one.inside for one in errors.held_out.values()) / errors.num_runs


def expected_errors(rows: Iterable[SpeedRow]) -> dict[Nodes, tuple[float, float]]:
    """Return the errors between which those of a publisher that is not among the rows are expected.

    That is a prediction interval of a random-effects model, in which each publisher counts alike: publishers' means
    differ, and the runs of one publisher, on several nodes more than on one. It has one degree of freedom less than
    there are publishers (Partlett and Riley, Statistics in Medicine 36, 2017): a few that happen to be alike do not
    show that a further one is.
    """
    by_publisher: dict[str, list[SpeedRow]] = defaultdict(list)
    for row in rows:
        by_publisher[row.publisher].append(row)
    means = [mean(row.error or 0.0 for row in own) for own in by_publisher.values()]
    found: dict[Nodes, tuple[float, float]] = {}
    for nodes in ("one node", "several nodes"):
        alike = [[row.error or 0.0 for row in own if nodes_of(row) == nodes] for own in by_publisher.values()]
        spreads = [pvariance(errors) for errors in alike if len(errors) > 1]
        reach = inf
        if len(means) > 1 and spreads:
            reach = STUDENTS_95[len(means) - 2] * sqrt(variance(means) * (1 + 1 / len(means)) + mean(spreads))
        found[nodes] = mean(means) - reach, mean(means) + reach
    return found


def central_errors(rows: Iterable[SpeedRow]) -> tuple[float, float]:
    """Return the smallest and the largest of the central errors; each publisher counts as much as any other."""
    by_family: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_family[row.publisher].append(row.error or 0.0)
    weighted = sorted((error, 1 / len(errors)) for errors in by_family.values() for error in errors)
    total, below, low = float(len(by_family)), 0.0, weighted[0][0]
    for error, weight in weighted:
        below += weight
        if below <= total * (1 - CENTRAL) / 2:
            low = error
        if below >= total * (1 + CENTRAL) / 2:
            return low, error
    return low, weighted[-1][0]


def _errors(rows: Iterable[tuple[str, str, float | None]]) -> dict[str, Errors]:
    by_kind: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for kind, family, error in rows:
        if error is not None:
            by_kind[kind].append((family, error))
    return {kind: _extremes(found) for kind, found in sorted(by_kind.items())}


def _extremes(found: Sequence[tuple[str, float]]) -> Errors:
    """Return the errors of runs, each with its family."""
    return Errors(
        num_runs=len(found),
        families=tuple(sorted({family for family, _ in found})),
        lowest=round(min(error for _, error in found), 4),
        highest=round(max(error for _, error in found), 4),
    )


# -- as text -----------------------------------------------------------------------------------------------------------


HEADERS = ("case", "code", "range\nbefore", "pre-\ndicted", "pub-\nlished", "error", "constant\nMFU", "exposed")
"""The range before a comparison is by the rows of all other publishers."""


def format_speed(rows: Sequence[SpeedRow], summary: SpeedSummary) -> str:
    """Return the comparison as plain text."""
    compared = [row for row in rows if row.error is not None]
    constants = ", ".join(f"{mfu:.1%} on {gpu}" for gpu, mfu in summary.best_constant_mfu.items())
    spans = {
        one: expected_errors(row for row in compared if row.publisher != one)
        for one in {row.publisher for row in compared}
    }
    cells = [_cells(row, *spans[row.publisher][nodes_of(row)]) for row in compared]
    lines = [
        f"throughput: {len(rows)} published, {len(compared)} compared; from datasheets alone; tokens/s per GPU",
        f"constant MFU: what fits the rows of each GPU best, chosen afterwards: {constants}",
        "",
        *table_lines(table_columns(HEADERS, cells, HEADERS[2:], ("exposed", "code", "constant\nMFU")), indent=2),
    ]
    lines += ["", *_groups(summary), "", *_range(compared), ""]
    lines += taken((row.family, row.assumptions) for row in compared)
    return "\n".join([*lines, "", *left_out((row.case, row.reason) for row in rows)])


def _cells(row: SpeedRow, lowest: float, highest: float) -> list[str]:
    assert row.predicted_tokens_per_second is not None
    ends = (row.predicted_tokens_per_second / (1 + error) for error in (highest, lowest))
    return [
        row.case,
        kind_of(row),
        "-".join(f"{end:,.0f}" for end in ends),
        f"{row.predicted_tokens_per_second:,.0f}",
        f"{row.published_tokens_per_second:,.0f}",
        f"{row.error:+.1%}",
        f"{row.constant_mfu_error:+.1%}",
        f"{row.exposed_share:.1%}",
    ]


def _groups(summary: SpeedSummary) -> list[str]:
    found = (
        (
            name,
            str(group.num_rows),
            f"{group.median_error:.1%}",
            f"{group.median_error_of_constant_mfu:.1%}",
            f"{group.num_too_fast} of {group.num_rows}",
        )
        for name, group in summary.groups.items()
    )
    headers = ("median |error|", "rows", "predicted", "constant MFU", "too fast")
    return table_lines(table_columns(headers, found, headers[1:]), indent=2)


def _range(rows: Sequence[SpeedRow]) -> list[str]:
    """Return the range that plans print beside a speed, and how it holds for publishers that did not make it."""
    found = speed_errors(rows)
    lines = [
        f"range: {EXPECTED:.0%} of a further publisher's runs on {nodes} are expected to have errors from {low:+.1%} to"
        f" {high:+.1%}"
        for nodes, (low, high) in found.nodes.items()
    ]
    lines += [
        f"  of a publisher that is left out the range of the others holds {fraction_inside(found):.0%} of the rows:"
    ]
    return lines + [f"    {name}: {one.inside} of {one.num_runs}" for name, one in found.held_out.items()]


if __name__ == "__main__":
    print(json.dumps(to_builtins(errors_of_predictions()), indent=2))
