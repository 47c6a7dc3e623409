"""A rehearsal leaves the user's files as they are, byte for byte, and the script reads back what it wrote."""

import errno
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from fsdp_bench.rehearse.inside.files import overlay
from fsdp_bench.rehearse.inside.files.guard import replace_everywhere
from fsdp_bench.rehearse.inside.files.overlay import Overlay
from fsdp_bench.rehearse.inside.files.places import ENTERED, protected_folders
from tests.rehearse.inside.rehearsing import become_a_rehearsal, plan_of, run_fork

NOT_ALLOWED = "no overlay here"
NOTICE = "fsdp-bench: This machine allows no overlay"


def overlay_of(scratch: Path) -> None:
    """Mount one, as rehearse/enter.py does."""
    words = json.loads((scratch / "plan.json").read_text())["words"]
    try:
        mounted = Overlay(str(scratch), protected_folders(words))
        said = {"overlays": mounted.layers, "read_only": mounted.read_only, "silent": mounted.silent}
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EINVAL):
            print(f"{NOT_ALLOWED}: {error}", flush=True)
        raise
    (scratch / ENTERED).write_text(json.dumps(said))


def functions_of_python(scratch: Path) -> None:
    """Say what unshare(2) says in most containers, so that these are replaced."""
    (scratch / ENTERED).write_text(json.dumps({"error": "Operation not permitted"}))


Protection = Callable[[Path], None]


@pytest.fixture(params=[overlay_of, functions_of_python])
def protection(request: pytest.FixtureRequest) -> Protection:
    """What a rehearsal does before the script."""
    return request.param


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A folder with two real checkpoints."""
    folder = tmp_path / "user"
    for name in ("checkpoint-400", "checkpoint-500"):
        (folder / name).mkdir(parents=True)
        for file in ("model.safetensors", "optimizer.pt"):
            (folder / name / file).write_bytes(os.urandom(2000))
    return folder


def contents(folder: Path) -> dict[str, tuple[object, ...]]:
    """Return what a rehearsal must leave as it was: bytes, permissions and times of files, and where links lead."""

    def of(path: Path) -> tuple[object, ...]:
        found = path.lstat()
        if path.is_symlink():
            return found.st_mode, path.readlink()
        return found.st_mode, found.st_mtime_ns, path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest()

    return {str(path.relative_to(folder)): of(path) for path in folder.rglob("*")}


def notes_of(
    script: str,
    user: Path,
    protection: Protection,
    needs_landlock: bool = False,
    name: str = "script.py",
    **plan: object,
) -> str:
    """Rehearse a script in the user's folder, which must be as before; return the notes of its answer."""
    scratch = user.parent / "scratch"
    scratch.mkdir()
    (user / name).parent.mkdir(exist_ok=True)
    (user / name).write_text(dedent(script))
    before = contents(user)
    (scratch / "plan.json").write_text(json.dumps(plan_of(scratch, name, **plan)))
    run_fork(become_a_rehearsal, user, scratch, protection)
    output = (scratch / "output.txt").read_text()
    if NOT_ALLOWED in output or (needs_landlock and "REACH THE DISK" in output):
        pytest.skip(output)
    assert contents(user) == before
    report = json.loads((scratch / "report.json").read_text())
    assert report["outcome"] == "ended", output
    return "\n".join(report["notes"])


Notes = Callable[[str], str]


@pytest.fixture
def notes(user: Path, protection: Protection) -> Notes:
    """Rehearses a script under each protection; returns the notes of its answer."""
    return lambda script: notes_of(script, user, protection)


def test_checkpoints_of_torch_are_written_for_the_script_alone(notes: Notes) -> None:
    """By path, by an opened file, by keywords, as bytes; large ones without their tensors' bytes, as sparse files."""
    said = notes("""
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
        assert torch.load(f="small.pt", mmap=True) == {"step": 3}  # which C++ opens
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "script.pt")
        torch.jit.load(open("script.pt", "rb"))
        """)
    assert "torch.save wrote 4 files without the bytes of large tensors." in said
    assert "The script wrote 8 files and removed 0, which the disk does not show." in said


