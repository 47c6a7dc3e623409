"""docs/frameworks.md: what was rehearsed of each framework, with its command, from the records."""

import shlex
from pathlib import Path

from fsdp_bench.spec.units import GIB
from tools.frameworks.matrix import NEWEST_TORCH, SERVER, Framework, Row, read_matrix
from tools.frameworks.rehearsal import Run, record_of

FIVE = "five-"
BEGIN_FIVE, END_FIVE = "<!-- five: python -m tools.frameworks --page -->", "<!-- end of five -->"
BEGIN, END = "<!-- rows: python -m tools.frameworks --page -->", "<!-- end of rows -->"


def write_page(file: Path) -> None:
    """Write both tables and the rows' commands between their marks; the text around them stays."""
    matrix = read_matrix()
    text = _between(file.read_text(), BEGIN_FIVE, END_FIVE, [_five(matrix)])
    file.write_text(_between(text, BEGIN, END, [_table(matrix), *filter(None, map(_commands, matrix))]))


def _between(text: str, begin: str, end: str, parts: list[str]) -> str:
    before, _, rest = text.partition(begin)
    return before + "\n\n".join([begin, *parts, end]) + rest.partition(end)[2]


def _five(matrix: list[Framework]) -> str:
    """Return the table of the rows that train the same by several frameworks, from the least memory to the most."""
    rows = [(framework, row) for framework in matrix for row in framework.rows if row.name.startswith(FIVE)]
    runs = [(framework, row, run) for framework, row in rows for run in record_of(framework, row).runs]
    lines = ["| framework | torch | allocated / reserved, GiB | step time (predicted) |", "|---|---|---|---|"]
    for framework, row, run in sorted(runs, key=lambda one: one[2].peak_allocated_bytes):
        named = f"{framework.framework} {run.release}, {row.what.partition(': ')[2]}"
        time = "unknown" if run.step_seconds is None else f"{1000 * run.step_seconds:.0f} ms"
        lines.append(f"| {named} | {run.torch} | {_cell(run)} | {time} |")
    return "\n".join(lines)


def _table(matrix: list[Framework]) -> str:
    lines = ["| framework | example | said | release | 8 GPUs | 64 GPUs | seconds |", "|---|---|---|---|---|---|---|"]
    for framework in matrix:
        for row in framework.rows:
            runs = record_of(framework, row).runs
            said = " ".join(f"`{option}`" for option in row.options if option.startswith("--"))
            for release in dict.fromkeys(one.release for one in runs):
                by_gpus = {one.gpus: one for one in runs if one.release == release}
                seconds = ", ".join(f"{by_gpus[gpus].seconds:.0f}" for gpus in sorted(by_gpus))
                cells = [_cell(by_gpus.get(gpus)) for gpus in (8, 64)]
                others = [f"{_cell(run)} on {gpus}" for gpus, run in by_gpus.items() if gpus not in (8, 64)]
                cells[0] = "; ".join(filter(None, [cells[0], *others]))
                torch = next(iter(by_gpus.values())).torch
                named = release if torch == NEWEST_TORCH else f"{release}, torch {torch.removesuffix('.0')}"
                lines.append(
                    f"| {framework.framework} | {row.what} | {said} | {named} | {cells[0]} | {cells[1]} | {seconds} |"
                )
            for release, why in row.missing.items():
                lines.append(f"| {framework.framework} | {row.what} | | {release} | missing: {why} | | |")
    return "\n".join(lines)


def _cell(run: Run | None) -> str:
    if run is None:
        return ""
    if run.answer in ("failed", "unknown"):
        return f"{run.answer}: {run.why}"
    peak = f"{run.peak_allocated_bytes / GIB:.1f} / {run.peak_reserved_bytes / GIB:.1f}"
    return peak if run.answer == "fits" else f"{peak}, {run.answer}"


def _commands(framework: Framework) -> str:
    """Return what to install for each release that ran, and the command of each row that ran."""
    rows = [row for row in framework.rows if framework.of_row(row)]
    used = {one.release for row in rows for one in framework.of_row(row)}
    parts = [f"## {framework.framework}"] if rows else []
    for one in framework.releases:
        if one.release in used:
            parts.append("`pip install " + shlex.join([f"torch=={one.torch}", *one.requirements]) + "`")
    return "\n\n".join([*parts, *(_command(framework, row) for row in rows)])


def _command(framework: Framework, row: Row) -> str:
    """Return one row's command at its newest release on 8 GPUs, and where its example and its files are."""
    release = framework.of_row(row)[0].release
    words = [f"fsdp-bench rehearse --server {SERVER}", *([shlex.join(row.options)] if row.options else []), "--"]
    command = row.text(" ".join([*words, row.command.strip()]), release, 8)
    about = f"**{row.what}**"
    if row.repository is not None:
        tag = f" at {row.text(row.tag, release, 8)}" if row.tag else ""
        about += f"; `source` is [the repository]({row.repository}){tag}"
    if files := {**framework.files, **row.files}:
        about += f"; `{'`, `'.join(files)}` as in [the row](../tools/frameworks/rows/{framework.file})"
    return f"{about}:\n\n```bash\n{command}\n```"
