"""Every option of a setup takes several values, and the table of their combinations is sorted, selected and written."""

import csv
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.cli.common.options import EVERY_OPTION, SetupOptions
from fsdp_bench.cli.common.setups import read_models, read_setups
from fsdp_bench.spec.field import Field
from fsdp_bench.spec.setup import FIELDS, OptimizerKind, TrainSetup
from tests.cli.test_options import parse
from tests.conftest import run_command, stdout_of
from tests.other_values import MEANS_SOMETHING_WITH, another_value

GPT2 = ("--model", "gpt2", "--server", "p5.48xlarge")
LISTS: dict[str, tuple[str, int]] = {
    "nodes": ("1,2,3", 3),
    "gpus-per-node": ("4,8", 2),
    "server": ("p5.48xlarge,p4d.24xlarge,p5.48XLARGE", 2),
    "loss": ("all", 7),
    "max-grad-norm": ("default,1,2.5", 3),
    "checkpointing-policy": ("default,every-second-product,aten.mm,aten.silu,every-2-blocks", 4),
    "reentrant": ("all", 3),
    "model": ("gpt2,gpt2-medium", 2),
    "strategy": ("all", 5),
    "api": ("all", 2),
}


SETTING = {"world_size": 16, "api": "fsdp2"}


def several(*words: str) -> SetupOptions:
    return parse(*words, lists=EVERY_OPTION)


@pytest.mark.parametrize("name", [name for name, one in FIELDS.items() if one.option is not None])
def test_every_option_of_a_setup_takes_a_list_whose_values_reach_its_field(name: str) -> None:
    field, given = FIELDS[name], SETTING | MEANS_SOMETHING_WITH.get(name, {})
    values = given.get(name, field.default), another_value(field)
    words = [("--params", "1B")]
    for key, value in (given | {name: ",".join(map(field.text, values))}).items():
        words.append((f"--{FIELDS[key].word.replace('_', '-')}", FIELDS[key].text(value)))
    found = [getattr(reading.setup, name) for reading in read_setups(several(*itertools.chain(*words)))]
    assert found == [getattr(TrainSetup(**(given | {name: value})), name) for value in values]


@pytest.mark.parametrize("one", [one for one in FIELDS.values() if one.option and one.kind is bool])
def test_a_switch_is_turned_on_and_off(one: Field) -> None:
    for flag, value in zip(one.form.split("/"), (True, False), strict=False):
        (reading,) = read_setups(several("--params", "1B", flag))
        assert getattr(reading.setup, one.name) is value


@pytest.mark.parametrize(("option", "text", "count"), [(name, *values) for name, values in LISTS.items()])
def test_a_list_has_words_aliases_and_all(option: str, text: str, count: int) -> None:
    words = dict(zip(GPT2[::2], GPT2[1::2], strict=True)) | {f"--{option}": text}
    readings = read_setups(several(*[word for pair in words.items() for word in pair]))
    assert len(readings) == count
    assert len(read_models(readings)) == count


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("--batch", "2,1,2"), (2, 1)),
        (("--checkpointing-policy", "default,every-2-blocks"), (None, "every-2-blocks")),
        (("--checkpointing-policy", "default,aten.mm,aten.silu"), (None, "aten.mm,aten.silu")),
        (("--checkpointing-policy", "aten.mm,aten.silu;aten.mm"), ("aten.mm,aten.silu", "aten.mm")),
        (("--lora", "rank=4,targets=q_proj+v_proj;8"), ("rank=4,targets=q_proj+v_proj", "8")),
    ],
    ids=["a value given twice", "default ends a policy", "operators follow it", "semicolon", "commas inside"],
)
def test_a_list_is_split_where_its_values_end(words: tuple[str, str], values: tuple[object, ...]) -> None:
    (found,) = several(*words).several.values()
    assert found == values


def test_operators_that_follow_each_other_are_one_policy() -> None:
    alone = several("--checkpointing-policy", "aten.silu,aten.mm")
    assert (alone.value("checkpointing_policy"), alone.several) == ("aten.silu,aten.mm", {})


