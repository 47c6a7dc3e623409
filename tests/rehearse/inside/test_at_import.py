"""Modules are changed when they are imported, whatever a script asks of them before."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from fsdp_bench.rehearse.inside.at_import import change_at_import


def test_a_module_that_was_only_looked_for_is_changed_once_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looked_for.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    changed = list[str]()
    change_at_import({"looked_for": lambda module: changed.append(module.__name__)})
    assert importlib.util.find_spec("looked_for") is not None  # as transformers asks whether datasets is installed
    assert changed == []
    assert importlib.import_module("looked_for").value == 1
    assert changed == ["looked_for"]
    assert sys.meta_path == before
    del sys.modules["looked_for"]
