"""A rehearsal leaves the user's files as they are, byte for byte, and the script reads back what it wrote."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from textwrap import dedent

import pytest

from fsdp_bench.rehearse.inside.files.overlay import Overlay
from fsdp_bench.rehearse.inside.files.places import ENTERED, protected_folders
from tests.rehearse.inside.rehearsing import become_a_rehearsal, plan_of, run_fork

NOT_ALLOWED = "no overlay here"
NOTICE = "fsdp-bench: This machine allows no overlay"


def _mount(scratch: Path) -> None:
    """Do as rehearse/enter.py does."""
    words = json.loads((scratch / "plan.json").read_text())["words"]
    try:
        said = {"overlays": Overlay(str(scratch), protected_folders(words)).layers}
    except OSError as error:
        print(f"{NOT_ALLOWED}: {error}", flush=True)
        raise
    (scratch / ENTERED).write_text(json.dumps(said))


def _mount_nothing(scratch: Path) -> None:
    """Say what unshare(2) says in most containers."""
    (scratch / ENTERED).write_text(json.dumps({"error": "Operation not permitted"}))


PROTECTIONS = {"overlay": _mount, "Python's functions": _mount_nothing}


@pytest.fixture(params=PROTECTIONS)
def protection(request: pytest.FixtureRequest) -> str:
    """The name of a protection."""
    return str(request.param)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A folder with two real checkpoints."""
    folder = tmp_path / "user"
    for name in ("checkpoint-400", "checkpoint-500"):
        (folder / name).mkdir(parents=True)
        for file in ("model.safetensors", "optimizer.pt"):
            (folder / name / file).write_bytes(os.urandom(2000))
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "a folder"
        for path in folder.rglob("*")
    }


def notes_of(script: str, user: Path, protection: str, name: str = "script.py") -> str:
    """Rehearse a script in the user's folder, which must be as before; return the notes of its answer."""
    scratch = user.parent / "scratch"
    scratch.mkdir()
    (user / name).parent.mkdir(exist_ok=True)
    (user / name).write_text(dedent(script))
    before = contents(user)
    (scratch / "plan.json").write_text(json.dumps(plan_of(scratch, name)))
    run_fork(become_a_rehearsal, user, scratch, PROTECTIONS[protection])
    output = (scratch / "output.txt").read_text()
    if NOT_ALLOWED in output:
        pytest.skip(output)
    assert contents(user) == before
    report = json.loads((scratch / "report.json").read_text())
    assert report["outcome"] == "ended", output
    return "\n".join(report["notes"])


def test_checkpoints_of_torch_are_written_for_the_script_alone(user: Path, protection: str) -> None:
    """By path, by an opened file, by keywords, as bytes; large ones without their tensors' bytes, as sparse files."""
    notes = notes_of(
        """
        import io, os, pathlib, torch
        linear = torch.nn.Linear(1000, 1000)  # 4,004,000 bytes, so above 1 MiB
        state = linear.state_dict()
        old = "checkpoint-500/optimizer.pt"
        torch.save(state, old)
        torch.save(state, open("opened.pt", "wb"))
        torch.save(obj=state, f="keywords.pt")
        torch.save(state, pathlib.Path("path.pt"))
        torch.save(state, "legacy.pt", _use_new_zipfile_serialization=False)
        torch.save({"step": 3}, "small.pt")
        memory = io.BytesIO()
        torch.save(state, memory)
        open("bytes.pt", "wb").write(memory.getvalue())
        for file in (old, "opened.pt", "keywords.pt", "path.pt", "legacy.pt", "bytes.pt"):
            assert os.stat(file).st_size > 4_004_000
            linear.load_state_dict(torch.load(file))
        assert torch.load("small.pt") == {"step": 3}
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "script.pt")
        torch.jit.load(open("script.pt", "rb"))
        """,
        user,
        protection,
    )
    assert "torch.save wrote 4 files without the bytes of large tensors." in notes
    assert "The script wrote 8 files and removed 0, which the disk does not show." in notes


