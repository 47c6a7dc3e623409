"""What a sweep runs: trials, each with an ID that is a hash of everything that decides its outcome."""

from __future__ import annotations

import hashlib

import msgspec

from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.record import MEASUREMENT_REVISION, Device, RunPlan, TrialSpec
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.sweep.machine import torch_version


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial of a sweep, and why it is not run when it is not."""

    spec: TrialSpec
    skip_reason: str | None = None


class SweepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep file, resolved on one machine."""

    name: str
    launcher: str
    device: Device
    trials: tuple[Trial, ...]
    """In the order in which they run."""
    source: str
    """The sweep file's text."""


def trial_id(shape: ModelShape, setup: TrainSetup, run: RunPlan, device: Device) -> str:
    """Hash everything that decides a trial's outcome, except its machine (a folder) and its time limit.

    The time limit decides only whether there is an outcome: a trial that timed out runs again under a longer one.
    """
    decisive = {
        "model": {key: value for key, value in to_builtins(shape).items() if key != "name"},
        "setup": to_builtins(setup),
        "run": {key: value for key, value in to_builtins(run).items() if key != "timeout_seconds"},
        "device": device,
        "torch": torch_version(),
        "revision": MEASUREMENT_REVISION,
    }
    return hashlib.sha256(msgspec.json.encode(decisive, order="sorted")).hexdigest()[:12]
