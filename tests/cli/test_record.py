"""``fsdp-bench record`` and ``--recorded``: what they refuse, in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fsdp_bench.catalog import recorded
from tests.conftest import run_command

ROOT = Path(__file__).parents[2]
NEEDED = ("--gpu", "H100-SXM")


def _line(*words: object, cwd: Path = ROOT) -> str:
    ended = run_command(*words, cwd=cwd)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    return ended.stderr


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"model_type": "qwen2", "hidden_si', "config.json"),
        (b'{"hidden_size": 64}', "it has no model_type"),
        (b"[]", "is not a Hugging Face config.json"),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert expected in _line("record", "--hf-config", "config.json", cwd=tmp_path)


def test_the_code_is_named_once(tmp_path: Path) -> None:
    assert "--hf-config FILE or with --module" in _line("record")
    assert "name the code" in _line("record", "--hf-config", "a.json", "--module", "a:b")
    assert "no folder" in _line("record", "--module", "tests.simulate.recorded.users:llama", "-o", "nowhere/x.json")


def test_blocks_that_no_attribute_of_the_model_lists_are_refused(tmp_path: Path) -> None:
    """A bare nn.Sequential of blocks was recorded without any, and predict then ended with a traceback."""
    (tmp_path / "bare.py").write_text(
        "import torch\ndef build(micro_batch_size, sequence_length):\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "    return model, torch.zeros(micro_batch_size, sequence_length, 4)\n"
    )
    words = ("--module", "bare:build", "--transformer-block", "torch.nn:Linear", "-o", tmp_path / "x.json")
    done = run_command("record", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "no list holds modules of the class Linear; give the model an attribute" in done.stderr


def test_a_function_that_makes_its_own_batch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "never.json"
    line = _line("record", "--module", "tests.simulate.recorded.users:own_batch", "-o", file)
    assert not file.exists()
    assert "needs the parameters micro_batch_size and sequence_length" in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not a recorded model"),
        (
            b'{"format_version": 999}',
            "is a recorded model of version 999, and this fsdp-bench reads 2; record it again",
        ),
        (b'{"format_version": 2}', "is not a recorded model: "),
        (b'{"format_ver', "is not a recorded model"),
        (gzip.compress(b"{}", mtime=0)[:12], "cannot be read"),
        (json.dumps({"name": "x"}).encode(), "`fsdp-bench record` writes one"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    assert expected in _line("predict", "--recorded", "x.json", *NEEDED, cwd=tmp_path)


def test_a_packed_file_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_BYTES", 1 << 20)
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(bytes(2 << 20)))
    expected = "is no recorded model: it has more than 1 MiB"
    assert expected in _line("predict", "--recorded", "x.json.gz", *NEEDED, cwd=tmp_path)


def test_a_recorded_model_excludes_other_names(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    line = _line("predict", "--recorded", "x.json", "--params", "7B", *NEEDED, cwd=tmp_path)
    assert "--recorded and --params each name a model; keep one" in line
    assert "huggingface, torchtitan, benchmark" in _line("predict", "--model", "gpt2", "--code", "mine", *NEEDED)
    assert "x.json: cannot be read" in _line("predict", "--recorded", "nowhere/x.json", *NEEDED, cwd=tmp_path)