def test_other_files_are_written_renamed_and_removed_for_the_script_alone(notes: Notes) -> None:
    said = notes("""
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
        """)
    # array, list, two copies, best/model, log; both files of checkpoint-400 and of checkpoint-500
    assert "The script wrote 6 files and removed 4, which the disk does not show." in said


def test_modules_that_the_script_has_written_are_imported(user: Path, notes: Notes) -> None:
    """And what Python keeps of them and of the user's own is not left in ``__pycache__``."""
    (user / "existing.py").write_text("VALUE = 5")
    notes("""
        import ctypes, importlib, os, shutil, sys
        sys.dont_write_bytecode = False
        open("helper.py", "w").write("VALUE = 1")
        import existing, helper
        assert (existing.VALUE, helper.VALUE) == (5, 1)
        open("helper.py", "w").write("VALUE = 22")
        assert importlib.reload(helper).VALUE == 22
        os.makedirs("package/inner")
        open("package/inner/module.py", "w").write("VALUE = 3")
        importlib.invalidate_caches()
        from package.inner.module import VALUE
        assert VALUE == 3
        compiled = importlib.util.find_spec("_heapq").origin or importlib.util.find_spec("_queue").origin
        shutil.copy(compiled, "library.so")
        name = os.path.basename(compiled).split(".")[0]
        spec = importlib.util.spec_from_file_location(name, os.path.abspath("library.so"))
        importlib.util.module_from_spec(spec)
        ctypes.CDLL("./library.so")
        """)


def test_what_a_script_has_written_is_read_back_in_every_way(notes: Notes) -> None:
    notes("""
        import bz2, fileinput, filecmp, glob, gzip, io, json, lzma, os, pathlib, shutil, tarfile, zipfile
        import numpy
        json.dump({"a": 1}, open("c.json", "w"))
        assert json.load(open("c.json")) == {"a": 1} and io.FileIO("c.json").read() == b'{"a": 1}'
        assert os.stat("c.json").st_size == os.path.getsize("c.json") == 8
        assert "c.json" in os.listdir() and b"c.json" in os.listdir(b".") and os.path.isfile("c.json")
        path = pathlib.Path("c.json")
        assert glob.glob("*.json") == ["c.json"] and [*pathlib.Path().rglob("c.*")] == [path]
        assert path.resolve() == pathlib.Path.cwd() / "c.json"
        shutil.copy("c.json", "d.json")
        shutil.move(shutil.copy2("d.json", "e.json"), "f.json")
        assert filecmp.cmp("c.json", "f.json") and not os.path.exists("e.json")
        for module in (gzip, bz2, lzma):
            with module.open("packed", "wb") as file:
                file.write(b"1")
            assert module.open("packed").read() == b"1"
        with zipfile.ZipFile("a.zip", "w") as archive:
            archive.write("c.json", "in/c.json")
        zipfile.ZipFile("a.zip").extractall("zipped")
        with tarfile.open("a.tar", "w") as archive:
            archive.add("zipped")
        tarfile.open("a.tar").extractall("tarred", filter="fully_trusted")
        assert json.load(open("tarred/zipped/in/c.json")) == {"a": 1}
        with fileinput.input("c.json", inplace=True) as lines:
            for line in lines:
                print(line.replace("1", "2"))
        assert json.load(open("c.json")) == {"a": 2}
        array = numpy.memmap("array", dtype="f4", mode="w+", shape=4)
        array[:] = 7
        del array
        assert numpy.fromfile("array", dtype="f4").sum() == numpy.memmap("array", dtype="f4", mode="r").sum() == 28
        before = os.getcwd()
        os.chdir("zipped")
        assert os.getcwd() == before + "/zipped" and os.listdir() == ["in"] and os.path.exists("../c.json")
        open("more", "w").write("1")
        os.chdir("../checkpoint-400")
        assert sorted(os.listdir()) == ["model.safetensors", "optimizer.pt"] and os.path.exists("../zipped/more")
        """)


