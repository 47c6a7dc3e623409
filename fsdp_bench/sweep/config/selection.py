"""``--only`` and ``--part``: which trials of a sweep to run, or which cells of a frontier sweep to search."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec

from fsdp_bench.spec.codec import from_text, to_builtins
from fsdp_bench.spec.errors import SpecError, nearest, shown
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.model_code import TrainedModel
from fsdp_bench.spec.setup import FIELDS as SETUP
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.sweep.config.reading import FIELD_ALIASES
from fsdp_bench.sweep.config.trial import SweepPlan, Trial
from fsdp_bench.sweep.frontier.file import FrontierPlan, Search

FIELDS = (*ModelShape.__struct_fields__, *TrainSetup.__struct_fields__, "model")
"""Fields that FIELD=VALUE may name."""


def check_selections(selections: tuple[str, ...], part: str | None) -> None:
    """Refuse values of --only and --part that are wrong for every sweep, before the cells are read.

    Raises:
        SpecError: for a field or value that does not exist, and for a part that is not written K/N.
    """
    for selection in selections:
        if "=" in selection:
            _read(selection, FIELDS)
        else:
            _check_id(selection)
    if part is not None:
        _piece(part, None)


def select(plan: SweepPlan, selections: tuple[str, ...]) -> SweepPlan:
    """Keep the trials that match every selection: the beginning of an ID, or FIELD=VALUE of setup or model.

    Raises:
        SpecError: for a field or value that does not exist, and if nothing matches.
    """
    if not selections:
        return plan
    trials = tuple(trial for trial in plan.trials if all(_matches(trial, selection) for selection in selections))
    if not trials:
        raise SpecError(f"--only {' '.join(selections)}: no trial of this sweep matches{_more(plan)}")
    return msgspec.structs.replace(plan, trials=trials)


def select_part(plan: SweepPlan, part: str | None) -> SweepPlan:
    """Keep one part of a sweep: ``2/4`` is the second quarter of its trials, in their order.

    Raises:
        SpecError: for a part that is not written K/N, and for more parts than trials.
    """
    if part is None:
        return plan
    number, of = _piece(part, len(plan.trials))
    cuts = [round(index * len(plan.trials) / of) for index in (number - 1, number)]
    return msgspec.structs.replace(plan, trials=plan.trials[cuts[0] : cuts[1]])


def _piece(part: str, num_trials: int | None) -> tuple[int, int]:
    """Read K/N. ``num_trials`` is None if it is not known yet."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", part)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= of or of > (num_trials or of):
        most = "the number of trials" if num_trials is None else f"{num_trials}, the number of trials"
        raise SpecError(
            f"--part: {shown(part)} is not allowed; K/N with 1 <= K <= N <= {most}: 2/4 is the second quarter"
        )
    return number, of


def select_searches(plan: FrontierPlan, selections: tuple[str, ...]) -> FrontierPlan:
    """Keep the cells of a frontier sweep that match every FIELD=VALUE.

    Raises:
        SpecError: for a trial's ID, for a field or value that does not exist, and if nothing matches.
    """
    kept = [search for search in plan.searches if all(_matches_search(search, word) for word in selections)]
    if not kept:
        raise SpecError(f"--only {' '.join(selections)}: no cell of this sweep matches{_more(plan)}")
    return plan.keep(kept)


def _more(plan: SweepPlan | FrontierPlan) -> str:
    unknown = f"; more need the GPU to be known: {'; '.join(plan.needing_gpu)}" if plan.needing_gpu else ""
    return f"; --list shows them{unknown}"


def _matches_search(search: Search, selection: str) -> bool:
    if "=" not in selection:
        raise SpecError(f"--only {selection}: a [frontier] sweep has cells, not trials; FIELD=VALUE")
    facts = _facts(search.model, search.setup)
    if search.quantity.is_model_size:
        facts = {
            "family": search.model.family.value,
            "vocab_size": search.model.vocab_size,
            **to_builtins(search.setup),
        }
    facts.pop(search.quantity.name, None)
    return _has(facts, selection)


def _matches(trial: Trial, selection: str) -> bool:
    if "=" not in selection:
        _check_id(selection)
        return trial.spec.id.startswith(selection)
    return _has(_facts(trial.spec.model, trial.spec.setup), selection)


def _check_id(selection: str) -> None:
    if not re.fullmatch(r"[0-9a-f]+", selection):
        raise SpecError(f"--only {selection}: neither the beginning of an ID nor FIELD=VALUE")


def _facts(model: TrainedModel, setup: TrainSetup) -> dict[str, Any]:
    unknown = dict.fromkeys(FIELDS)  # a model of other code has no heads
    return {**unknown, **to_builtins(model), **to_builtins(setup), "family": model.kind, "model": model.name}


def _has(facts: dict[str, Any], selection: str) -> bool:
    field, wanted = _read(selection, facts)
    return str(facts[field]).lower() == wanted.lower()


def _read(selection: str, fields: Collection[str]) -> tuple[str, str]:
    field, _, wanted = selection.partition("=")
    field = FIELD_ALIASES.get(field, field)
    if field not in fields:
        raise SpecError(f"--only: unknown field {shown(field)}{nearest(field, fields)}")
    return field, _canonical(field, wanted)


def _canonical(field: str, wanted: str) -> str:
    """Return the value as TrainSetup stores it, so that aliases match too."""
    if field not in SETUP or not SETUP[field].has_words:
        return wanted
    return str(to_builtins(getattr(from_text({field: wanted}, TrainSetup), field)))