def test_setups_that_an_option_does_not_concern_appear_once() -> None:
    """FULL_SHARD has no shard size, and units of blocks no smallest size."""
    words = ("--params", "10M", "--world-size", "8", "--strategy", "zero3,hsdp", "--shard-size", "2,4")
    setups = [reading.setup for reading in read_setups(several(*words))]
    assert [(setup.strategy.value, setup.shard_size) for setup in setups] == [
        ("FULL_SHARD", None),
        ("HYBRID_SHARD", 2),
        ("HYBRID_SHARD", 4),
    ]
    words = ("--params", "10M", "--wrap", "block,size", "--min-num-params", "1M,2M")
    assert len(read_setups(several(*words))) == 3


def table(*words: object) -> list[dict[str, str]]:
    """Return the rows of ``--csv -``."""
    printed = stdout_of("predict", *words, "--csv", "-")
    return list(csv.DictReader(io.StringIO(printed)))


def test_the_csv_file_has_what_json_has(tmp_path: Path) -> None:
    words = ("--model", "gpt2", "--server", "p5.48xlarge,g5.48xlarge", "--nodes", "1,2", "--strategy", "zero3,hsdp")
    path = tmp_path / "table.csv"
    done = run_command("predict", *words, "--csv", path, "--json")
    found: list[dict[str, Any]] = json.loads(done.stdout)["predictions"]
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == len(found) == 8
    assert [one.name for one in tmp_path.iterdir()] == ["table.csv"]
    for one in found:
        setup, place = one["setup"], one["server"]
        (row,) = [
            row
            for row in rows
            if (row["server"], row["num_nodes"], row["strategy"])
            == (place["name"], str(place["num_nodes"]), setup["strategy"])
        ]
        assert row["impossible"] == (one["impossible"] or "")
        if one["impossible"] is None:
            for key in ("peak_allocated_bytes", "needed_bytes", "peak_reserved_bytes"):
                assert int(row[key]) == one["memory"][key]
            assert sum(int(row[f"{name}_at_peak_bytes"]) for name in one["memory"]["breakdown_bytes"]) == int(
                row["peak_allocated_bytes"]
            )
            assert float(row["step_seconds"]) == one["time"]["step_seconds"]
            assert row["fits"] == str(one["fits"])


def test_all_optimizers_are_answered_beside_those_that_cannot_run_or_are_not_predicted() -> None:
    rows = table("--model", "gpt2", "--server", "p5.48xlarge", "--api", "fsdp2", "--optimizer", "all")
    refused = {row["optimizer"]: row["impossible"] for row in rows if row["impossible"]}
    assert refused.keys() == {"adafactor", "muon"}
    assert "is not predicted" in refused["muon"]
    assert {row["optimizer"] for row in rows} == {kind.value for kind in OptimizerKind}


def test_one_setup_is_one_row_of_csv() -> None:
    words = ("predict", "--params", "1B", "--gpu", "H100-SXM", "--world-size", "8")
    (alone,) = csv.DictReader(io.StringIO(run_command(*words, "--csv", "-").stdout))
    both = csv.DictReader(io.StringIO(run_command(*words, "--batch", "1,2", "--csv", "-").stdout))
    assert alone == next(row for row in both if row["micro_batch_size"] == "1")


def test_max_size_searches_every_combination_and_writes_them(tmp_path: Path) -> None:
    words = ("--server", "p5.48xlarge,g5.48xlarge", "--nodes", "1,2", "--seq", "2048,4096", "--strategy", "zero3")
    path = tmp_path / "sizes.csv"
    done = run_command(
        "max-size", *words, "--checkpointing", "full", "--no-time", "--csv", path, "--sort", "-fits_value"
    )
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 2 * 2 * 2
    for one in (rows[index : index + 2] for index in range(0, 8, 2)):
        assert int(one[0]["fits_value"]) >= int(one[1]["fits_value"])
        assert one[0]["sequence_length"] == "2048"
    assert [row["server"] for row in rows] == ["p5.48xlarge"] * 4 + ["g5.48xlarge"] * 4
