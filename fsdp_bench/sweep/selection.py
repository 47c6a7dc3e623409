"""``--only``: which trials of a sweep to run."""

from __future__ import annotations

import re

import msgspec

from fsdp_bench.spec.codec import from_words, to_builtins
from fsdp_bench.spec.errors import SpecError, nearest
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.sweep.trial import SweepPlan, Trial
from fsdp_bench.sweep.words import FIELD_ALIASES


def select(plan: SweepPlan, selections: tuple[str, ...]) -> SweepPlan:
    """Keep the trials that match every selection: the beginning of an ID, or FIELD=VALUE of setup or model.

    Raises:
        SpecError: for a field or value that does not exist, and when nothing matches.
    """
    if not selections:
        return plan
    trials = tuple(trial for trial in plan.trials if all(_matches(trial, selection) for selection in selections))
    if not trials:
        raise SpecError(f"--only {' '.join(selections)}: no trial of this sweep matches; --list shows them")
    return msgspec.structs.replace(plan, trials=trials)


def _matches(trial: Trial, selection: str) -> bool:
    field, equals, wanted = selection.partition("=")
    if not equals:
        if not re.fullmatch(r"[0-9a-f]+", selection):
            raise SpecError(f"--only {selection}: neither the beginning of an ID nor FIELD=VALUE")
        return trial.spec.id.startswith(selection)
    facts = {**to_builtins(trial.spec.model), **to_builtins(trial.spec.setup), "model": trial.spec.model.name}
    field = FIELD_ALIASES.get(field, field)
    if field not in facts:
        raise SpecError(f"--only: unknown field {field!r}{nearest(field, facts)}")
    return str(facts[field]).lower() == _canonical(field, wanted).lower()


def _canonical(field: str, wanted: str) -> str:
    """Read a word as the setup would, so that aliases select too."""
    if field not in ("strategy", "api", "precision", "offload", "checkpointing", "optimizer", "loss", "wrap"):
        return wanted
    return str(to_builtins(getattr(from_words({field: wanted}, TrainSetup), field)))
