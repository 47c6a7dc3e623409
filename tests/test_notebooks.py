"""The notebooks run from top to bottom; their numbers are those of the records that they name."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from fsdp_bench.spec.frontier import read_frontier

ROOT = Path(__file__).parents[1]


def read(name: str) -> Any:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def printed(notebook: Any) -> list[str]:
    """Return the outputs of a notebook's code cells, without pictures."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    found = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return [text for text in found if "Image object" not in text]


pytestmark = pytest.mark.filterwarnings("default")  # of jupyter's own packages


def test_the_printed_search_is_the_recorded_one() -> None:
    """results/xeon-2-cores/max-size-quick is the sweep that the notebook is about."""
    path = ROOT / "results" / "xeon-2-cores" / "max-size-quick" / "frontier.json"
    measured = [cell for cell in read_frontier(path.read_bytes(), path.name).cells if cell.measured is not None]
    table, sentence, phases, *_ = printed(read("max_model_size"))
    same = sum(cell.steps_apart == 0 for cell in measured)
    trials = max(len(cell.trials) for cell in measured)
    expected = f"the same step in {same} of {len(measured)} cells; {trials} trials a cell at most"
    assert sentence.strip().endswith(expected)
    for cell in measured[:8]:
        assert str(cell.measured.fits) in table
    limits = Counter(cell.measured.limited_by.phase for cell in measured if cell.measured.limited_by)
    for line in phases.splitlines()[2:]:
        phase, *counts = line.split()
        assert sum(map(int, counts)) == limits.pop(phase)
    assert not limits


@pytest.mark.parametrize(
    "name", [pytest.param("capacity_planning", marks=pytest.mark.slow), "max_model_size", "reading_a_sweep"]
)
def test_a_notebook_prints_its_committed_output(name: str) -> None:
    """If it changed on purpose, run the notebook, look at its pictures and save it."""
    resources = {"metadata": {"path": str(ROOT / "notebooks")}}
    ran = NotebookClient(read(name), timeout=120, kernel_name="python3", resources=resources).execute()
    assert printed(ran) == printed(read(name))


def test_reading_a_sweep_says_what_validate_says_of_it() -> None:
    """results/xeon-2-cores/cpu/validation.md is written by ``validate``."""
    text = "".join(printed(read("reading_a_sweep")))
    page = (ROOT / "results" / "xeon-2-cores" / "cpu" / "validation.md").read_text()
    assert re.search("peak allocated +54 of 54", page)
    assert "equal to the byte: 54 of 54" in text
    signed = re.search(r"signed ([-+.0-9]+%)", page)
    assert f"median error {signed[1]}" in text
