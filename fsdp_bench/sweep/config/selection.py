"""``--only`` and ``--part``: which trials of a sweep to run, or which cells of a frontier sweep to search."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, TypeVar

from fsdp_bench.spec.checked import build
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import SpecError, nearest, shown
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.model_code import TrainedModel
from fsdp_bench.spec.setup import FIELDS as SETUP
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.sweep.config.reading import FIELD_ALIASES
from fsdp_bench.sweep.config.trial import SweepPlan, Trial
from fsdp_bench.sweep.frontier.file import Search

AnyCell = TypeVar("AnyCell", Trial, Search)

FIELDS = (*ModelShape.__struct_fields__, *TrainSetup.__struct_fields__, "model")
"""Fields that FIELD=VALUE may name."""


def check_selections(selections: tuple[str, ...], part: str | None) -> None:
    """Refuse values of --only and --part that are wrong for every sweep, before the cells are read."""
    for selection in selections:
        if "=" in selection:
            _read(selection, FIELDS)
        else:
            _check_id(selection)
    if part is not None:
        _piece(part, None)


def select(plan: SweepPlan[AnyCell], selections: tuple[str, ...]) -> SweepPlan[AnyCell]:
    """Keep the trials or searches that match every selection: FIELD=VALUE, or the beginning of an ID."""
    kept = [one for one in plan.cells if all(_matches(one, selection) for selection in selections)]
    if not kept:
        what = "cell" if plan.file.has_frontier else "trial"
        unknown = f"; more need the GPU to be known: {'; '.join(plan.needing_gpu)}" if plan.needing_gpu else ""
        raise SpecError(f"--only {' '.join(selections)}: no {what} of this sweep matches; --list shows them{unknown}")
    return plan.keep(kept)


def select_part(plan: SweepPlan[Trial], part: str | None) -> SweepPlan[Trial]:
    """Keep one part of a sweep: ``2/4`` is the second quarter of its trials, in their order."""
    if part is None:
        return plan
    number, of = _piece(part, len(plan.cells))
    cuts = [round(index * len(plan.cells) / of) for index in (number - 1, number)]
    return plan.keep(plan.cells[cuts[0] : cuts[1]])


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


def _matches(cell: Trial | Search, selection: str) -> bool:
    if isinstance(cell, Trial):
        if "=" not in selection:
            return cell.spec.id.startswith(selection)
        return _has(_facts(cell.spec.model, cell.spec.setup), selection)
    if "=" not in selection:
        raise SpecError(f"--only {selection}: a [frontier] sweep has cells, not trials; FIELD=VALUE")
    facts = _facts(cell.model, cell.setup)
    if cell.quantity.is_model_size:
        facts = {name: facts[name] for name in ("family", "vocab_size", *SETUP)}
    facts.pop(cell.quantity.name, None)
    return _has(facts, selection)


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
    return str(to_builtins(getattr(build(TrainSetup, {field: wanted}), field)))