def test_files_are_changed_through_descriptors_for_the_script_alone(notes: Notes) -> None:
    notes("""
        import io, mmap, os
        old, other = "checkpoint-400/optimizer.pt", "checkpoint-500/optimizer.pt"
        with open(old, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
            mapped[:4] = b"evil"
            mapped.close()
        read = os.open(old, os.O_RDONLY)
        assert os.pread(read, 4, 0) == b"evil"
        write = os.open(other, os.O_WRONLY)
        os.sendfile(write, read, 0, 100)
        os.copy_file_range(read, write, 50, 0, 3000)
        os.ftruncate(write, 4000)
        assert os.stat(other).st_size == 4000
        for file in ("model.safetensors", "optimizer.pt"):
            untouched = os.open("checkpoint-400/model.safetensors", os.O_RDONLY)
            os.fchmod(untouched, 0o600)
            os.utime(untouched, (1, 1))
        os.chmod(other, 0o400)
        os.utime(other, (5, 5))
        assert os.stat(other).st_mode & 0o777 == 0o400 and os.path.getmtime(other) == 5
        os.truncate(other, 10)
        folder = os.open("checkpoint-400", os.O_RDONLY | os.O_DIRECTORY)
        os.unlink("model.safetensors", dir_fd=folder)
        os.mkdir("inner", dir_fd=folder)
        os.rename("optimizer.pt", "inner/moved", src_dir_fd=folder, dst_dir_fd=folder)
        assert os.listdir("checkpoint-400") == ["inner"] and os.listdir("checkpoint-400/inner") == ["moved"]
        io.FileIO("raw", "w").write(b"1")
        os.mkfifo("fifo")
        assert os.path.exists("fifo")
        for _, _, files, folder in os.fwalk("checkpoint-500"):
            for file in files:
                os.remove(file, dir_fd=folder)
        assert os.listdir("checkpoint-500") == []
        """)


def test_links_lead_to_what_the_script_sees(user: Path, notes: Notes) -> None:
    (user / "real_link").symlink_to("checkpoint-400")
    (user / "link_to_file").symlink_to("checkpoint-400/model.safetensors")
    notes("""
        import os
        os.symlink("checkpoint-500", "latest")
        open("latest/optimizer.pt", "w").write("new")
        open("latest/more", "w").write("more")
        assert open("checkpoint-500/optimizer.pt").read() == "new"
        assert os.readlink("latest") == "checkpoint-500"
        assert os.path.realpath("latest") == os.path.abspath("checkpoint-500")
        assert sorted(os.listdir("latest")) == ["model.safetensors", "more", "optimizer.pt"]
        os.remove("latest/model.safetensors")
        assert not os.path.exists("checkpoint-500/model.safetensors")
        os.rename("latest", "newest")
        open("newest/more", "w").write("again")
        assert open("checkpoint-500/more").read() == "again"
        os.symlink(os.path.abspath("checkpoint-400/optimizer.pt"), "file")
        open("file", "w").write("through a link")
        assert open("checkpoint-400/optimizer.pt").read() == "through a link"
        open("link_to_file", "w").write("through a link of the disk")
        assert open("real_link/model.safetensors").read() == "through a link of the disk"
        os.symlink("nowhere", "dangling")
        open("dangling", "w").write("1")
        assert open("nowhere").read() == "1"
        os.remove("real_link")
        os.mkdir("real_link")
        open("real_link/optimizer.pt", "w").write("no link any more")
        os.link("checkpoint-400/optimizer.pt", "second")
        open("second", "r+").write("!")
        """)


def test_processes_of_a_pool_and_their_parent_see_the_same_files(notes: Notes) -> None:
    notes("""
        import multiprocessing, os, shutil
        def work(number):
            open(f"of-{number}", "w").write("1")
            if number == 0:
                shutil.rmtree("checkpoint-400")
                os.rename("checkpoint-500", "best")
                os.symlink("best", "link")
        assert not os.path.exists("link/optimizer.pt")
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(work, range(3))
        assert sorted(os.listdir()) == ["best", "link", "of-0", "of-1", "of-2", "script.py"]
        open("link/optimizer.pt", "w").write("1")
        assert open("best/optimizer.pt").read() == "1"
        """)


