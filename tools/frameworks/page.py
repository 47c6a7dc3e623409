"""docs/frameworks.md: what was rehearsed of each framework, with its command, from the records."""

import shlex
from pathlib import Path

from fsdp_bench.spec.units import GIB
from tools.frameworks.matrix import NEWEST_TORCH, SERVER, Framework, Row, read_matrix
from tools.frameworks.rehearsal import Run, record_of

BEGIN, END = "<!-- rows: python -m tools.frameworks --page -->", "<!-- end of rows -->"


def write_page(file: Path) -> None:
    """Write the rows between their marks; the text around them stays."""
    before, _, rest = file.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    matrix = read_matrix()
    commands = [_commands(one) for one in matrix if any(row.command for row in one.rows)]
    file.write_text(before + "\n\n".join([BEGIN, _table(matrix), *commands, END]) + after)


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
    parts = [f"## {framework.framework}"]
    newest = framework.releases[0]
    parts.append("`pip install " + shlex.join([f"torch=={newest.torch}", *newest.requirements]) + "`")
    parts += [_command(framework, row) for row in framework.rows if row.command]
    return "\n\n".join(parts)


def _command(framework: Framework, row: Row) -> str:
    """Return one row's command at its newest release on 8 GPUs, and where its example and its files are."""
    release = next((one.release for one in framework.of_row(row)), framework.releases[0].release)
    words = [f"fsdp-bench rehearse --server {SERVER}", *([shlex.join(row.options)] if row.options else []), "--"]
    command = row.text(" ".join([*words, row.command.strip()]), release, 8)
    about = f"**{row.what}**"
    if row.repository is not None:
        tag = f" at {row.text(row.tag, release, 8)}" if row.tag else ""
        about += f"; `source` is [the repository]({row.repository}){tag}"
    if files := {**framework.files, **row.files}:
        about += f"; `{'`, `'.join(files)}` as in [the row](../tools/frameworks/rows/{framework.file})"
    return f"{about}:\n\n```bash\n{command}\n```"
