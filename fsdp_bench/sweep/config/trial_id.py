"""A trial's ID: a hash of everything that decides its outcome.

A trial is done when the results folder has a record with its ID, ``trials/ID.json`` (results/store.py). A sweep runs
the other trials (run/remaining_trials.py).
"""

from __future__ import annotations

import hashlib

import msgspec

from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.model_code import ModelCode, TrainedModel
from fsdp_bench.spec.record import MEASUREMENT_REVISION, Device, RunPlan
from fsdp_bench.spec.setup import FIELDS, TrainSetup
from fsdp_bench.sweep.machine import torch_version


def trial_id(model: TrainedModel, setup: TrainSetup, run: RunPlan, device: Device) -> str:
    """Hash everything that decides a trial's outcome, except its machine and its time limit.

    Results are stored in one folder for each machine. The time limit decides only whether there is an outcome: a
    trial that timed out runs again under a longer limit. What earlier versions did not have (a field's ``since``) is
    hashed only where it is set, so that trials recorded by earlier versions keep their IDs.
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
