"""notebooks/your_own_script.ipynb rehearses a script; what it prints is what it says."""

import ast
import json
import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import pytest

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "your_own_script.ipynb"


def run(source: str, names: dict[str, Any]) -> str:
    """Run a cell without Jupyter, whose packages torch's CUDA build need not be beside; return what it prints."""
    *before, last = ast.parse(source).body
    output = StringIO()
    with redirect_stdout(output):
        is_shown = isinstance(last, ast.Expr) and not source.endswith(";")
        exec(compile(ast.Module(before if is_shown else [*before, last], []), "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if is_shown else None
    return output.getvalue() + ("" if value is None else repr(value))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
def test_the_notebook_of_a_script_prints_its_committed_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    names: dict[str, Any] = {}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        texts = [one.get("text") or one.get("data", {}).get("text/plain", "") for one in cell["outputs"]]
        expected = "".join("".join(text) for text in texts).strip()
        with pd.option_context("display.max_columns", 20):  # as in Jupyter
            found = run("".join(cell["source"]), names).strip()
        assert found == ("" if expected.startswith("<Figure") else expected)