def test_databases_logs_and_temporary_files_are_the_scripts_alone(user: Path, notes: Notes) -> None:
    sqlite3 = pytest.importorskip("sqlite3")
    connection = sqlite3.connect(user / "runs.db")
    connection.execute("create table run (loss)")
    connection.close()
    notes("""
        import logging, os, sqlite3, tempfile
        connection = sqlite3.connect("runs.db")
        connection.execute("insert into run values (1)")
        connection.commit()
        assert sqlite3.connect("runs.db").execute("select * from run").fetchall() == [(1,)]
        sqlite3.connect("new.db").execute("create table run (loss)")
        assert os.path.exists("new.db")
        handler = logging.FileHandler("log.txt")
        handler.emit(logging.makeLogRecord({"msg": "hello"}))
        assert "hello" in open("log.txt").read()
        with tempfile.NamedTemporaryFile(dir="checkpoint-400", delete=False) as file:
            file.write(b"new")
        os.replace(file.name, "checkpoint-400/model.safetensors")
        assert open("checkpoint-400/model.safetensors").read() == "new"
        with tempfile.TemporaryDirectory(dir=".") as folder:
            open(folder + "/file", "w").write("1")
        assert not os.path.exists(folder)
        with tempfile.TemporaryFile(dir=".") as file:
            file.write(b"1")
        """)


