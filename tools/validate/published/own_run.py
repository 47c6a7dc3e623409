"""``python -m tools.validate.published.own_run PAGE``: how well one run of a publisher predicts its others.

Each run in turn is the company's own, which scales all rates alike (fsdp_bench/plan/scaling.py); the other runs of the
same publisher on the same GPU are predicted with these. That divides the error of each by the own run's. PAGE gets the
table in the place of its older one: docs/validation/time.md.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles

from tools.validate.published.ranges import own_run_pairs
from tools.validate.published.speed import SpeedRow, compare_speed

NEAR = 0.05
HEADERS = ("publisher and GPU", "own and other run", "runs", "median", "90th percentile", "within 5 %")
_KINDS = {"one node": "alike, on one node", "several nodes": "alike, on several nodes", "otherwise": "unlike"}
_ALL = "all"


def markdown(rows: Iterable[SpeedRow]) -> list[str]:
    """Return the lines of the table: by publisher and GPU of runs that are alike, and all by how alike they are."""
    groups: dict[tuple[str, str], list[SpeedRow]] = {}
    for kind, pairs in own_run_pairs(rows).items():
        groups[_ALL, kind] = pairs
        for pair in pairs if kind != "otherwise" else ():
            groups.setdefault((pair.family, kind), []).append(pair)
    order = sorted(groups, key=lambda group: (group[0] == _ALL, group[0], list(_KINDS).index(group[1])))
    lines = [
        HEADERS,
        ("---",) * len(HEADERS),
        *((name, _KINDS[kind], *_cells(groups[name, kind])) for name, kind in order),
    ]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cells(pairs: Sequence[SpeedRow]) -> tuple[str, ...]:
    errors = [abs(pair.error or 0.0) for pair in pairs]
    near = sum(error <= NEAR for error in errors) / len(errors)
    ninth = quantiles(errors, n=10, method="inclusive")[-1]
    return str(len({pair.case for pair in pairs})), f"{median(errors):.1%}", f"{ninth:.1%}", f"{near:.0%}"


def rewrite(page: Path, table: Sequence[str]) -> None:
    """Put the table into a page in the place of its older one."""
    lines = page.read_text(encoding="utf-8").splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith(f"| {HEADERS[0]} |"))
    end = next(place for place in range(begin, len(lines)) if not lines[place].startswith("|"))
    page.write_text("\n".join([*lines[:begin], *table, *lines[end:]]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]), markdown(compare_speed()[0]))
