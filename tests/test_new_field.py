"""A field that is added to TrainSetup, with what it says about itself, is found everywhere; nothing else is changed.

A process of its own reads spec/setup.py with one more field in it, and therefore imports the package in functions.
"""

import contextlib
import csv
import importlib.util
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).parents[1]
TRIAL = ROOT / "results/xeon-2-cores/cpu/trials/1118d40e225a.json"
SOURCE = ROOT / "fsdp_bench" / "spec" / "setup.py"
HELP = "Chunks of the sequence that are computed one after another"
FIELD = f"""
    num_chunks: Annotated[
        Count | None,
        Field("--num-chunks N", "{HELP}.", group=WRAPPING, since="2030-01-01", not_exported="leave it out"),
    ] = None
"""
MODEL = "--params 1B --code benchmark --server p5.48xlarge --strategy zero3"
COMMANDS = {
    "help": "predict --help",
    "several": f"predict {MODEL} --num-chunks default,2",
    "json": f"predict {MODEL} --num-chunks default,2 --json",
    "csv": f"predict {MODEL} --num-chunks default,2 --csv -",
    "columns": f"predict {MODEL} --num-chunks 2,4 --columns num_chunks",
    "one": f"predict {MODEL} --num-chunks 2",
    "sizes": "max-size --server p5.48xlarge --code benchmark --strategy zero3 --num-chunks 2,4 --csv -",
    "export": "predict --model Llama-3.1-8B --server p5.48xlarge --checkpointing full --num-chunks 2 --export pytorch",
    "compare": f"compare '--num-chunks 2' '--num-chunks 4' {MODEL}",
    "sweep": "sweep mine.toml --list",
    "one trial": "sweep mine.toml --list --only num_chunks=2",
    "typo": "sweep typo.toml --list",
}
SWEEP = """
[run]
device = "cpu"
[grid]
params = "10M"
sequence_length = 128
num_chunks = {}
"""


def with_field() -> None:
    name = "fsdp_bench.spec.setup"
    spec = importlib.util.spec_from_file_location(name, SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    place = "\n    def _check(self)"
    text = SOURCE.read_text()
    assert text.count(place) == 1
    exec(compile(text.replace(place, FIELD + place), str(SOURCE), "exec"), module.__dict__)


def printed(command: str) -> str:
    """Run a command in this process; return what it printed."""
    from fsdp_bench.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        main(shlex.split(command))
    return out.getvalue()


def answers() -> dict[str, Any]:
    found = {name: printed(command) for name, command in COMMANDS.items()}
    Path("several.json").write_text(found["json"])
    printed("report several.json --html several.html")
    return {**found, "page": Path("several.html").read_text(), **in_python()}


def in_python() -> dict[str, Any]:
    """Answers of Python that have no command, or need results."""
    from fsdp_bench import estimate
    from fsdp_bench.report.measured.tables import print_table
    from fsdp_bench.report.terminal import new_console
    from fsdp_bench.sweep.config.trial import trial_id
    from fsdp_bench.sweep.results.flat import flat_row
    from fsdp_bench.sweep.results.store import read_record
    from tests.docs.tables import TABLES

    record = read_record(TRIAL.read_bytes(), TRIAL.name)
    changed = msgspec.structs.replace(record, setup=msgspec.structs.replace(record.setup, num_chunks=3))
    out = io.StringIO()
    console = new_console()
    console.file = out
    print_table([record, changed], console)
    return {
        "setup": str(estimate("Llama-3.1-8B", server="p5.48xlarge", num_chunks=2).setup),
        "trials.csv": flat_row(changed),
        "report": out.getvalue(),
        "ids": [trial_id(one.model, one.setup, one.run, one.device) for one in (record, changed)],
        "docs": {name: "\n".join(rows()) for name, rows in TABLES.items()},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("new_field")
    (folder / "mine.toml").write_text(SWEEP.format('["none", 2]'))
    (folder / "typo.toml").write_text(SWEEP.format(2).replace("num_chunks", "num_chunk"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, __file__], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_it_is_an_option_with_its_help(found: dict[str, Any]) -> None:
    assert f"--num-chunks N {HELP}." in " ".join(found["help"].split())
    assert found["one"].splitlines()[3].endswith("adamw-foreach, num chunks 2")


def test_setups_that_differ_in_it_have_a_column_for_it(found: dict[str, Any]) -> None:
    lines = found["several"].splitlines()
    header = next(number for number, line in enumerate(lines) if line.split()[0:1] == ["chunks"])
    assert [line.split()[0] for line in lines[header + 1 : header + 3]] == ["default", "2"]
    assert "num chunks" in found["page"]
    assert found["columns"].split("note")[0].split()[-4:] == ["num", "chunks", "2", "4"]
    assert [row["num_chunks"] for row in csv_rows(found["csv"])] == ["", "2"]
    assert {row["num_chunks"] for row in csv_rows(found["sizes"])} == {"2", "4"}
    assert [one["setup"]["num_chunks"] for one in json.loads(found["json"])["predictions"]] == [None, 2]
    assert ["num", "chunks", "2", "4"] in [line.split() for line in found["compare"].splitlines()]


def test_it_is_a_key_of_sweep_files_and_part_of_labels(found: dict[str, Any]) -> None:
    first, second = found["sweep"].splitlines()[:2]
    assert "num chunks" not in first
    assert second.split()[1] == found["one trial"].split()[1]
    assert second.endswith("num chunks 2  to run")
    assert "unknown key 'num_chunk' (did you mean 'num_chunks'?)" in found["typo"]


def test_trials_of_before_keep_their_ids_and_trials_with_it_have_others(found: dict[str, Any]) -> None:
    from fsdp_bench.sweep.config.trial import trial_id
    from fsdp_bench.sweep.results.store import read_record

    record = read_record(TRIAL.read_bytes(), TRIAL.name)
    same, other = found["ids"]
    assert same == trial_id(record.model, record.setup, record.run, record.device)
    assert other != same


def test_measured_trials_have_a_column_for_it(found: dict[str, Any]) -> None:
    assert found["trials.csv"]["num_chunks"] == 3
    rows = [line.split()[1] for line in found["report"].splitlines() if line.startswith("NO_SHARD ")]
    assert rows == ["default", "3"]


def test_python_takes_it_and_docs_name_it(found: dict[str, Any]) -> None:
    assert "num_chunks=2" in found["setup"]
    for table in found["docs"].values():
        assert "`num_chunks`" in table.splitlines()[-1]


def test_a_script_that_would_lack_it_is_refused(found: dict[str, Any]) -> None:
    assert "export: num_chunks is not exported; leave it out" in found["export"]


def csv_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


if __name__ == "__main__":
    with_field()
    print(json.dumps(answers()))
