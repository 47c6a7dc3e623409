"""The exit codes of the command line."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How ``fsdp-bench`` ended, for scripts."""

    DONE = 0
    """Done; where fit was asked for: it fits, or that is unknown."""
    CRASHED = 1
    """A trial or a dry run failed by itself, a check found a difference, or fsdp-bench has a bug."""
    BAD_INPUT = 2
    """The user can correct it: the input, the machine or a file."""
    DOES_NOT_FIT = 3
    """Nothing of what was asked for fits."""
    INTERRUPTED = 130
    """Ctrl-C, SIGTERM or SIGHUP; the same command resumes. 128 + SIGINT, as shells have it."""
