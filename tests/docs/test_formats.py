"""docs/sweeps.md and docs/results.md name everything that sweep files and results have, and nothing else."""

import csv
import re
import tomllib
import types
import typing
from itertools import chain
from pathlib import Path

import msgspec
import pytest

from fsdp_bench.spec.frontier import FirstFailure, FrontierCell, FrontierRecord, LargestValues, QuantityRange
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.rank_report import (
    CollectiveReading,
    CommunicationReading,
    EffectiveSetup,
    Failure,
    MemoryReading,
    RankReport,
    Telemetry,
)
from fsdp_bench.spec.record import RunPlan, TrialRecord
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from fsdp_bench.sweep.config import sweep_file
from fsdp_bench.sweep.config.models import CODE_KEYS, MODEL_KEYS, MORE_KEYS
from fsdp_bench.sweep.config.reading import FIELD_ALIASES
from fsdp_bench.sweep.machine import GpuDevice, Machine, probe_machine
from fsdp_bench.sweep.results.flat import flat_row
from fsdp_bench.sweep.results.store import read_record
from tests.docs.pages import ROOT, blocks
from tests.docs.tables import TABLES, with_tables
from tests.sweep.conftest import read_sweep

STRUCTS: dict[str, type[msgspec.Struct]] = {
    "A trial's record": TrialRecord,
    "The model": ModelShape,
    "A model's code": ModelCode,
    "The setup": TrainSetup,
    "How it was run": RunPlan,
    "A rehearsed GPU": RehearsedGpu,
    "A rank's report": RankReport,
    "A rank's memory": MemoryReading,
    "A profiled step": CommunicationReading,
    "A kind of collective": CollectiveReading,
    "What was read back": EffectiveSetup,
    "Telemetry": Telemetry,
    "A failure": Failure,
    "The machine": Machine,
    "A GPU of the machine": GpuDevice,
    "The frontier's record": FrontierRecord,
    "A frontier's cell": FrontierCell,
    "What is raised": QuantityRange,
    "A limit": LargestValues,
    "What the next value is short of": FirstFailure,
}
TYPES = {"integer": int, "string": str, "number": float, "boolean": bool, "list": tuple, "table": object}
FOLDER = ROOT / "results" / "xeon-2-cores"


def section(page: str, title: str) -> str:
    text = (ROOT / "docs" / page).read_text()
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The rows of a section's tables whose first cell is code."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("title", STRUCTS)
def test_every_field_of_a_record_is_described(title: str) -> None:
    struct = STRUCTS[title]
    described = {row[0].strip("`"): row[1] for row in rows(section("results.md", title))}
    assert list(described) == list(struct.__struct_encode_fields__)
    hints = typing.get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        words = described[field.encode_name]
        hint = hints[field.name]
        arms = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        may_be_missing = not field.required or type(None) in arms
        assert words.endswith("?") is may_be_missing, field.name
        kind = typing.get_origin(arms[0]) or arms[0]
        if kind in (int, float, bool, str, tuple):
            assert TYPES[words.rstrip("?").split()[0]] is kind, field.name


@pytest.mark.parametrize(("title", "file"), [("trials.csv", "cpu"), ("frontier.csv", "max-size-quick")])
def test_every_column_is_described(title: str, file: str) -> None:
    if title == "trials.csv":  # the committed file is of a version that had fewer settings
        (path, *_) = (FOLDER / file / "trials").glob("*.json")
        columns = set(flat_row(read_record(path.read_bytes(), path.name)))
    else:
        with open(FOLDER / file / title) as lines:
            columns = set(csv.DictReader(lines).fieldnames or ())
    named = set(re.findall(r"`(\w+)`", section("results.md", f"The columns of {title}"))) - {"ok", "memory_limit"}
    assert named <= columns
    assert columns - named <= set(TrainSetup.__struct_fields__)


def test_every_key_of_a_sweep_file_is_described() -> None:
    run = {row[0].strip("`") for row in rows(section("sweeps.md", "[run]: how each trial is run"))}
    assert run == set(sweep_file.RUN_KEYS)
    found = [row[0] for row in rows(section("sweeps.md", "[grid]: what is trained"))]
    grid = {key for cell in found for key in re.findall(r"`(\w+)`", cell)}
    assert grid == {*MODEL_KEYS, *TrainSetup.__struct_fields__, *FIELD_ALIASES}
    headings = set(re.findall(r"\[(\w+)[.\]]", " ".join(re.findall(r"^## .*$", page("sweeps.md"), re.MULTILINE))))
    assert headings == set(sweep_file._TOP_KEYS)


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_a_setups_fields_are_made_of_the_fields(name: str) -> None:
    """If a field changed on purpose, run ``python -m tests.docs.update``."""
    text = (ROOT / name).read_text()
    assert with_tables(name, text) == text


def test_the_example_is_a_sweep_and_its_model_tables_are_models(tmp_path: Path) -> None:
    examples = [block for block in blocks(page("sweeps.md")) if block.language == "toml"]
    path = tmp_path / "mine.toml"
    path.write_text(examples[0].text)
    assert len(read_sweep(path, probe_machine())) == 2 * 2 * 2 + 1
    tables = {key: value for example in examples for key, value in tomllib.loads(example.text).items()}
    assert set(tables) == set(sweep_file._TOP_KEYS)
    models = {
        name: model for example in examples for name, model in tomllib.loads(example.text).get("models", {}).items()
    }
    assert {"name", *models.pop("tiny")} == set(ModelShape.__struct_fields__)
    assert {key for model in models.values() for key in model} == {*CODE_KEYS, *chain(*MORE_KEYS.values())}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()
