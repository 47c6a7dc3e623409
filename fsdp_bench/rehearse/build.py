"""The stand-in for NVIDIA's libraries: compiled for a torch, kept, and put before the real ones by the environment.

``python -m fsdp_bench.rehearse.build GPU FOLDER``, where GPU is a RehearsedGpu in JSON, and FOLDER takes the stand-in
where it cannot be kept, prints the environment variables with which other processes of this interpreter run on it. The
answer is a JSON object: variables and their values, or ``error`` and why this machine cannot rehearse. Rehearsed sweeps
ask so, because sweep may not import this package.
"""

import atexit
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fsdp_bench.rehearse.find_torch import Torch, find_torch
from fsdp_bench.rehearse.inside.forks import STAND_IN_NAMES
from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.errors import FsdpBenchError, MachineError, printable, shortened
from fsdp_bench.spec.files import private_folder
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu

SOURCES = Path(__file__).parent / "stand_in"
LIBRARY = "libstand_in.so"
DIGEST = "sha256"
"""The file with the library's digest: a cut library would end the script by a signal."""
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O1", "-fPIC", "-shared", "-w")
STATUS_BY_PREFIX = {"cuda": 801, "__cuda": 801, "cublas": 15, "cudnn": 3000}
"""The error that an unsupported function returns: cudaErrorNotSupported, and the same of cuBLAS and cuDNN."""
NEEDS_NO_GPU = re.compile(
    r"cublas(Lt)?(Get(Version(_v2)?|Property|CudartVersion|Status(Name|String))|Logger\w+|Xerbla)"
    r"|cudnnGet(Version|CudartVersion|(Last)?ErrorString|Property)"
)
"""Functions of cuBLAS and cuDNN that NVIDIA's own libraries answer as well without a GPU."""
LOWEST_CAPABILITY, HIGHEST_CAPABILITY = 7.0, 12.0
"""The compute capabilities that stand_in/settings.c knows."""


def build_stand_in(torch: Torch, otherwise: Path | None = None) -> Path:
    """Return the folder of the stand-in's libraries for a torch, compiled if it is not there yet.

    It is kept in the cache folder, by version of torch and content of the sources. Several processes may do this at
    once. Where nothing can be kept in private, it is compiled in ``otherwise``, by default a temporary folder that ends
    with this process. Raises MachineError without a C compiler, or if the compiler or the disk fails.
    """
    version = _version(torch)
    kept = private_folder("stand-in")
    if kept is not None:
        with suppress(OSError):
            return _kept_stand_in(torch, kept, version)
    try:
        folder = (otherwise or _temporary_folder()) / version
        if not _is_whole(folder):
            _build(torch, folder)
    except OSError as error:
        raise MachineError(
            f"cannot write the stand-in for NVIDIA's libraries: {error.strerror} (XDG_CACHE_HOME and TMPDIR say where)"
        ) from error
    return folder


def _kept_stand_in(torch: Torch, kept: Path, version: str) -> Path:
    folder = kept / version
    if not _is_whole(folder):
        with tempfile.TemporaryDirectory(dir=kept, prefix="building-") as temporary:
            built = Path(temporary) / version
            _build(torch, built)
            try:
                built.rename(folder)
            except OSError:
                if not _is_whole(folder):  # no other process was faster: what is there was damaged since
                    shutil.rmtree(folder)
                    built.rename(folder)
    return folder


def _build(torch: Torch, folder: Path) -> None:
    folder.mkdir()
    compile_stand_in(folder, torch.cuda_version, _asked_of_libraries(torch), folder.name)
    (folder / DIGEST).write_text(_digest(folder / LIBRARY))


def _is_whole(folder: Path) -> bool:
    try:
        return (folder / DIGEST).read_text() == _digest(folder / LIBRARY)
    except OSError:
        return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@cache
