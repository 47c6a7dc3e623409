"""A command with placeholders: what stands for them, and what is refused."""

import json
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from fsdp_bench.plan.script.edit import edited, read_edit
from fsdp_bench.plan.script.template import Placeholder, Template, literal, read_placeholder
from fsdp_bench.plan.script.variants import read_combinations
from fsdp_bench.spec.errors import SpecError

KNOWN = {"batch": Placeholder("batch", ("1", "2", "4")), "ckpt": Placeholder("ckpt", ("off", "on"))}


def filled(line: str, **values: str) -> list[str]:
    template = Template(tuple(line.split(" ")), KNOWN)
    template.check("command")
    return template.filled(values)


@pytest.mark.parametrize(
    ("line", "values", "words"),
    [
        ("train.py --bs {batch}", {"batch": "2"}, ["train.py", "--bs", "2"]),
        ("train.py --out=runs/{batch}-{ckpt}", {"batch": "2", "ckpt": "on"}, ["train.py", "--out=runs/2-on"]),
        ("train.py {ckpt:--grad-ckpt|}", {"ckpt": "on"}, ["train.py", "--grad-ckpt"]),
        ("train.py {ckpt:--grad-ckpt|}", {"ckpt": "off"}, ["train.py"]),
        ("train.py --gc={ckpt:1|0}", {"ckpt": "off"}, ["train.py", "--gc=0"]),
        ("train.py {batch:small|middle|large}", {"batch": "4"}, ["train.py", "large"]),
        ('train.py {{batch}} {"a":1}', {}, ["train.py", "{batch}", '{"a":1}']),
    ],
)
def test_values_stand_in_the_place_of_placeholders(line: str, values: dict[str, str], words: list[str]) -> None:
    assert filled(line, **values) == words


def test_a_text_of_several_words_becomes_several_words() -> None:
    template = Template(("train.py", "{ckpt:--policy 'every 2'|}"), KNOWN)
    assert template.filled({"ckpt": "on"}) == ["train.py", "--policy", "every 2"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.py {bach}", r"\{bach\} has no values \(did you mean 'batch'\?\)"),
        ("train.py {ckpt:a}", "has 1 texts; two, for on and for off"),
        ("train.py {batch:a|b}", "has 2 texts for the 3 values of batch"),
    ],
)
def test_a_placeholder_that_means_nothing_is_refused(line: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        filled(line)


@pytest.mark.parametrize("text", ["batch", "batch=", "=1,2", "a b=1"])
def test_a_placeholder_has_a_name_and_values(text: str) -> None:
    with pytest.raises(SpecError, match="a name and its values, like batch=1,2,4"):
        read_placeholder(text)


def test_values_with_commas_stand_between_quotes() -> None:
    assert read_placeholder('betas="0.9,0.95",0.9') == Placeholder("betas", ("0.9,0.95", "0.9"))


@given(st.lists(st.text()))
def test_braces_are_nothing_special_without_placeholders(words: list[str]) -> None:
    assert literal(words).filled({}) == words


FILES = {
    "a.yaml": "# comment\ntrain:\n  batch: 1  # sequences\n  lr: 1e-5\n  layers: [1, 2]\n  name: '007'\n",
    "a.toml": '[train]\nbatch = 1\nlr = 1e-5\nlayers = [1, 2]\nname = "007"\n',
    "a.json": '{"train": {"batch": 1, "lr": 1e-5, "layers": [1, 2], "name": "007"}}',
}
READERS = {".yaml": YAML(typ="safe").load, ".toml": tomllib.loads, ".json": json.loads}


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / str(request.param)
    path.write_text(FILES[path.name])
    return path


def test_values_are_set_in_a_copy_and_all_else_stays(file: Path) -> None:
    texts = ["train.batch=8", "train.layers.1=5", "+train.seq=512", "+new.flag=true"]
    [(path, text)] = edited([read_edit(f"{file.name}:{one}") for one in texts], file.parent).items()
    assert path == str(file.resolve())
    found = READERS[file.suffix](text)
    train = {"batch": 8, "lr": 1e-5, "layers": [1, 5], "name": "007", "seq": 512}
    assert found == {"train": train, "new": {"flag": True}}
    assert file.read_text() == FILES[file.name]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "{file}:train.bach=2",
            r"has no 'bach' under 'train' \(did you mean 'batch'\?\); .*:\+train.bach=2 adds a key",
        ),
        ("{file}:train.layers.7=2", "has no 'train.layers.7': train.layers is a list of 2"),
        ("{file}:train.batch.x=2", "train.batch is the value 1"),
        ("nowhere.yaml:a=2", "cannot be read: No such file"),
        ("train.py:a=2", "a file that ends in .json, .toml, .yaml, .yml"),
        ("{file}=2", "FILE:KEY=VALUE"),
        ("{file}:train.name=@x", """'@x' is no value of YAML: found character '@'.*:train.name="@x" is that text"""),
    ],
)
def test_an_edit_that_is_none_is_one_line(text: str, said: str, file: Path) -> None:
    with pytest.raises(SpecError, match=said) as error:
        edited([read_edit(text.format(file=file.name))], file.parent)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_parsed_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: [1\nb: }")
    with pytest.raises(SpecError, match="is not YAML") as error:
        edited([read_edit("a.yaml:a=2")], tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "a.toml").write_text("a = 1")
    with pytest.raises(SpecError, match=r"a.toml' cannot have a value of this kind: .*NoneType"):
        edited([read_edit("a.toml:a=null")], tmp_path)


def test_a_variant_s_command_says_its_edits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.toml").write_text("batch = 1\n[tp]\ndegree = 1\n")
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    edits = ["a.toml:batch={batch}", "a.toml:tp.degree=2"]
    found = read_combinations([sys.executable, "train.py"], {"batch": [4, 8]}, edit=edits, gpu="H100-SXM", world_size=8)
    one = found.variants()[1]
    assert shlex.join(one.command[1:]) == "train.py with a.toml:batch=8 and a.toml:tp.degree=2"
    assert one.template.endswith("train.py with a.toml:batch={batch} and a.toml:tp.degree=2")
