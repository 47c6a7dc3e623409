"""The torch that an interpreter would import, and the stand-in that is compiled for it, kept, and preloaded."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdp_bench.rehearse import build
from fsdp_bench.rehearse.build import build_stand_in, stand_in_environment, symbols_of
from fsdp_bench.rehearse.find_torch import ASKED, Torch, find_torch
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import MachineError
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.conftest import message_of
from tests.rehearse.conftest import gpu_of


def interpreter(folder: Path, *, version: str | None, cuda: str | None = None, platform: str = "linux-x86_64") -> str:
    """Write a stand-in for an interpreter that answers as one with that torch would; None: without torch."""
    torch = folder / "site" / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text(
        "from typing import Optional\n\n__all__ = ['__version__', 'debug', 'cuda']\n"
        f"__version__ = {version!r}\ndebug = False\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
    )
    if cuda:
        (torch / "lib" / "libtorch_cuda.so").touch()
    python = folder / "python"
    answer = json.dumps([platform, str(torch) if version else None])
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(("cuda", "number"), [("12.4", 12040), ("12.8", 12080), ("13.0", 13000)])
def test_the_cuda_build_is_found_with_cudas_version_as_nvidia_counts_it(tmp_path: Path, cuda: str, number: int) -> None:
    torch = find_torch(interpreter(tmp_path, version="2.9.1+cu", cuda=cuda))
    assert (torch.version, torch.cuda, torch.cuda_version) == ("2.9.1+cu", cuda, number)
    assert torch.folder == tmp_path / "site" / "torch"


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ({"version": None}, "has no torch; install its CUDA build"),
        ({"version": "2.13.0+cpu"}, "built without CUDA; install the CUDA build"),
        ({"version": "2.3.1+cu121", "cuda": "12.1"}, "rehearse needs 2.4 or newer"),
        ({"version": "2.13.0", "platform": "macosx-14-arm64"}, "linux-x86_64 alone"),
        ({"version": "2.13.0+cu130", "cuda": "13.0", "platform": "linux-aarch64"}, "linux-x86_64 alone"),
        ({"version": "strange", "cuda": "13.0"}, "has torch strange"),
    ],
)
def test_a_torch_that_will_not_do_is_one_line(tmp_path: Path, torch: dict[str, str], said: str) -> None:
    assert said in message_of(lambda: find_torch(interpreter(tmp_path, **torch)), MachineError)


def test_no_interpreter_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"cannot run .*nowhere"):
        find_torch(str(tmp_path / "nowhere"))
    with pytest.raises(MachineError, match="no Python interpreter that works"):
        find_torch("/bin/false")


def test_a_real_interpreter_is_asked_without_importing_torch() -> None:
    ran = subprocess.run([sys.executable, "-X", "importtime", "-c", ASKED], capture_output=True, text=True, check=True)
    assert " torch" not in ran.stderr
    assert len(json.loads(ran.stdout)) == 2


def test_modules_of_the_current_folder_are_not_run_to_find_torch(tmp_path: Path) -> None:
    """The command itself would not import them: a script's folder is on Python's path, and not the current one."""
    for name in ("json", "sysconfig", "importlib", "torch"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    ran = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert len(json.loads(ran.stdout)) == 2
    assert not (tmp_path / "ran").exists()


needs_compiler = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C compiler")


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Torch:
    """A torch without libraries, and a cache folder that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    return Torch("python", "2.13.0+cu130", "13.0", tmp_path / "torch")


@needs_compiler
@pytest.mark.parametrize("cuda_version", [12040, pytest.param(12080, marks=pytest.mark.slow), 13000])
def test_functions_without_a_source_are_weak_stubs_beside_those_with_one(
    compiled: Callable[[int], Path], cuda_version: int
) -> None:
    folder = compiled(cuda_version)
    symbols = symbols_of(folder / build.LIBRARY)
    assert {"cudaNewestFunction", "cublasNewestFunction", "ncclGetUniqueId", "cuStreamWriteValue32_v2"} <= symbols.weak
    assert {"cudaMalloc", "cublasGemmEx", "cuMemCreate", "nvmlInit_v2", "stand_in_on_read"} <= symbols.defined
    assert "cudaMalloc" not in symbols.weak
    assert all((folder / name).resolve().name == build.LIBRARY for name in build.STAND_IN_NAMES)


@needs_compiler
def test_nothing_but_nvidias_names_is_visible(compiled: Callable[[int], Path]) -> None:
    families = ("cu", "__cuda", "nv", "nccl", "stand_in_")
    strange = {name for name in symbols_of(compiled(13000) / build.LIBRARY).defined if not name.startswith(families)}
    answered_for_torch = "_ZN3c104impl21dispatch_mode_enabledEv"  # trace.c: the observer's own mode does not count
    assert strange <= {"_init", "_fini", "_edata", "_end", "__bss_start", answered_for_torch}


