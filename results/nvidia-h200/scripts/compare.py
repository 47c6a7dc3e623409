"""Prints what the scripts of this folder took on a GPU beside what rehearsals said."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

HERE = Path(__file__).parent
GIB, MIB = 2**30, 2**20


def row(name: str, steps: list[dict[str, float]]) -> str:
    """Return a script's row: peaks over all steps; the median time of the steps after the third."""
    allocated = max(step["peak_allocated"] for step in steps)
    reserved = max(step["peak_reserved"] for step in steps)
    seconds = statistics.median(step["seconds"] for step in steps[3:])
    rehearsed = json.loads((HERE / "records" / f"{name.partition(':')[0]}.json").read_text())
    memory, time = rehearsed["memory"], rehearsed["time"]
    predicted, mark = time["step_seconds"], ""
    if predicted is None:
        predicted, mark = time["at_least_seconds"], " at least"
    return (
        f"{name:24}{allocated / GIB:8.3f}{(memory['peak_allocated_bytes'] - allocated) / MIB:+9.2f}"
        f"{reserved / GIB:10.3f}{(memory['peak_reserved_bytes'] - reserved) / MIB:+9.0f}"
        f"{1000 * seconds:10.1f}{1000 * predicted:10.1f}{100 * (predicted / seconds - 1):+7.1f} %{mark}"
    )


def main() -> None:
    """Print a row for each run."""
    print(f"{'':24}{'allocated':>17}{'reserved':>19}{'step, ms':>20}")
    print(f"{'':24}{'GiB':>8}{'MiB':>9}{'GiB':>10}{'MiB':>9}{'measured':>10}{'rehearsed':>10}")
    seen: set[str] = set()
    for script in json.loads((HERE / "measured.json").read_text())["scripts"]:
        name = script["name"] + (":flash" if script["flash_only"] else "")
        again = " again" if name in seen else ""
        seen.add(name)
        print(row(name, script["steps"]) + again)


if __name__ == "__main__":
    main()
