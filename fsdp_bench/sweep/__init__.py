"""Sweeps: trials as subprocesses, results as files. No torch.

Read in this order:
    config/          from a sweep file to its trials and their IDs
    start.py         sweep(), and open_session(): reads a sweep file; --only and --part
    session.py       runs the trials or searches of one sweep file
    launchers/       starts a trial's ranks, on one node or several
    run/             runs trials, applies the time limit, decides the outcome
    results/         records on disk, and the tables made of them
    frontier/        searches the largest model with real trials
    progress.py      how far a sweep is, for fsdp-bench status
    submit.py        a sweep as a job of Slurm
    machine.py       CPU, GPUs, memory and versions of this machine
    gpu_links.py     the links between its GPUs, and to the host
    calibration.py   fsdp-bench calibrate: measures this machine
    diagnosis.py     fsdp-bench doctor: what a sweep would use; this machine as entries of the catalogue
    dry_run.py       starts dry runs in subprocesses

The function ``fsdp_bench.sweep()`` has this package's name, so the package itself can be called.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that can be called: the public function and the package have the same name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run a sweep file: see ``fsdp_bench.sweep.start.sweep``."""
        from fsdp_bench.sweep.start import sweep

        return sweep(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