def test_other_files_are_written_renamed_and_removed_for_the_script_alone(user: Path, protection: str) -> None:
    notes = notes_of(
        """
        import glob, json, os, pathlib, pickle, shutil
        import numpy
        numpy.save("array.npy", numpy.arange(3))
        pickle.dump([1], open("list.pickle", "wb"))
        with open("checkpoint-400/optimizer.pt", "r+b") as file:
            file.seek(1999)
            file.write(b"!")
        assert pathlib.Path("checkpoint-400/optimizer.pt").read_bytes()[1999:] == b"!"
        shutil.copytree("checkpoint-400", "copy")
        shutil.rmtree("checkpoint-400")  # as Trainer's save_total_limit does
        os.rename("checkpoint-500", "best")
        os.remove("best/optimizer.pt")
        pathlib.Path("logs/deep").mkdir(parents=True)
        pathlib.Path("logs/deep/log.json").write_text(json.dumps([1]))
        os.replace("logs/deep/log.json", "logs/log.json")
        os.symlink("logs", "link")
        assert sorted(os.listdir(".")) == [
            "array.npy", "best", "copy", "link", "list.pickle", "logs", "script.py",
        ]
        assert not os.path.exists("checkpoint-400") and not glob.glob("checkpoint-*")
        assert os.listdir("best") == ["model.safetensors"]
        assert sorted(str(path) for path in pathlib.Path("logs").rglob("*")) == ["logs/deep", "logs/log.json"]
        assert [entry.name for entry in os.scandir("copy") if entry.is_file()]
        assert json.load(open("link/log.json")) == [1]
        assert numpy.load("array.npy").tolist() == [0, 1, 2] and pickle.load(open("list.pickle", "rb")) == [1]
        for wrong, error in (
            (lambda: open("checkpoint-400/model.safetensors"), FileNotFoundError),
            (lambda: os.mkdir("best"), FileExistsError),
            (lambda: os.rmdir("copy"), OSError),
            (lambda: open("best/model.safetensors", "x"), FileExistsError),
        ):
            try:
                wrong()
            except error:
                continue
            raise AssertionError(error)
        """,
        user,
        protection,
    )
    # array, list, two copies, best/model, log; both files of checkpoint-400 and of checkpoint-500
    assert "The script wrote 6 files and removed 4, which the disk does not show." in notes


def test_a_child_process_changes_no_file_in_an_overlay(user: Path) -> None:
    notes = notes_of(
        """
        import subprocess
        subprocess.run("rm -r checkpoint-400; mv checkpoint-500 best; echo hello > child", shell=True, check=True)
        assert open("child").read() == "hello\\n"
        """,
        user,
        "overlay",
    )
    assert "wrote 3 files and removed 4" in notes


@pytest.mark.parametrize("script", ["open('new', 'w').write('1')", "print(1)"])
def test_a_machine_without_overlays_is_named_whatever_the_script_writes(script: str, user: Path) -> None:
    """The working directory is in a temporary folder here, which Landlock lets be written."""
    notes = notes_of(script, user, "Python's functions")
    assert "This machine allows no overlay (Operation not permitted)" in notes
    assert "those that C++, Rust or another program writes by itself REACH THE DISK" in notes
    assert NOTICE in (user.parent / "scratch" / "output.txt").read_text()  # before the script starts


def test_an_overlay_and_a_script_that_writes_nothing_have_no_note(user: Path) -> None:
    assert notes_of("print(open('script.py').read())", user, "overlay") == ""


def test_a_script_in_another_folder_runs_in_the_working_directory(user: Path) -> None:
    """As ``torchrun jobs/script.py``: both folders are protected."""
    script = "open('new', 'w'); open('jobs/new', 'w'); assert open('checkpoint-400/model.safetensors', 'rb').read()"
    assert "wrote 2 files and removed 0" in notes_of(script, user, "overlay", "jobs/script.py")


def test_a_file_in_the_root_is_written_for_the_script_alone(user: Path) -> None:
    """As root in a container, where ``--output_dir /output`` is usual."""
    path = f"/fsdp-bench-test-{os.getpid()}"
    notes = notes_of(
        f"import os; os.mkdir('{path}'); open('{path}/a', 'w').write('1'); open('{path}.txt', 'w')", user, "overlay"
    )
    assert "The script wrote 2 files" in notes
    assert not os.path.exists(path)
    assert not os.path.exists(f"{path}.txt")
