"""The notebooks run from top to bottom; their numbers are those of the records and of the servers that they name."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from fsdp_bench.catalog.loader import gpu, server
from fsdp_bench.spec.frontier import FrontierCell, read_frontier
from fsdp_bench.spec.units import GIB, parse_count

ROOT = Path(__file__).parents[1]
SHOW_ROWS = "import json; print(json.dumps(rows))"


@pytest.fixture(scope="module")
def committed() -> Any:
    return nbformat.read(ROOT / "notebooks" / "max_model_size.ipynb", as_version=4)


@pytest.fixture(scope="module")
def measured() -> list[FrontierCell]:
    """The cells of the sweep that the notebook is about, from its record."""
    path = ROOT / "results" / "xeon-2-cores" / "max-size-quick" / "frontier.json"
    return [cell for cell in read_frontier(path.read_bytes(), path.name).cells if cell.measured is not None]


def printed(notebook: Any) -> list[str]:
    """Return the outputs of a notebook's code cells, without pictures."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    found = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return [text for text in found if "Image object" not in text]


@pytest.fixture(scope="module")
def ran(committed: Any) -> Any:
    """The notebook after a run, with a cell behind each table of predictions that prints its rows as JSON."""
    cells = []
    for cell in nbformat.from_dict(committed).cells:
        cells.append(cell)
        if cell.cell_type == "code" and "pd.DataFrame(rows)" in cell.source:
            cells.append(nbformat.v4.new_code_cell(SHOW_ROWS))
    return run(nbformat.v4.new_notebook(cells=cells, metadata=committed.metadata))


def run(notebook: Any) -> Any:
    resources = {"metadata": {"path": str(ROOT / "notebooks")}}
    return NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()


pytestmark = pytest.mark.filterwarnings("default")  # of jupyter's own packages


def test_the_printed_search_is_the_recorded_one(committed: Any, measured: list[FrontierCell]) -> None:
    table, sentence, phases, *_ = printed(committed)
    same = sum(cell.steps_apart == 0 for cell in measured)
    trials = max(len(cell.trials) for cell in measured)
    expected = f"the same step in {same} of {len(measured)} cells; {trials} trials a cell at most"
    assert sentence.strip().endswith(expected)
    for cell in measured[:8]:
        assert str(cell.measured.fits) in table
    limits = Counter(cell.measured.limited_by.phase for cell in measured if cell.measured and cell.measured.limited_by)
    for line in phases.splitlines()[2:]:
        phase, *counts = line.split()
        assert sum(map(int, counts)) == limits.pop(phase)
    assert not limits


def test_predicted_sizes_are_within_bounds_from_the_gpus_memory(ran: Any) -> None:
    """Adam on mixed precision keeps 16 bytes a parameter: whole on every GPU, or its states among 8 of them."""
    largest, fewest = (json.loads(text) for text in printed(ran) if text.startswith("["))
    for name in ("p4d.24xlarge", "p5.48xlarge"):
        usable = gpu(server(name).gpu).usable_memory_bytes or 0
        fits = {row["strategy"]: parse_count(row["fits"], "fits") for row in largest if row["server"] == name}
        assert fits["NO_SHARD"] < fits["SHARD_GRAD_OP"] < fits["FULL_SHARD"]
        assert 0.5 * usable / 16 < fits["NO_SHARD"] < usable / 16
        assert 0.5 * 8 * usable / 16 < fits["FULL_SHARD"] < 8 * usable / 16
    for row in largest:
        assert parse_count(row["runs"], "runs") >= parse_count(row["fits"], "fits")
    for row in fewest:
        usable = gpu(server(row["server"]).gpu).usable_memory_bytes or 0
        allocated, reserved, left = (float(row[key].split()[0]) for key in ("peak allocated", "reserved", "left"))
        assert 16 * 13.0e9 / row["fewest GPUs"] < allocated * GIB < reserved * GIB
        assert -0.1 <= usable / GIB - reserved - left < 3  # what NCCL takes, as the text says; numbers have one decimal


@pytest.mark.parametrize("name", [pytest.param("capacity_planning", marks=pytest.mark.slow), "reading_a_sweep"])
def test_a_notebook_prints_its_committed_output(name: str) -> None:
    """If it changed on purpose, run the notebook, look at its pictures and save it."""
    committed = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    assert printed(run(nbformat.from_dict(committed))) == printed(committed)


def test_the_largest_models_are_printed_as_they_were_committed(committed: Any, ran: Any) -> None:
    assert [text for text in printed(ran) if not text.startswith("[")] == printed(committed)


def test_reading_a_sweep_says_what_validate_says_of_it() -> None:
    """results/xeon-2-cores/cpu/validation.md is written by ``validate``."""
    text = "".join(printed(nbformat.read(ROOT / "notebooks" / "reading_a_sweep.ipynb", as_version=4)))
    page = (ROOT / "results" / "xeon-2-cores" / "cpu" / "validation.md").read_text()
    assert re.search("peak allocated +54 of 54", page)
    assert "equal to the byte: 54 of 54" in text
    signed = re.search(r"signed ([-+.0-9]+%)", page)
    assert f"median error {signed[1]}" in text
