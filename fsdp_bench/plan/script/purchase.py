"""plan_command(): servers, days and price for the user's script; rehearsed on few numbers of nodes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fsdp_bench.catalog.loader import Catalog, load_user_catalog
from fsdp_bench.plan.purchase.document import PlanDocument, plan_document
from fsdp_bench.plan.purchase.goal import TERMS, Terms, read_terms
from fsdp_bench.plan.purchase.pick import Picked, pick, reason_of
from fsdp_bench.plan.purchase.planner import NODES, Left, Plan, kinds_of, most_useful_nodes
from fsdp_bench.plan.purchase.searched import ServerType
from fsdp_bench.plan.script.cells import Cell, ScriptAnswers, ScriptOffer
from fsdp_bench.plan.script.kept import KeptReports
from fsdp_bench.plan.script.rehearsals import Answered, Rehearsals
from fsdp_bench.plan.script.series import Series
from fsdp_bench.plan.script.variants import read_combinations
from fsdp_bench.spec.errors import SpecError

Ask = Callable[[Sequence[Cell], bool], None]
"""Finds out about cells; True: each by a rehearsal of its own, not by one of the same GPUs in other servers."""


@dataclass(frozen=True, repr=False)
class ScriptPlan(Plan[ScriptOffer]):
    """The answer for a script."""

    command: str = ""
    """With its placeholders."""
    num_rehearsals: int = 0


def search(terms: Terms, series: Sequence[Series], ask: Ask) -> tuple[Picked[ScriptOffer], list[ScriptOffer]]:
    """Return the best offers, each rehearsed by itself, and all that are known to train.

    What is likely to be the best is rehearsed until it is; then what else could be, at best, until nothing could.
    """

    def start(one: Series) -> list[Cell]:
        return [] if any(found.trains for found in one.known().values()) else list(map(one.cell, one.wanted()))

    while wanted := [cell for one in series for cell in start(one)]:
        ask(wanted, False)
    shown = {offer.cell for offer in _picked(terms, series, ask).all()}
    _picked(terms, series, ask, shown)
    picked = _picked(terms, series, ask)
    return picked, [offer for one in series for offer in one.offers(at_best=False) if offer.found is not None]


def _picked(terms: Terms, series: Sequence[Series], ask: Ask, shown: set[Cell] | None = None) -> Picked[ScriptOffer]:
    """Return what is picked once all of it was rehearsed. ``shown``: by what is possible at best, next to these."""
    of = {one.cell(0)._replace(num_nodes=0): one for one in series}
    while True:
        picked = pick(terms, [offer for one in series for offer in one.offers(at_best=shown is not None)])
        if shown is not None:
            picked = replace(picked, pareto=())
        each = [(of[offer.cell._replace(num_nodes=0)], offer) for offer in picked.all()]
        if marks := [one.cell(count) for one in dict.fromkeys(one for one, _ in each) for count in one.wanted()]:
            ask(marks, False)
        elif unsure := [(one, offer) for one, offer in each if offer.found is None or not offer.found.is_own]:
            ask([one.to_rehearse(offer, shown) for one, offer in unsure], True)
        else:
            return picked


def plan_command(
    command: str | Sequence[str],
    tokens: str | int | None = None,
    *,
    servers: str | Sequence[str] = (),
    nodes: Iterable[int] = NODES,
    catalog: str | Path | Catalog | None = None,
    progress: Callable[[Answered], None] = lambda one: None,
    **options: Any,
) -> ScriptPlan:
    """Find servers, their number, and values for one's own script.

    ``plan_command("torchrun train.py --bs {batch}", "1T", deadline="30d", each={"batch": [1, 2, 4]})``

    Args:
        command: the training command, with placeholders.
        tokens: tokens to train on; without it, the best values on the fewest GPUs.
        servers: servers of the catalogue; by default all that can be rehearsed.
        nodes: the numbers of nodes to choose from.
        catalog: a file with GPUs, servers and prices of one's own.
        progress: called with each rehearsal once it is there.
        options: ``deadline``, ``budget``, ``global_batch``, ``price``, ``tariff`` and ``headroom`` as in
            ``plan_training``, but that only what makes exactly the global batch is an offer; and those of ``rehearse``:
            ``each``, ``env``, ``edit``, ``strategy``, ``tokens_per_step`` and so on.

    Raises:
        SpecError: for values that are not allowed, and if no server can be rehearsed.
        MachineError: if the command's Python has no CUDA build of torch, or there is no C compiler.
        KeyboardInterrupt: at an interrupt. The same plan then goes on where this one ended.
    """
    terms = read_terms(tokens, **{name: options.pop(name) for name in TERMS if name in options})
    entries = catalog if isinstance(catalog, Catalog) else load_user_catalog(None if catalog is None else Path(catalog))
    kinds = kinds_of(entries, [servers] if isinstance(servers, str) else servers)
    names, counts = [kind.server.name for kind in kinds], sorted(set(nodes))
    options |= {"headroom": terms.headroom_bytes, "catalog": entries, "time": True}
    asked = read_combinations(command, server=names, nodes=counts, **options)
    of_choice = {name: values for name, values in asked.values.items() if name not in ("server", "nodes")}
    choices = [dict(zip(of_choice, chosen, strict=True)) for chosen in product(*of_choice.values())]
    several = [name for name, values in of_choice.items() if len(values) > 1]
    with Rehearsals(KeptReports(["plan", asked.script.text])) as rehearsals:
        answers = ScriptAnswers(asked, choices, kinds, rehearsals, progress)
        refused = {kind.server.name: reason for kind in kinds if (reason := answers.why_refused(kind, counts[0]))}
        series = [
            Series(terms, kind, (place, {name: values[name] for name in several}), counts, answers.found)
            for kind in kinds
            if kind.server.name not in refused
            for place, values in enumerate(choices)
        ]
        if not series:
            raise SpecError(next(iter(refused.values())))
        picked, offers = search(terms, series, answers.ask)
    return _plan(terms, asked.script.text, picked, offers, _left_out(kinds, series, refused), rehearsals.num_run)


def _plan(
    terms: Terms,
    command: str,
    picked: Picked[ScriptOffer],
    offers: Sequence[ScriptOffer],
    left_out: Sequence[Left],
    num_rehearsals: int,
) -> ScriptPlan:
    reason = reason_of(terms, picked, len(offers))
    if not offers and len(reasons := {left.reason for left in left_out}) == 1:
        reason = reasons.pop()
    return ScriptPlan(
        goal=terms,
        picked=picked,
        reason=reason,
        left_out=tuple(left_out),
        num_offers=len(offers),
        looked_at=tuple(dict.fromkeys(offer.cluster.server.name for offer in offers)),
        most_useful_nodes=None if picked.winner is None else most_useful_nodes(picked.winner, offers),
        command=command,
        num_rehearsals=num_rehearsals,
    )


def _left_out(kinds: Sequence[ServerType], series: Sequence[Series], refused: Mapping[str, str]) -> list[Left]:
    """Return what has no offer, and what of the others has none because something is not known, with the reason."""
    found = []
    for kind in kinds:
        own = [one for one in series if one.kind is kind]
        if kind.server.name in refused:
            found.append(Left(kind.server, refused[kind.server.name]))
        has_offers = any(True for one in own for _ in one.offers(at_best=False))
        reasons: dict[str, list[str]] = {}
        for one in own:
            is_known = not any(found.reason for found in one.known().values())
            for reason, nodes in {} if has_offers and is_known else one.reasons().items():
                on = f"on {', '.join(map(str, nodes))} nodes: " if len(nodes) < len(one.known()) else ""
                title = " ".join(f"{name} {value}" for name, value in one.values.items())
                reasons.setdefault(f"{on}{reason}", []).append(title)
        for reason, titles in reasons.items():
            which = "" if len(titles) == len(own) else f"{', '.join(titles)}: "
            found.append(Left(kind.server, f"{which}{reason}"))
    return found


def script_document(plan: ScriptPlan) -> PlanDocument:
    """Return a plan as a document."""
    torch = next((offer.found.torch for offer in plan.picked.all() if offer.found is not None), None)
    return plan_document(plan, source="rehearsed", command=plan.command, torch=torch)
