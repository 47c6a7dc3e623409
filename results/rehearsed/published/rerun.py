"""Rehearses one published row again.

``python -m results.rehearsed.published.rerun CASE --code FOLDER --python PROGRAM [--keep]``

CASE is one of rows.toml, FOLDER a checkout of its code, PROGRAM the interpreter of an environment with torch's CUDA
build and the packages that rows.toml names. To be run in the clone, with the Python that has
fsdp-bench. It prints the peaks and the speed beside the published ones; ``--keep`` writes the record.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from fsdp_bench.spec.units import GIB
from tools.validate.published.cases import read_cases

HERE = Path(__file__).resolve().parent
DRIVERS = HERE / "drivers"
KINDS = {"max_allocated": "allocated_bytes", "max_active": "active_bytes", "max_reserved": "reserved_bytes"}
KEPT = (
    "source torch cuda world_size rank outcome num_steps server memory host unsupported allocator_settings fits verdict"
    " time why_no_time"
)
"""What is kept of the verb's document: not what names files of the machine, nor each step."""


def main() -> None:
    """Rehearse, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case")
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--variant", help="a variant that rows.toml names")
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    table = tomllib.loads((HERE / "rows.toml").read_text())
    row = next(one for one in table["case"] if one["case"] == given.case)
    command = row["command"] + (f" {row['variants'][given.variant]}" if given.variant else "")
    document = _rehearse(row, command, given.code, given.python)
    record = _record(row, table["code"][row["code"]], command, given.variant, document)
    for kind, published in record["published"].items():
        print(f"{given.case} {record['torch']} {kind}: {published / GIB:.2f} {record['peaks'][kind] / GIB:.2f} GiB")
    print(f"{given.case} outcome: {record['published_outcome']}, {record['verdict']}")
    print(f"{given.case} tokens/s: {record['published_tokens_per_second']} {record['tokens_per_second']}")
    if given.keep:
        ending = f"-{given.variant}" if given.variant else ""
        name = f"{given.case}-torch-{record['torch'].partition('+')[0]}{ending}.json"
        (HERE / "records" / name).write_text(json.dumps(record, indent=1) + "\n")


def _rehearse(row: dict[str, Any], command: str, code: Path, python: Path) -> dict[str, Any]:
    """Run the verb in the folder of the code; return its document."""
    words = shlex.split(command.format(python=shlex.quote(str(python.absolute())), drivers=shlex.quote(str(DRIVERS))))
    options = [*(word.format(here=HERE) for word in row["hardware"]), "--time", "--steps", str(row["steps"]), "--json"]
    paths = [str(code.resolve()), str(DRIVERS), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-m", "fsdp_bench", "rehearse", *options, "--", *words],
        cwd=code,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        check=False,
    )
    document: dict[str, Any] = json.loads(ran.stdout)
    if document.get("outcome") not in ("stopped", "ended", "out_of_memory"):
        sys.exit(f"{row['case']}: {document.get('error') or document['failure']['message']}")
    return document


def _record(
    row: dict[str, Any], code: dict[str, Any], command: str, variant: str | None, document: dict[str, Any]
) -> dict[str, Any]:
    """Return what is committed of a rehearsal."""
    published = next(case for case in read_cases() if case.inputs.case == row["case"])
    kept = {name: document[name] for name in KEPT.split()}
    kept["memory"].pop("lines_at_peak")
    if kept["time"] is not None:
        kept["time"].pop("parts")
    kept["reads"] = sorted({one["operator"] for one in document["reads"]})
    return {
        "case": row["case"],
        "variant": variant,
        "is_first": variant is None and document["torch"].partition("+")[0] == row["torch"][0],
        "code": {"repository": code["repository"], "commit": code["commit"], "note": code["note"]},
        "packages": code["packages"],
        "options": row["hardware"] + ["--time", "--steps", str(row["steps"])],
        "command": command,
        "changes": row["changes"],
        "left_open": row["left_open"],
        "torch": document["torch"],
        "published": {one.kind: one.num_bytes for one in published.measured if one.kind in KINDS},
        "published_outcome": published.outcome,
        "verdict": document["verdict"],
        "peaks": {kind: max(span[name] for span in document["spans"]) for kind, name in KINDS.items()},
        "published_tokens_per_second": published.tokens_per_second_per_gpu if row.get("speed", True) else None,
        "tokens_per_second": kept["time"] and kept["time"]["tokens_per_second_per_gpu"],
        "failure": document["failure"] and document["failure"]["message"],
        "document": kept,
    }


if __name__ == "__main__":
    main()
