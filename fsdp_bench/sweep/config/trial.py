"""Trials of a sweep, their labels and IDs. One is done when ``trials/ID.json`` is there (results/store.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.model_code import ModelCode, TrainedModel
from fsdp_bench.spec.record import MEASUREMENT_REVISION, Device, RunPlan, TrialSpec
from fsdp_bench.spec.setup import FIELDS, Offload, TrainSetup
from fsdp_bench.sweep.config.sweep_file import SweepFile
from fsdp_bench.sweep.machine import torch_version

T = TypeVar("T")


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial of a sweep; ``skip_reason`` says why it is not run."""

    spec: TrialSpec
    skip_reason: str | None = None

    @property
    def label(self) -> str:
        """The model and the setup in one short line."""
        return label_of(self.spec.model, self.spec.setup, alone=self.spec.run.alone)


@dataclass(frozen=True)
class SweepPlan(Generic[T]):
    """The cells of a sweep file, resolved on one machine: trials, or with [frontier] searches."""

    file: SweepFile
    cells: tuple[T, ...]
    """In the order in which they run."""
    needing_gpu: tuple[str, ...] = ()
    """Descriptions of further cells, whose sizes depend on a GPU that this machine lacks."""

    def keep(self, cells: Iterable[T]) -> SweepPlan[T]:
        """Return the plan with these cells alone."""
        return SweepPlan(self.file, tuple(cells), self.needing_gpu)


def label_of(shape: TrainedModel, setup: TrainSetup, *, alone: str = "") -> str:
    """Return the model and the setup in one short line. ``alone`` is how rank 0 runs alone, if it does."""
    world = f"world {setup.world_size} {alone}".rstrip()
    strategy = setup.strategy.value + (f" ({setup.shard_group_size})" if setup.strategy.is_hybrid else "")
    parts = [shape.name, world, strategy, setup.api.value]
    parts += [str(setup.precision), f"checkpointing {setup.checkpointing.value}"]
    if setup.offload is not Offload.NONE:
        parts.append("offload" if setup.offload is Offload.PARAMS else "offload optimizer")
    return " ".join(parts)


def distinct_labels(cells: Sequence[tuple[TrainedModel, TrainSetup, str]]) -> list[str]:
    """Return the labels of trials, with all fields in which these trials differ; sizes, and what is not the default.

    A cell is a trial's model, its setup, and how rank 0 runs alone (RunPlan.alone).
    """
    setups = [setup for _, setup, _ in cells]
    unlabelled = (one for one in FIELDS.values() if not one.labelled)
    fields = [one for one in unlabelled if len({getattr(setup, one.name) for setup in setups}) > 1]
    named = {shape.name: shape for shape, _, _ in cells}
    is_ambiguous = any(named[shape.name] != shape for shape, _, _ in cells)
    labels = []
    for shape, setup, alone in cells:
        said = [one for one in fields if one.is_size or getattr(setup, one.name) != one.default]
        parts = [label_of(shape, setup, alone=alone), *(one.phrase(getattr(setup, one.name)) for one in said)]
        labels.append(" ".join([*parts, f"({shape.describe()})"] if is_ambiguous else parts))
    return labels


def labels_of(trials: Sequence[Trial]) -> list[str]:
    """Return the labels of trials, with all fields in which these trials differ."""
    return distinct_labels([(trial.spec.model, trial.spec.setup, trial.spec.run.alone) for trial in trials])


def keeping(plan: SweepPlan[Trial], trace: bool, snapshot: bool) -> SweepPlan[Trial]:
    """Return the plan with trials that keep a trace or a memory snapshot. Their IDs stay the same."""
    kept = (replace(trial.spec, keep_trace=trace, keep_snapshot=snapshot) for trial in plan.cells)
    return plan.keep(replace(trial, spec=spec) for trial, spec in zip(plan.cells, kept, strict=True))


def trial_of(
    model: TrainedModel, setup: TrainSetup, run: RunPlan, device: Device, skip_reason: str | None = None
) -> Trial:
    """Return a trial with its ID."""
    spec = TrialSpec(id=trial_id(model, setup, run, device), model=model, setup=setup, run=run, device=device)
    return Trial(spec=spec, skip_reason=skip_reason)


def trial_id(model: TrainedModel, setup: TrainSetup, run: RunPlan, device: Device) -> str:
    """Hash everything that decides a trial's outcome, except its machine and its time limit.

    Results are stored in one folder for each machine. The time limit decides only whether there is an outcome: a
    trial that timed out runs again under a longer limit. Fields that earlier versions did not have (``since``) are
    hashed only where they are set, so that trials recorded by earlier versions keep their IDs.
    """
    setup_fields = to_builtins(setup)
    for name, one in FIELDS.items():
        if one.since is not None and getattr(setup, name) == one.default:
            del setup_fields[name]
    run_fields = {key: value for key, value in to_builtins(run).items() if key != "timeout_seconds"}
    for field in ("steps_without_communication", "emulate", "backend", "attention", "rehearsed_on"):
        if not run_fields[field]:
            del run_fields[field]
    named = model.decisive() if isinstance(model, ModelCode) else to_builtins(model)
    decisive = {
        "model": {key: value for key, value in named.items() if key != "name"},
        "setup": setup_fields,
        "run": run_fields,
        "device": device,
        "torch": torch_version(),
        "revision": MEASUREMENT_REVISION,
    }
    return hashlib.sha256(msgspec.json.encode(decisive, order="sorted")).hexdigest()[:12]
