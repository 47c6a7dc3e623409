"""fsdp-bench: which FSDP setting, how large a model, how fast.

One call each, with names as text or as objects; sizes are in bytes, times in seconds:

    estimate(model, ...)          memory, fit and time of a setup; needs no torch
    largest_model(...)            the largest model that fits; needs no torch
    plan_training(model, ...)     which servers, how many, which setting, how long, at what price; needs no torch
    compare(a, b)                 which bytes and seconds differ between two answers or results; needs no torch
    dry_run(model, ...)           PyTorch's own FSDP code as rank 0 of N, on tensors without data
    rehearse(command, each=...)   a real training command with several values, without a GPU, as rows
    rehearse_command(command)     one rank of such a command, with all that was seen of it
    sweep(file)                   measure every trial of a sweep file on this machine
    load_results(folder)          measured trials as a table
    fsdp(module, ...)             wrap a module, as the sweep does
    gpu(name), server(name), model(name)   the catalogue

Names load on first use, so that ``import fsdp_bench`` needs no torch and takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_bench.version import __version__ as __version__

if TYPE_CHECKING:
    from fsdp_bench.catalog.loader import gpus as gpus
    from fsdp_bench.catalog.loader import models as models
    from fsdp_bench.catalog.loader import servers as servers
    from fsdp_bench.catalog.lookup import gpu as gpu
    from fsdp_bench.catalog.lookup import model as model
    from fsdp_bench.catalog.lookup import server as server
    from fsdp_bench.plan.ask import estimate as estimate
    from fsdp_bench.plan.ask import largest_model as largest_model
    from fsdp_bench.plan.compare.comparison import Comparison as Comparison
    from fsdp_bench.plan.compare.comparison import compare as compare
    from fsdp_bench.plan.prediction import Prediction as Prediction
    from fsdp_bench.plan.purchase.planner import Plan as Plan
    from fsdp_bench.plan.purchase.planner import plan_training as plan_training
    from fsdp_bench.plan.rehearsal import Rehearsal as Rehearsal
    from fsdp_bench.plan.rehearse_command import rehearse_command as rehearse_command
    from fsdp_bench.plan.script.each import rehearse as rehearse
    from fsdp_bench.plan.search.search import LargestModel as LargestModel
    from fsdp_bench.rehearse.run import RehearsalError as RehearsalError
    from fsdp_bench.spec.calibration_profile import Profile as Profile
    from fsdp_bench.spec.calibration_profile import read_profile as read_profile
    from fsdp_bench.spec.errors import FsdpBenchError as FsdpBenchError
    from fsdp_bench.spec.errors import MachineError as MachineError
    from fsdp_bench.spec.errors import ResultsError as ResultsError
    from fsdp_bench.spec.errors import SpecError as SpecError
    from fsdp_bench.spec.errors import SweepFileError as SweepFileError
    from fsdp_bench.spec.errors import UserError as UserError
    from fsdp_bench.spec.errors import WrapError as WrapError
    from fsdp_bench.spec.hardware import Gpu as Gpu
    from fsdp_bench.spec.hardware import Hardware as Hardware
    from fsdp_bench.spec.hardware import Server as Server
    from fsdp_bench.spec.model import Family as Family
    from fsdp_bench.spec.model import ModelShape as ModelShape
    from fsdp_bench.spec.rank_report import Outcome as Outcome
    from fsdp_bench.spec.record import RunPlan as RunPlan
    from fsdp_bench.spec.record import TrialRecord as TrialRecord
    from fsdp_bench.spec.setup import Api as Api
    from fsdp_bench.spec.setup import BackwardPrefetch as BackwardPrefetch
    from fsdp_bench.spec.setup import Checkpointing as Checkpointing
    from fsdp_bench.spec.setup import Loss as Loss
    from fsdp_bench.spec.setup import Offload as Offload
    from fsdp_bench.spec.setup import OptimizerKind as OptimizerKind
    from fsdp_bench.spec.setup import Precision as Precision
    from fsdp_bench.spec.setup import ShardingStrategy as ShardingStrategy
    from fsdp_bench.spec.setup import TrainSetup as TrainSetup
    from fsdp_bench.spec.setup import Wrap as Wrap
    from fsdp_bench.spec.subprocesses.dry_run import DryRunResult as DryRunResult
    from fsdp_bench.sweep.dry_run import DryRunError as DryRunError
    from fsdp_bench.sweep.dry_run import dry_run as dry_run
    from fsdp_bench.sweep.results.load import load_results as load_results
    from fsdp_bench.sweep.session import SweepResults as SweepResults
    from fsdp_bench.sweep.start import sweep as sweep
    from fsdp_bench.train.wrapping.wrap import fsdp as fsdp

_HOMES = {
    "catalog.loader": "gpus models servers",
    "catalog.lookup": "gpu model server",
    "plan.ask": "estimate largest_model",
    "plan.compare.comparison": "Comparison compare",
    "plan.prediction": "Prediction",
    "plan.purchase.planner": "Plan plan_training",
    "plan.rehearsal": "Rehearsal",
    "plan.rehearse_command": "rehearse_command",
    "plan.script.each": "rehearse",
    "plan.search.search": "LargestModel",
    "rehearse.run": "RehearsalError",
    "spec.calibration_profile": "Profile read_profile",
    "spec.errors": "FsdpBenchError MachineError ResultsError SpecError SweepFileError UserError WrapError",
    "spec.hardware": "Gpu Hardware Server",
    "spec.model": "Family ModelShape",
    "spec.rank_report": "Outcome",
    "spec.record": "RunPlan TrialRecord",
    "spec.setup": "Api BackwardPrefetch Checkpointing Loss Offload OptimizerKind Precision ShardingStrategy TrainSetup"
    " Wrap",
    "spec.subprocesses.dry_run": "DryRunResult",
    "sweep.dry_run": "DryRunError dry_run",
    "sweep.results.load": "load_results",
    "sweep.session": "SweepResults",
    "sweep.start": "sweep",
    "train.wrapping.wrap": "fsdp",
}
"""The public names by the module that each comes from; the imports above say the same to type checkers."""

_HOME_OF = {name: f"fsdp_bench.{home}" for home, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fsdp_bench' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
