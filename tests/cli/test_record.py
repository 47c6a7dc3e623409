"""``fsdp-bench record`` and ``--recorded``: what they refuse, in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fsdp_bench.catalog import recorded
from tests.conftest import refused

ROOT = Path(__file__).parents[2]
NEEDED = ("--gpu", "H100-SXM")


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
    assert expected in refused("record", "--hf-config", "config.json", cwd=tmp_path)


def test_a_function_that_makes_its_own_batch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "never.json"
    line = refused("record", "--module", "tests.simulate.recorded.users:own_batch", "-o", file, cwd=ROOT)
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
    assert expected in refused("predict", "--recorded", "x.json", *NEEDED, cwd=tmp_path)


def test_a_packed_file_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_BYTES", 1 << 20)
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(bytes(2 << 20)))
    expected = "is no recorded model: it has more than 1 MiB"
    assert expected in refused("predict", "--recorded", "x.json.gz", *NEEDED, cwd=tmp_path)
