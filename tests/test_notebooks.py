"""The notebooks run from top to bottom, and a reader of the committed file sees what they print today.

That says nothing about whether the numbers are right: the tests of what they call do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def texts(notebook: Any) -> list[str]:
    """What the code cells print, without the pictures."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    found = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return [text for text in found if "Image object" not in text]


@pytest.mark.filterwarnings("default")  # of jupyter's own packages
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_was_committed_with(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    committed = texts(notebook)
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    assert texts(notebook) == committed
    assert len(committed) > 3
