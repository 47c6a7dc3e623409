"""One row of the matrix, rehearsed at one release and one number of GPUs."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.spec.errors import ExitCode, shortened
from tools.frameworks.environment import Environments
from tools.frameworks.matrix import GPUS_PER_NODE, RECORDS, SERVER, Framework, Release, Row

CHECKOUT = Path(__file__).parents[2]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a row's rehearsal; of several pipeline stages the one that reserves most."""

    release: str
    torch: str
    gpus: int
    answer: str
    """``fits``, ``fits with retries``, ``does not fit``, ``unknown``, or ``failed``."""
    why: str = ""
    """One line: why the answer is unknown, or the script failed."""
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    num_steps: int = 0
    step_seconds: float | None = None
    """The predicted time of the last step (``--time``). None: not asked for, or unknown."""
    seconds: float = 0.0
    """The rehearsal's own time on the clock, imports included."""
    said: tuple[str, ...] = ()
    """The answer's notes: what was assumed or replaced."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a row."""

    framework: str
    row: str
    runs: tuple[Run, ...] = ()


def rehearse_row(framework: Framework, row: Row, release: Release, gpus: int, places: Environments) -> Run:
    """Rehearse a row in a new folder. Raises MachineError without its environment or source."""
    programs, source = places.programs(framework, release), places.source(row, release)
    with tempfile.TemporaryDirectory(prefix="frameworks-") as name:
        folder = Path(name)
        for path, text in {**framework.files, **row.files}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(row.text(text, release.release, gpus))
        if source is not None:
            (folder / "source").symlink_to(source)
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "fsdp_bench", *_words(row, release, gpus)],
            cwd=folder,
            env=_environment(programs, folder),
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started
    about: dict[str, Any] = {
        "release": release.release,
        "torch": release.torch,
        "gpus": gpus,
        "seconds": round(seconds, 1),
    }
    try:
        document = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = (done.stderr.strip() or "no message").splitlines()[-1]
        return Run(**about, answer="failed", why=shortened(said, 300))
    ranks = document.get("ranks", [document])
    worst = max(ranks, key=lambda one: one["memory"]["peak_reserved_bytes"] or 0)
    return Run(**about, **_answer(worst, done.returncode))


def _words(row: Row, release: Release, gpus: int) -> list[str]:
    each = min(gpus, GPUS_PER_NODE)
    hardware = ["--server", SERVER, "--nodes", str(gpus // each), "--gpus-per-node", str(each)]
    texts = [shlex.join(row.options), row.command]
    options, command = (shlex.split(row.text(text, release.release, gpus)) for text in texts)
    return ["rehearse", "--json", *hardware, *options, "--", *command]


def _environment(programs: Path, folder: Path) -> dict[str, str]:
    """Return the variables of a user who has activated the environment, with no files of a hub but those beside him."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    path = os.pathsep.join([str(programs), kept.get("PATH", os.defpath)])
    return {**kept, "PATH": path, "PYTHONPATH": str(CHECKOUT), "HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1"}


def _answer(document: dict[str, Any], code: int) -> dict[str, Any]:
    memory = document["memory"]
    found = {
        "num_steps": document["num_steps"],
        "peak_allocated_bytes": memory["peak_allocated_bytes"] or 0,
        "peak_reserved_bytes": memory["peak_reserved_bytes"] or 0,
        "step_seconds": (document["time"] or {}).get("step_seconds"),
        "said": tuple(document["notes"]),
    }
    if code == ExitCode.CRASHED:
        failure = document["failure"] or {"type": document["outcome"], "message": ""}
        said = f"{failure['type']}: {failure['message']}".strip().splitlines()[0]
        return {**found, "answer": "failed", "why": shortened(said, 300)}
    answer = str(document["verdict"] or "unknown").replace("_", " ")
    return {**found, "answer": answer, "why": document["why_unknown"] or ""}


def record_of(framework: Framework, row: Row) -> Record:
    """Read what is recorded of a row; nothing, if nothing is."""
    file = RECORDS / f"{row.name}.json"
    if not file.exists():
        return Record(framework=framework.framework, row=row.name)
    return msgspec.json.decode(file.read_bytes(), type=Record)


def keep(framework: Framework, row: Row, run: Run) -> None:
    """Add a run to a row's record, in the place of one with the same release and number of GPUs."""
    found = record_of(framework, row)
    runs = [one for one in found.runs if (one.release, one.gpus) != (run.release, run.gpus)]
    order = [one.release for one in framework.releases]
    ordered = sorted([*runs, run], key=lambda one: (order.index(one.release), one.gpus))
    RECORDS.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(found, runs=tuple(ordered))))
    (RECORDS / f"{row.name}.json").write_bytes(text + b"\n")