@needs_compiler
def test_several_processes_build_one_folder_and_the_next_finds_it(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(build_stand_in, [torch] * 2))
    (folder,) = folders
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    monkeypatch.setenv("PATH", "")
    assert build_stand_in(torch) == folder


@pytest.fixture
def compiles_at_once(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that a stand-in was compiled into; what it contains is one word."""
    folders: list[Path] = []

    def compile_stand_in(folder: Path, *_: object) -> None:
        (folder / build.LIBRARY).write_text("compiled")
        folders.append(folder)

    monkeypatch.setattr(build, "compile_stand_in", compile_stand_in)
    return folders


@pytest.mark.parametrize("left", [None, "comp"])
def test_a_library_that_was_lost_or_cut_is_compiled_again(
    torch: Torch, compiles_at_once: list[Path], left: str | None
) -> None:
    """A cleaner of caches removes files that nobody has read for long, and leaves their folders."""
    library = build_stand_in(torch) / build.LIBRARY
    library.unlink()
    if left is not None:
        library.write_text(left)
    assert build_stand_in(torch) / build.LIBRARY == library
    assert library.read_text() == "compiled"
    assert len(compiles_at_once) == 2


def test_where_nothing_can_be_kept_it_is_compiled_for_this_command(
    torch: Torch, compiles_at_once: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "own").mkdir()
    folder = build_stand_in(torch, tmp_path / "own")
    assert folder.parent == tmp_path / "own"
    assert build_stand_in(torch, tmp_path / "own") == folder
    assert len(compiles_at_once) == 1
    with pytest.raises(MachineError, match="XDG_CACHE_HOME and TMPDIR say where"):
        build_stand_in(torch, tmp_path / "nowhere")


def test_without_a_compiler_one_line_says_what_to_install(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(MachineError, match=r"no C compiler; .*install gcc or clang"):
        build_stand_in(torch)
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(MachineError, match="CC is no-such-compiler"):
        build_stand_in(torch)


def test_a_compiler_that_fails_is_one_line(torch: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'a.c:1: error: out of luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(MachineError, match=r"cannot compile .*out of luck"):
        build_stand_in(torch)
    assert list((tmp_path / "cache" / "fsdp-bench" / "stand-in").iterdir()) == []


def test_the_environment_names_the_gpu_and_keeps_what_is_preloaded(tmp_path: Path) -> None:
    given = {"LD_PRELOAD": "libjemalloc.so", "LD_LIBRARY_PATH": "/opt/lib"}
    variables = stand_in_environment(tmp_path, gpu_of(8.0), 8, given)
    assert variables["LD_PRELOAD"] == f"{tmp_path / build.LIBRARY}:libjemalloc.so"
    assert variables["LD_LIBRARY_PATH"] == f"{tmp_path}:/opt/lib"
    assert variables["STAND_IN_DEVICES"] == "8"
    assert variables["STAND_IN_CAPABILITY"] == "80"
    assert variables["STAND_IN_BYTES"] == str(80 << 30)


def test_paths_that_ld_preload_cannot_name(tmp_path: Path) -> None:
    variables = stand_in_environment(tmp_path / "a folder", gpu_of(8.0), environment={})
    assert variables["LD_PRELOAD"] == build.LIBRARY  # found by LD_LIBRARY_PATH, which may contain spaces
    with pytest.raises(MachineError, match="contains ':'"):
        stand_in_environment(tmp_path / "a:b", gpu_of(8.0), environment={})


def test_an_unknown_compute_capability_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"7\.0 to 12\.0, not 6\.1"):
        stand_in_environment(tmp_path, gpu_of(6.1), environment={})


def test_a_rehearsed_sweep_is_given_the_gpu_of_the_catalogue(
    torch: Torch, compiles_at_once: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_torch", lambda _python: torch)
    found = build.environment_of(rehearsed_gpu("A10G", "1GiB"))
    assert found["STAND_IN_NAME"] == "NVIDIA A10G"
    assert int(found["STAND_IN_BYTES"]) == 22587 << 20  # the catalogue's
    assert int(found["STAND_IN_CONTEXT_BYTES"]) == 1 << 30
    assert (found["STAND_IN_CAPABILITY"], found["STAND_IN_MULTIPROCESSORS"]) == ("86", "80")
    assert found["LD_PRELOAD"].endswith(f"/{compiles_at_once[0].name}/{build.LIBRARY}")


def test_what_prevents_a_rehearsal_is_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(build.sys, "argv", ["build", to_json(rehearsed_gpu("A10G")).decode(), "/nowhere"])
    build.main()
    assert "cannot run /nowhere/python to look for torch" in json.loads(capsys.readouterr().out)["error"]
