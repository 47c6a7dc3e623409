"""``--only``: which trials of a sweep to run, or which cells of a frontier sweep to search."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from fsdp_bench.spec.codec import from_words, to_builtins
from fsdp_bench.spec.errors import SpecError, nearest
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.sweep.frontier_file import FrontierPlan, Search
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


def select_part(plan: SweepPlan, part: str | None) -> SweepPlan:
    """Keep one piece of a sweep: ``2/4`` is the second quarter of its trials, in their order.

    Raises:
        SpecError: for anything that is no such piece.
    """
    if part is None:
        return plan
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    number, of = (int(found[1]), int(found[2])) if found else (1, 0)
    if not 1 <= number <= of or of > len(plan.trials):
        raise SpecError(
            f"--part {part}: is not allowed; 1/{len(plan.trials)} at most, such as 2/4 for the second quarter"
        )
    cuts = [round(index * len(plan.trials) / of) for index in (number - 1, number)]
    return msgspec.structs.replace(plan, trials=plan.trials[cuts[0] : cuts[1]])


def select_searches(plan: FrontierPlan, selections: tuple[str, ...]) -> FrontierPlan:
    """Keep the cells of a frontier sweep that match every FIELD=VALUE.

    Raises:
        SpecError: for a trial's ID, for a field or value that does not exist, and when nothing matches.
    """
    kept = [search for search in plan.searches if all(_matches_search(search, word) for word in selections)]
    if not kept:
        raise SpecError(f"--only {' '.join(selections)}: no cell of this sweep matches; --list shows them")
    return plan.keep(kept)


def _matches_search(search: Search, selection: str) -> bool:
    if "=" not in selection:
        raise SpecError(f"--only {selection}: a [frontier] sweep has cells, not trials; FIELD=VALUE")
    facts = _facts(search.model, search.setup)
    if search.is_on_ladder:
        facts = {
            "family": search.model.family.value,
            "vocab_size": search.model.vocab_size,
            **to_builtins(search.setup),
        }
    facts.pop(search.dial.name, None)
    return _has(facts, selection)


def _matches(trial: Trial, selection: str) -> bool:
    if "=" not in selection:
        if not re.fullmatch(r"[0-9a-f]+", selection):
            raise SpecError(f"--only {selection}: neither the beginning of an ID nor FIELD=VALUE")
        return trial.spec.id.startswith(selection)
    return _has(_facts(trial.spec.model, trial.spec.setup), selection)


def _facts(model: ModelShape, setup: TrainSetup) -> dict[str, Any]:
    return {**to_builtins(model), **to_builtins(setup), "model": model.name}


def _has(facts: dict[str, Any], selection: str) -> bool:
    field, _, wanted = selection.partition("=")
    field = FIELD_ALIASES.get(field, field)
    if field not in facts:
        raise SpecError(f"--only: unknown field {field!r}{nearest(field, facts)}")
    return str(facts[field]).lower() == _canonical(field, wanted).lower()


def _canonical(field: str, wanted: str) -> str:
    """Read a word as the setup would, so that aliases select too."""
    if field not in ("strategy", "api", "precision", "offload", "checkpointing", "optimizer", "loss", "wrap"):
        return wanted
    return str(to_builtins(getattr(from_words({field: wanted}, TrainSetup), field)))
