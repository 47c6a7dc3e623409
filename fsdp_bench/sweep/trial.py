"""What a sweep runs: trials, each with an ID that is a hash of everything that decides its outcome."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec.structs import replace

from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.record import MEASUREMENT_REVISION, Device, RunPlan, TrialSpec
from fsdp_bench.spec.setup import Offload, TrainSetup
from fsdp_bench.sweep.machine import Machine, torch_version


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial of a sweep, and why it is not run when it is not."""

    spec: TrialSpec
    skip_reason: str | None = None

    @property
    def label(self) -> str:
        """The trial in one short line."""
        return label_of(self.spec.model, self.spec.setup)


class SweepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep file, resolved on one machine."""

    name: str
    launcher: str
    device: Device
    trials: tuple[Trial, ...]
    """In the order in which they run."""
    source: str
    """The sweep file's text."""


def label_of(shape: ModelShape, setup: TrainSetup) -> str:
    """Return what is trained and how, in one short line."""
    words = [shape.name, f"world {setup.world_size}", setup.strategy.value, setup.api.value]
    words += [str(setup.precision), f"checkpointing {setup.checkpointing.value}"]
    if setup.offload is Offload.PARAMS:
        words.append("offload")
    return " ".join(words)


def resolved_text(plan: SweepPlan, machine: Machine) -> str:
    """Return the sweep file's text with, as comments, what it was resolved to on a machine: sizes, IDs, order."""
    lines = [plan.source.rstrip(), "", f"# Resolved on {machine.describe()}, device {plan.device}:"]
    lines += [f"# {shape}" for shape in dict.fromkeys(trial.spec.model.describe() for trial in plan.trials)]
    for trial in plan.trials:
        lines.append(
            f"# {trial.spec.id} {trial.label}" + (f"; skipped: {trial.skip_reason}" if trial.skip_reason else "")
        )
    return "\n".join(lines) + "\n"


def keeping(plan: SweepPlan, trace: bool, snapshot: bool) -> SweepPlan:
    """Return a plan whose trials keep such files. Their IDs are the same: a file decides nothing."""
    specs = [replace(trial.spec, keep_trace=trace, keep_snapshot=snapshot) for trial in plan.trials]
    trials = (replace(trial, spec=spec) for trial, spec in zip(plan.trials, specs, strict=True))
    return replace(plan, trials=tuple(trials))


def trial_id(shape: ModelShape, setup: TrainSetup, run: RunPlan, device: Device) -> str:
    """Hash everything that decides a trial's outcome, except its machine (a folder) and its time limit.

    The time limit decides only whether there is an outcome: a trial that timed out runs again under a longer one.
    A plan without what earlier versions did not know has the ID that it had then.
    """
    run_fields = {key: value for key, value in to_builtins(run).items() if key != "timeout_seconds"}
    for field in ("steps_without_communication", "emulate", "backend", "attention"):
        if not run_fields[field]:
            del run_fields[field]
    decisive = {
        "model": {key: value for key, value in to_builtins(shape).items() if key != "name"},
        "setup": to_builtins(setup),
        "run": run_fields,
        "device": device,
        "torch": torch_version(),
        "revision": MEASUREMENT_REVISION,
    }
    return hashlib.sha256(msgspec.json.encode(decisive, order="sorted")).hexdigest()[:12]
