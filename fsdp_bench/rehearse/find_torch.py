"""The torch that an interpreter would import, found without importing it."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fsdp_bench.spec.errors import MachineError, printable

OLDEST_TORCH = (2, 4)
"""2.4 and 2.5 because published measurements were made with them: results/rehearsed/published."""
PLATFORM = "linux-x86_64"
ASKED = """
import sys
sys.path[:] = [place for place in sys.path if place]  # -c puts the current folder there, and a script does not
import importlib.util, json, os, sysconfig
spec = importlib.util.find_spec("torch")
folder = os.path.dirname(spec.origin) if spec and spec.origin else None
print(json.dumps([sysconfig.get_platform(), folder]))
"""


@dataclass(frozen=True)
class Torch:
    """PyTorch's CUDA build, as an interpreter would import it."""

    python: str
    version: str
    """As torch.__version__: ``2.13.0+cu130``."""
    cuda: str
    """As torch.version.cuda: ``13.0``."""
    folder: Path
    """The package's folder, which holds ``version.py`` and ``lib``."""

    @property
    def cuda_version(self) -> int:
        """CUDA's version as NVIDIA's headers count: 13000 for 13.0."""
        major, minor = self.cuda.split(".")[:2]
        return int(major) * 1000 + int(minor) * 10


def find_torch(python: str) -> Torch:
    """Find the CUDA build of torch that ``python``, which runs once, would import.

    Raises MachineError without one, for one older than 2.4, and if the platform is not Linux on x86-64.
    """
    platform, folder = _ask(python)
    if platform != PLATFORM:
        raise MachineError(f"rehearse runs on {PLATFORM} alone, and {python} is built for {platform}")
    if folder is None:
        raise MachineError(f"{python} has no torch; install its CUDA build: {python} -m pip install torch")
    version, cuda = _versions(folder / "version.py")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < OLDEST_TORCH:
        raise MachineError(f"{python} has torch {version}; rehearse needs 2.4 or newer")
    if cuda is None or not (folder / "lib" / "libtorch_cuda.so").exists():
        raise MachineError(
            f"{python} has torch {version}, which is built without CUDA; install the CUDA build of that version, which "
            "pytorch.org/get-started names for Linux, pip and CUDA; it needs no GPU"
        )
    return Torch(python, version, cuda, folder)


def _ask(python: str) -> tuple[str, Path | None]:
    """Return the platform of an interpreter and the folder of its torch."""
    try:
        ran = subprocess.run([python, "-c", ASKED], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"cannot run {printable(python)} to look for torch: {error}") from error
    try:
        platform, folder = json.loads(ran.stdout)
    except ValueError:
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise MachineError(f"{printable(python)} is no Python interpreter that works: {printable(last)}") from None
    return platform, None if folder is None else Path(folder)


def _versions(file: Path) -> tuple[str, str | None]:
    """Return ``__version__`` and ``cuda`` of torch/version.py, which assigns strings and None."""
    try:
        text = file.read_text()
    except OSError as error:
        raise MachineError(f"cannot read which torch this is: {error}") from error
    values = dict(re.findall(r"^(\w+)(?:\s*:[^=\n]+)?\s*=\s*'([^'\n]*)'", text, re.M))
    return values.get("__version__", "unknown"), values.get("cuda")