def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fsdp-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def compile_stand_in(folder: Path, cuda_version: int, names: Iterable[str], version: str) -> None:
    """Compile the stand-in into a folder. Those of the functions ``names`` that no source defines count calls and fail.

    Raises MachineError if there is no C compiler, or with the compiler's first error.
    """
    lacking = folder / "lacking.c"
    stubs = "".join(f"{_macro(name)}({name}, {_status(name)})\n" for name in sorted(names))
    lacking.write_text(f'#include "stand_in.h"\n{stubs}')
    sources = [str(source) for source in (*sorted(SOURCES.glob("*.c")), lacking)]
    defines = [f"-DCUDA_VERSION={cuda_version}", f'-DSTAND_IN_VERSION="{version}"', f"-I{SOURCES}"]
    command = [*_compiler(), *FLAGS, *defines, *sources, "-o", str(folder / LIBRARY), "-ldl", "-lpthread"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        said = (
            [line for line in ran.stderr.splitlines() if "error" in line] or ran.stderr.splitlines() or ["no message"]
        )
        raise MachineError(
            f"{command[0]} cannot compile the stand-in for NVIDIA's libraries: {shortened(said[0], 300)}"
        )
    for name in STAND_IN_NAMES:
        (folder / name).symlink_to(LIBRARY)


def stand_in_environment(
    folder: Path, gpu: RehearsedGpu, count: int = 1, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables with which a command runs on the stand-in, to be set over those of ``environment``.

    ``count`` is the number of GPUs in a node.

    Raises MachineError for a compute capability that the stand-in does not know.
    """
    capability = gpu.compute_capability
    if not LOWEST_CAPABILITY <= capability <= HIGHEST_CAPABILITY:
        known = f"{LOWEST_CAPABILITY} to {HIGHEST_CAPABILITY}"
        raise MachineError(f"{gpu.product_name}: rehearse knows compute capabilities {known}, not {capability}")
    return {
        "LD_PRELOAD": _joined(_preloaded(folder), environment.get("LD_PRELOAD")),
        "LD_LIBRARY_PATH": _joined(str(folder), environment.get("LD_LIBRARY_PATH")),
        "STAND_IN_NAME": gpu.product_name,
        "STAND_IN_DEVICES": str(count),
        "STAND_IN_BYTES": str(gpu.usable_bytes),
        "STAND_IN_CONTEXT_BYTES": str(gpu.kept_free_bytes),
        "STAND_IN_CAPABILITY": str(round(10 * capability)),
        "STAND_IN_MULTIPROCESSORS": str(gpu.num_multiprocessors),
        # Triton looks for libcuda.so here first; otherwise it would ask ldconfig, and find a real driver's.
        "TRITON_LIBCUDA_PATH": str(folder),
        # Inductor's autotuning allocates a buffer of the size of L2 and caches which variant was fastest. Without the
        # cache every run allocates what a first run does. The cache folder is our own: all variants are equally fast
        # here, and runs on a real GPU of the same name must not read that. Triton's is our own for the same reason.
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(private_folder("inductor") or folder / "inductor"),
        "TRITON_CACHE_DIR": str(private_folder("triton") or folder / "triton"),
    }


def environment_of(gpu: RehearsedGpu, otherwise: Path | None = None) -> dict[str, str]:
    """Return the variables for this interpreter and a GPU. Raises MachineError without CUDA's torch or a compiler."""
    variables = stand_in_environment(build_stand_in(find_torch(sys.executable), otherwise), gpu)
    return {**variables, "CUDA_VISIBLE_DEVICES": "0"}  # a job's own choice is of GPUs of this machine


def _version(torch: Torch) -> str:
    """Return a folder name for a torch and all that decides what is compiled for it."""
    digest = hashlib.sha256()
    for source in (Path(__file__), *sorted(SOURCES.glob("*.[ch]"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return re.sub(r"[^\w.+-]", "_", f"torch-{torch.version}-cuda-{torch.cuda}-{digest.hexdigest()[:12]}")


def _asked_of_libraries(torch: Torch) -> set[str]:
    """Return what torch's libraries refer to of libcudart, cuBLAS and cuDNN, and all that these define.

    Other packages call functions that torch does not. NVIDIA's own would run on handles that the stand-in made.
    """
    names = set[str]()
    for library in sorted((torch.folder / "lib").glob("lib*.so")):
        names |= symbols_of(library).undefined
    for library in _nvidia_libraries(torch):
        names |= symbols_of(library).defined
    pattern = re.compile(r"(__)?cuda[A-Z]\w*|cu(blas|dnn)[A-Z]\w*")
    return {name for name in names if pattern.fullmatch(name) and not NEEDS_NO_GPU.fullmatch(name)}


def _nvidia_libraries(torch: Torch) -> list[Path]:
    """Return NVIDIA's libcudart, cuBLAS and cuDNN beside torch: in wheels of NVIDIA, in torch's own, in conda's."""
    site, found = torch.folder.parent, set[Path]()
    for name in ("libcudart", "libcublas", "libcublasLt", "libcudnn"):
        found |= {*site.glob(f"nvidia/*/lib/{name}.so*"), *site.glob(f"../../{name}.so*")}
        found |= {*torch.folder.glob(f"lib/{name}.so*"), *torch.folder.glob(f"lib/{name}-*")}
    return sorted(found)


def _macro(name: str) -> str:
    """Return the macro of stand_in.h for an unsupported function; --unsupported warn lets cuBLAS skip computing."""
    computes = name.startswith("cublas") and not re.search("Create|Get|Alloc|Init", name)
    return "UNSUPPORTED_WORK" if computes else "UNSUPPORTED"


def _status(name: str) -> int:
    return next(status for prefix, status in STATUS_BY_PREFIX.items() if name.startswith(prefix))


def _compiler() -> list[str]:
    """Return the command of the machine's C compiler: $CC, or the first of the usual ones."""
    given = os.environ.get("CC", "").split()
    if given:
        if shutil.which(given[0]):
            return given
        raise MachineError(
            f"CC is {printable(given[0])}, which cannot be run; rehearse compiles a small C library once"
        )
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise MachineError(
        "there is no C compiler; rehearse compiles a small C library once: install gcc or clang, or set CC"
    )


def _preloaded(folder: Path) -> str:
    """Return the value of LD_PRELOAD: the library's path, or its name alone if the path has a space (ld.so(8))."""
    if ":" in str(folder) or ";" in str(folder):
        raise MachineError(f"the path {printable(str(folder))} contains ':' or ';', which LD_LIBRARY_PATH cannot name")
    return LIBRARY if re.search(r"\s", str(folder)) else str(folder / LIBRARY)


def _joined(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first


@dataclass(frozen=True)
class Symbols:
    """The names in a library's dynamic symbol table, without versions."""

    defined: set[str] = field(default_factory=set)
    weak: set[str] = field(default_factory=set)
    """Those of the defined ones that another definition may replace."""
    undefined: set[str] = field(default_factory=set)
    """The symbols that the library expects from others."""


def symbols_of(library: Path) -> Symbols:
    """Read dynamic symbols by nm, none of what is no library. Raises MachineError without nm."""
    asked = subprocess.run([*_compiler(), "-print-prog-name=nm"], capture_output=True, text=True, check=False)
    try:
        words = [asked.stdout.strip() or "nm", "-D", str(library)]
        listed = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise MachineError(f"nm cannot be run: {error.strerror}; install binutils beside the C compiler") from None
    symbols = Symbols()
    for line in listed.splitlines():
        *_address, kind, name = line.split()
        name = name.partition("@")[0]
        if kind in "Uvw":
            symbols.undefined.add(name)
            continue
        symbols.defined.add(name)
        if kind in "VW":
            symbols.weak.add(name)
    return symbols


def main() -> None:
    """Print the variables, or the error."""
    try:
        answer = environment_of(from_json(sys.argv[1].encode(), RehearsedGpu), Path(sys.argv[2]))
    except FsdpBenchError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