def test_functions_are_replaced_where_modules_and_classes_have_imported_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``glob`` of Python 3.13 has os.scandir."""

    def old() -> None: ...

    def new() -> None: ...

    class Holder:
        scan, other = staticmethod(old), staticmethod(repr)

    module = ModuleType(Holder.__module__)
    module.__dict__.update(Holder=Holder, scan=old)
    monkeypatch.setitem(sys.modules, "holder", module)
    replace_everywhere({id(old): (old, new)})
    assert module.scan is Holder.scan is new
    assert Holder.other is repr


def test_functions_fail_as_the_disks_do(notes: Notes) -> None:
    notes("""
        import os, shutil
        for wrong, error in (
            (lambda: os.rename("checkpoint-400", "checkpoint-500"), OSError),
            (lambda: os.rename("checkpoint-400", "checkpoint-400/inner"), OSError),
            (lambda: os.rename("script.py", "checkpoint-500"), IsADirectoryError),
            (lambda: os.rename("checkpoint-400", "script.py"), NotADirectoryError),
            (lambda: open("checkpoint-400", "w"), IsADirectoryError),
            (lambda: open("missing"), FileNotFoundError),
            (lambda: open("missing", "r+"), FileNotFoundError),
            (lambda: open("missing/file", "w"), FileNotFoundError),
            (lambda: open("script.py/file", "w"), NotADirectoryError),
            (lambda: os.open("missing", os.O_WRONLY), FileNotFoundError),
            (lambda: os.listdir("missing"), FileNotFoundError),
            (lambda: os.stat("checkpoint-400/missing"), FileNotFoundError),
            (lambda: os.remove("checkpoint-400"), IsADirectoryError),
            (lambda: os.symlink("a", "checkpoint-400"), FileExistsError),
            (lambda: os.link("script.py", "checkpoint-400"), FileExistsError),
            (lambda: shutil.rmtree("script.py"), NotADirectoryError),
            (lambda: shutil.rmtree("missing"), FileNotFoundError),
        ):
            try:
                wrong()
            except error as caught:
                assert caught.filename.split("/")[0] in ("missing", "script.py", "a") or "checkpoint" in caught.filename
                continue
            raise AssertionError(error)
        shutil.rmtree("missing", ignore_errors=True)
        os.rename("checkpoint-400", "checkpoint-400")
        assert len(os.listdir("checkpoint-400")) == len(os.listdir("checkpoint-500")) == 2
        shutil.rmtree("checkpoint-400")
        os.mkdir("checkpoint-400")
        assert os.listdir("checkpoint-400") == []
        """)


def test_without_an_overlay_a_child_process_is_refused(user: Path) -> None:
    notes = notes_of(
        """
        import subprocess
        for command in ("rm -r checkpoint-400", "mv checkpoint-500 best", "echo hello > child"):
            print(subprocess.run(command, shell=True).returncode)
        """,
        user,
        functions_of_python,
        needs_landlock=True,
    )
    assert "those that C++, Rust or another program writes by itself are refused" in notes


def test_a_child_process_changes_no_file_in_an_overlay(user: Path) -> None:
    notes = notes_of(
        """
        import subprocess
        subprocess.run("rm -r checkpoint-400; mv checkpoint-500 best; echo hello > child", shell=True, check=True)
        assert open("child").read() == "hello\\n"
        """,
        user,
        overlay_of,
    )
    assert "wrote 3 files and removed 4" in notes


@pytest.mark.parametrize("script", ["open('new', 'w').write('1')", "print(1)"])
def test_a_machine_without_overlays_is_named_whatever_the_script_writes(script: str, user: Path) -> None:
    notes = notes_of(script, user, functions_of_python)
    assert "This machine allows no overlay (Operation not permitted)" in notes
    assert "those that C++, Rust or another program writes by itself" in notes
    assert NOTICE in (user.parent / "scratch" / "output.txt").read_text()  # before the script starts


def test_an_overlay_and_a_script_that_writes_nothing_have_no_note(user: Path) -> None:
    assert notes_of("print(open('script.py').read())", user, overlay_of) == ""


def test_a_script_in_another_folder_runs_in_the_working_directory(user: Path) -> None:
    """As ``torchrun jobs/script.py``: both folders are protected."""
    script = "open('new', 'w'); open('jobs/new', 'w'); assert open('checkpoint-400/model.safetensors', 'rb').read()"
    assert "wrote 2 files and removed 0" in notes_of(script, user, overlay_of, name="jobs/script.py")


def test_a_file_in_the_root_is_written_for_the_script_alone(user: Path) -> None:
    """As root in a container, where ``--output_dir /output`` is usual."""
    path = f"/fsdp-bench-test-{os.getpid()}"
    notes = notes_of(
        f"import os; os.mkdir('{path}'); open('{path}/a', 'w').write('1'); open('{path}.txt', 'w')", user, overlay_of
    )
    assert "The script wrote 2 files" in notes
    assert not os.path.exists(path)
    assert not os.path.exists(f"{path}.txt")


def _mount_beside_a_silent_one(scratch: Path) -> None:
    """Mount as if a folder of the system were NFS without its server."""
    stat, listed = os.stat, [*overlay.mounts(), (SILENT, "nfs4")]

    def slow_stat(path: str, **keywords: Any) -> os.stat_result:
        if path == SILENT:
            time.sleep(600)
        return stat(path, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", slow_stat)
        patch.setattr(overlay, "mounts", lambda: listed)
        patch.setattr(overlay, "silent", partial(overlay.silent, seconds=0.1))
        overlay_of(scratch)


SILENT = "/usr/share"


def _mount_beside_two_that_can_have_none(scratch: Path) -> None:
    mount = Overlay._mount

    def some_mount(self: Overlay, source: str, place: str, kind: str | None, *arguments: Any) -> None:
        if kind == "overlay" and place in ("/etc", "/usr"):
            raise OSError(errno.EINVAL, "no overlay of this file system")
        mount(self, source, place, kind, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Overlay, "_mount", some_mount)
        overlay_of(scratch)


def test_folders_that_can_have_no_overlay_are_read_only_and_named(user: Path) -> None:
    script = """
        open("new", "w").write("1")
        try:
            open("/etc/fsdp-bench-test", "w")
        except OSError as error:
            print(error)
        """
    notes = notes_of(script, user, _mount_beside_two_that_can_have_none)
    assert "wrote 1 file and removed 0" in notes
    for place in ("/etc", "/usr"):
        assert f"{place} is read-only: its file system can have no overlay." in notes


def test_a_file_system_that_does_not_answer_is_named_and_not_waited_for(user: Path) -> None:
    notes = notes_of("open('new', 'w').write('1')", user, _mount_beside_a_silent_one)
    assert "wrote 1 file and removed 0" in notes
    assert f"{SILENT} does not answer, and has no overlay." in notes
    assert f"fsdp-bench: {SILENT} does not answer" in (user.parent / "scratch" / "output.txt").read_text()
