"""The JSON form of a rehearsal: it is read back as it was written, and other documents are refused."""

from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.plan.rehearsal_document import read_rehearsals, rehearsal_document
from fsdp_bench.spec.codec import to_builtins, to_json
from fsdp_bench.spec.errors import SpecError
from tests.report.test_rehearsal_text import OUT, of_step, rehearsal, step_of


def written(folder: Path, document: Any) -> Path:
    file = folder / "rehearsed.json"
    file.write_bytes(to_json(document))
    return file


@pytest.mark.parametrize("found", [rehearsal(), rehearsal(**OUT), rehearsal(spans=()), of_step(step_of("mylib::x"))])
def test_a_document_is_read_back_as_it_was_written(found: Any, tmp_path: Path) -> None:
    document = rehearsal_document(found)
    assert read_rehearsals(written(tmp_path, document)) == (document,)
    assert read_rehearsals(written(tmp_path, {"ranks": [document, document]})) == (document, document)


def test_a_document_of_an_older_version_lacks_younger_keys(tmp_path: Path) -> None:
    document = to_builtins(rehearsal_document(rehearsal()))
    del document["folder"], document["memory"]["lines_at_peak"][0]["line"]["text"]
    document["server"] = {name: document["server"][name] for name in ("name", "gpu", "gpu_memory_bytes")}
    (read,) = read_rehearsals(written(tmp_path, document))
    assert read.folder is None
    assert read.memory.lines_at_peak is not None
    assert [one.line.text for one in read.memory.lines_at_peak if one.line] == [""]


@pytest.mark.parametrize("document", [{}, [], {"ranks": []}, {"source": "predicted", "memory": {}}, {"error": "no"}])
def test_another_document_is_refused(document: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"rehearsed\.json: is no document of rehearse --json"):
        read_rehearsals(written(tmp_path, document))


def test_a_broken_document_is_refused_with_the_place(tmp_path: Path) -> None:
    document = to_builtins(rehearsal_document(rehearsal()))
    document["memory"]["phases"]["forward"] = -1
    with pytest.raises(SpecError, match=r"is no document of rehearse --json: Expected `int` >= 0 - at `\$\[0\]\.mem"):
        read_rehearsals(written(tmp_path, document))
