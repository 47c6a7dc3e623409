"""An environment with a framework on top of one that has torch's CUDA build, and the source of its repository."""

import fcntl
import hashlib
import re
import subprocess
import sys
from pathlib import Path

from fsdp_bench.spec.errors import MachineError, shortened
from tools.frameworks.matrix import Framework, Release, Row

LAUNCHERS = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
"""Commands of the environment below, which would run without the framework: each with the module of its main()."""

_FOLDERS = "import sys; print(*(path for path in sys.path if path.endswith('site-packages')), sep='\\n')"


class Environments:
    """Environments and sources in a folder, made once. ``bases`` are Pythons with torch's CUDA build, by version."""

    def __init__(self, folder: Path, bases: dict[str, Path], sources: Path | None = None) -> None:
        self._folder, self._bases, self._sources = folder.resolve(), bases, sources

    def programs(self, framework: Framework, release: Release) -> Path:
        """Return the folder of programs of an environment. Raises MachineError if it cannot be made."""
        if (base := self._bases.get(release.torch)) is None:
            raise MachineError(f"torch {release.torch}: no Python with its CUDA build is given; --torch VERSION=PYTHON")
        if _has(base, release.requirements):
            return base.parent
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / "lock", "w") as lock:  # two tests may ask for one at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._made(framework, release, base)

    def _made(self, framework: Framework, release: Release, base: Path) -> Path:
        digest = hashlib.sha256(repr((release.requirements, release.torch, str(base))).encode()).hexdigest()[:8]
        home = self._folder / f"{_plain(framework.framework)}-{_plain(release.release)}-{digest}"
        programs = home / "bin"
        if not (home / "installed").exists():
            _run(sys.executable, "-m", "venv", "--clear", str(home))
            below = _run(str(base), "-c", _FOLDERS).strip()
            (next((home / "lib").iterdir()) / "site-packages" / "below.pth").write_text(below)
            constraint = home / "constraints.txt"
            constraint.write_text(f"torch=={release.torch}\n")
            _run(str(programs / "python"), "-m", "pip", "install", "-q", "-c", str(constraint), *release.requirements)
            for name, module in LAUNCHERS.items():
                text = f"#!{programs / 'python'}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
                (programs / name).write_text(text)
                (programs / name).chmod(0o755)
            (home / "installed").touch()
        return programs

    def source(self, row: Row, release: Release) -> Path | None:
        """Return a clone of the row's repository. Raises MachineError if there is none to be had."""
        if row.repository is None:
            return None
        name, tag = row.repository.rstrip("/").rpartition("/")[2], row.text(row.tag, release.release, 8)
        place = self._folder / "sources" / f"{name}-{_plain(tag) or 'head'}"
        if not place.exists():
            given = self._sources / name if self._sources is not None else None
            origin = str(given) if given is not None and given.exists() else row.repository
            partial = place.with_name(place.name + ".part")
            _run("rm", "-rf", str(partial))
            _run("git", "clone", "-q", "--filter=blob:none", origin, str(partial))
            if tag:
                _run("git", "-C", str(partial), "checkout", "-q", tag)
            partial.rename(place)
        return place


def _has(python: Path, requirements: tuple[str, ...]) -> bool:
    """Whether an interpreter has all requirements, ``name==version`` each, of its own."""
    return set(requirements) <= set(_run(str(python), "-m", "pip", "list", "--format=freeze").splitlines())


def _plain(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name).lower()


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise MachineError(f"{' '.join(words[:4])}: {shortened(said, 200)}")
    return done.stdout
