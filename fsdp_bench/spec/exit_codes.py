"""The exit codes of the command line."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of ``fsdp-bench``, for scripts."""

    DONE = 0
    """Done. If the question was whether something fits: it fits, or that is unknown."""
    CRASHED = 1
    """A trial or a dry run crashed, a check found a difference, or fsdp-bench has a bug."""
    BAD_INPUT = 2
    """An error that the user can correct: in the input, the machine or a file."""
    DOES_NOT_FIT = 3
    """Nothing of what was asked for fits."""
    INTERRUPTED = 130
    """Ctrl-C, SIGTERM, SIGHUP or a lost node. The same command resumes. 130 is 128 + SIGINT, as in shells."""
