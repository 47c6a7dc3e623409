"""The reports that an interrupted question had found, so that the same command resumes and repeats nothing.

They are files in the private cache folder, one for each rehearsal, and go once the question is answered. A report
counts only if nothing of this has changed: the command, its environment, the hardware, this version, installed
packages, and, by content, the files that the command names, config.json of its checkpoints, and the user's modules.
Others that it opens are not known.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from fsdp_bench.plan.rehearse_command import CommandToRehearse
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.files import private_folder, write_atomically
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalReport
from fsdp_bench.version import __version__

KEPT_SECONDS = 7 * 24 * 3600.0
"""The time after which the reports of a question that nobody asked again are removed."""

OF_SHELLS = ("_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES")
"""Variables that change from one command of a shell to the next, and decide nothing."""


class _Kept(msgspec.Struct, frozen=True):
    """A report, and the user's files on which it depends."""

    report: RehearsalReport
    digests: dict[str, str | None]


class KeptReports:
    """The reports of one question. Without a private cache folder nothing is kept."""

    def __init__(self, question: object) -> None:
        """``question``: whatever tells it from others, as JSON takes it."""
        cache = private_folder("rehearsals")
        digest = hashlib.sha256(to_json([__version__, os.getcwd(), question])).hexdigest()
        self._folder = None if cache is None else cache / digest[:32]
        for folder in cache.iterdir() if cache is not None else ():
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > KEPT_SECONDS:
                    shutil.rmtree(folder)

    def find(self, asked: CommandToRehearse, rank: int) -> RehearsalReport | None:
        """Return the report of a rank; None if there is none, or what decides it has changed since."""
        if self._folder is None:
            return None
        with suppress(OSError, SpecError):
            kept = from_json((self._folder / _name(asked, rank)).read_bytes(), _Kept)
            if kept.digests == _digests(kept.digests):
                return kept.report
        return None

    def keep(self, asked: CommandToRehearse, rank: int, report: RehearsalReport, began: float) -> None:
        """Keep a report, if there is room for it, and none of the user's files was changed after it ``began``."""
        if self._folder is None:
            return
        with suppress(OSError):
            if any(os.path.getmtime(file) > began for file in report.user_files if os.path.exists(file)):
                return
            self._folder.mkdir(mode=0o700, exist_ok=True)
            kept = _Kept(report, _digests([*report.user_files, *_libraries(asked)]))
            write_atomically(self._folder / _name(asked, rank), to_json(kept))

    def forget(self) -> None:
        """Remove all reports: the question is answered."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _name(asked: CommandToRehearse, rank: int) -> str:
    described: list[object] = [
        str(asked.command.python),
        asked.command.interpreter_options,
        asked.command.launcher.value,
    ]
    described += [asked.command.launcher_words, dict(asked.command.environment), asked.options, rank]
    described += [asked.stand_in, {name: value for name, value in os.environ.items() if name not in OF_SHELLS}]
    return hashlib.sha256(to_json(described)).hexdigest()[:32] + ".json"


def _libraries(asked: CommandToRehearse) -> list[str]:
    """Return the folders of installed packages, whose times change when one is installed."""
    return [str(path) for path in asked.command.python.parent.parent.glob("lib/python*/site-packages")]


def _digests(files: Iterable[str]) -> dict[str, str | None]:
    return {file: _digest(Path(file)) for file in files}


def _digest(path: Path) -> str | None:
    try:
        if path.is_dir():
            return str(path.stat().st_mtime_ns)
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
