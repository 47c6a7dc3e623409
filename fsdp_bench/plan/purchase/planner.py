"""All offers of a goal; the winner, the cheapest, the fastest, and those that no other beats in both.

A kind of server is searched when one of its offers is picked, with the speed that its GPU does not exceed. So what
cannot win is never searched, and what is picked in the end was searched and fits by the allocator's simulation.

``plan_training`` is a plan in one call from Python; its arguments mean the same as on the command line.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Generic

from fsdp_bench.catalog.loader import BUILT_IN, Catalog, load_user_catalog
from fsdp_bench.catalog.lookup import in_other_code
from fsdp_bench.catalog.lookup import model as find_model
from fsdp_bench.plan.ask import with_defaults
from fsdp_bench.plan.defaults import trained_code, trainer_defaults
from fsdp_bench.plan.parallel import map_forked
from fsdp_bench.plan.purchase.beyond import beyond, number_of_nodes
from fsdp_bench.plan.purchase.goal import Goal, Terms, read_terms
from fsdp_bench.plan.purchase.offer import Offer, SettingOffer
from fsdp_bench.plan.purchase.pick import OfferT, OtherCode, Picked, pick, reason_of, safest, with_other_code
from fsdp_bench.plan.purchase.searched import Searched, ServerType
from fsdp_bench.plan.purchase.simulated import Simulated
from fsdp_bench.rates.scaled import read_scaling
from fsdp_bench.simulate.step import without_collections
from fsdp_bench.spec.checked import build as build_checked
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Server
from fsdp_bench.spec.price import Tariff
from fsdp_bench.spec.recording.model import Model, code_of, whose_code
from fsdp_bench.spec.setup import FIELDS, PLANNED, Offload, TrainSetup

NODES = range(1, 65)
"""The numbers of nodes that are looked at, if the user names none."""


@dataclass(frozen=True)
class Left:
    """A kind of server that has no offer, and why."""

    server: Server
    reason: str
    fits_on: int | None = None
    """The fewest nodes on which its live bytes fit, if only its speed is not known."""


@dataclass(frozen=True, repr=False)
class Plan(Generic[OfferT]):
    """The answer to a goal."""

    goal: Terms
    picked: Picked[OfferT]
    reason: str
    """Why the winner, or why there is none."""
    left_out: tuple[Left, ...]
    num_offers: int
    """Kinds of servers and numbers of nodes on which something fits."""
    looked_at: tuple[str, ...] = ()
    """Kinds of servers that have offers."""
    most_useful_nodes: int | None = None
    """The number of the winner's servers beyond which more of them do not train faster; None if more do."""

    @property
    def winner(self) -> OfferT | None:
        """The best offer; None if nothing fits, or nothing meets the deadline and the budget."""
        return self.picked.winner

    def rows(self) -> list[dict[str, Any]]:
        """Return all offers that are shown as rows of a table, the winner first: ``pandas.DataFrame(found.rows())``."""
        return [offer.row() for offer in self.picked.all()]

    def __repr__(self) -> str:
        return "\n".join([self.reason, *(f"  {offer.text}" for offer in self.picked.all())])

    def _repr_html_(self) -> str:
        shown = [escape(offer.text) for offer in self.picked.all()]
        rows = "".join(f"<tr><td>{text}</td></tr>" for text in shown)
        return f"<table><caption>{escape(self.reason)}</caption>{rows}</table>"


@dataclass(frozen=True, repr=False)
class ModelPlan(Plan[SettingOffer]):
    """The answer to a goal for a model."""

    goal: Goal
    other_code: OtherCode | None = None
    """The winner's servers with the same model in other code; None if there is none, or no winner."""


def kinds_of(catalog: Catalog, names: Sequence[str]) -> list[ServerType]:
    """Return the servers of a catalogue that are named, by default all."""
    servers = [catalog.server(name) for name in names] or catalog.servers()
    return [
        ServerType(one, catalog.gpu_of(one), catalog.price(one), one.gpus_per_node) for one in dict.fromkeys(servers)
    ]


@without_collections()
def plan(
    goal: Goal,
    kinds: Sequence[ServerType],
    nodes: Sequence[int] = NODES,
    progress: Callable[[str], None] = lambda what: None,
) -> ModelPlan:
    """Find the best servers, their number and their setting; ``progress`` is called with each kind that is begun.

    Raises SpecError for a model that is not trained on tokens, and a global batch that no number of nodes makes.
    """
    if not goal.model.has_tokens:
        raise SpecError(f"model: {goal.model.name} is not trained on tokens; fsdp-bench predict says how fast it is")
    nodes, run = sorted(set(nodes)), goal.calibration
    if run is not None and run.gpu is not None and all(kind.gpu.name != run.gpu for kind in kinds):
        raise SpecError(f"calibration: of a run on {run.gpu}, which no server that is looked at has")
    found = _plan(goal, kinds, nodes, progress)
    if found.num_offers:
        return found
    may_fit = next((left for left in found.left_out if left.fits_on is not None), None)
    if may_fit is not None:
        memory = f"fsdp-bench predict --server {may_fit.server.name} --nodes {may_fit.fits_on} says its memory"
        return replace(found, reason=f"{may_fit.server.name}: {may_fit.reason}; {memory}")
    if "offload" not in goal.fixed and "offload" not in goal.open:
        offloaded = _plan(replace(goal, open={**goal.open, "offload": (Offload.PARAMS,)}), kinds, nodes, progress)
        if offloaded.num_offers:
            return offloaded
    if found.left_out and all("global batch" in left.reason for left in found.left_out):
        raise SpecError(f"global-batch: {found.left_out[0].reason}")
    known = [kind for kind in kinds if _why_unknown(goal, kind) is None]
    if not known and found.left_out:
        return replace(found, reason="no server that was looked at can be planned for")
    nearest, reason = beyond(goal, known, max(nodes))
    return replace(found, picked=replace(found.picked, nearest=nearest), reason=reason)


def _plan(goal: Goal, kinds: Sequence[ServerType], nodes: Sequence[int], progress: Callable[[str], None]) -> ModelPlan:
    simulated, searched, left = Simulated(goal, max(nodes)), list[Searched](), list[Left]()
    one_of_each_gpu = {kind.gpu.name: kind for kind in kinds if _why_unknown(goal, kind) is None}.values()
    for learned in map_forked(lambda kind: Searched(simulated, kind, nodes).simulated.learned(), [*one_of_each_gpu]):
        simulated.learn(learned)
    for kind in kinds:
        progress(kind.server.name)
        if (reason := _why_unknown(goal, kind)) is not None:
            left.append(Left(kind.server, reason))
            continue
        found = Searched(simulated, kind, nodes)
        if found.bound:
            searched.append(found)
        else:
            left.append(_without_offer(goal, found, nodes))
    for each in searched:
        each.fastest.others = [other.fastest for other in searched]
    return _Choice(goal, searched, left, progress).plan()


def _why_unknown(goal: Goal, kind: ServerType) -> str | None:
    run = goal.calibration
    if run is not None and run.gpu not in (None, kind.gpu.name):
        return f"its GPU is {kind.gpu.name}, and the calibration is of a run on {run.gpu}"
    if kind.gpu.usable_memory_bytes is None:
        return "nobody documents how much memory of its GPU can be used"
    if not kind.gpu.native_bf16:
        return "plans train in bf16, which its GPU has not; max-size --precision fp16-mixed says what fits"
    return None


def _without_offer(goal: Goal, found: Searched, nodes: Sequence[int]) -> Left:
    server = found.kind.server
    if found.nodes and found.lacks_speed:
        fits = f"it may fit on {number_of_nodes(found.nodes[0])}, but its speed is not known: {found.unknown}"
        return Left(server, f"{fits} (fsdp-bench calibrate measures it there)", found.nodes[0])
    if found.makes_batch or goal.global_batch_tokens is None:
        return Left(server, f"nothing fits on up to {number_of_nodes(max(nodes))}")
    length, gpus = goal.fixed["sequence_length"], min(nodes) * found.kind.gpus_per_node
    least = f"one sequence of {length:,} tokens on each of {gpus} GPUs are {length * gpus:,}"
    return Left(server, f"no number of nodes makes a global batch of {goal.global_batch_tokens:,} tokens: {least}")


class _Choice:
    """Picks the best offers, computes those exactly, and repeats until every picked offer is exact."""

    def __init__(
        self, goal: Goal, searched: Sequence[Searched], left: list[Left], progress: Callable[[str], None]
    ) -> None:
        self._goal, self._left, self._progress = goal, left, progress
        self._searched = {each.kind.server.name: each for each in searched}

    def plan(self) -> ModelPlan:
        """Return the plan."""
        while True:
            offers = [offer for each in self._searched.values() for offer in each.offers()]
            picked = pick(self._goal, offers)
            if not (wanted := self._wanted(picked)):
                break
            self._search(wanted)
        reason = reason_of(self._goal, picked, len(offers))
        useful, other_code = None, None
        if (winner := picked.winner) is not None:
            useful = most_useful_nodes(winner, offers)
            safer, other_code = self._beside(winner)
            picked = replace(picked, safest=safer)
        names = dict.fromkeys(offer.cluster.server.name for offer in offers)
        return ModelPlan(self._goal, picked, reason, tuple(self._left), len(offers), tuple(names), useful, other_code)

    def _beside(self, winner: SettingOffer) -> tuple[SettingOffer | None, OtherCode | None]:
        """Return a safer offer than the winner, and its servers with other code."""
        kind, other = self._kind_of(winner), self._goal.other
        self._progress(f"a safer setting on {kind.kind.server.name}")
        if other is None:
            return safest(winner, kind), None
        self._progress(f"{whose_code(code_of(other))} on {winner.cluster.num_nodes} x {kind.kind.server.name}")
        asked: list[Callable[[], Any]] = [
            partial(safest, winner, kind),
            partial(with_other_code, winner, other, kind.kind),
        ]
        safer, other_code = map_forked(lambda ask: ask(), asked)
        return safer, other_code

    def _wanted(self, picked: Picked[SettingOffer]) -> list[tuple[Searched, int]]:
        """Return what to search next until all that is picked was searched: also one node fewer than the cheapest."""
        kinds = dict.fromkeys(self._kind_of(offer) for offer in picked.all())
        if wanted := [(kind, count) for kind in kinds for count in kind.wanted()]:
            return wanted
        each = {(self._kind_of(offer), offer.cluster.num_nodes): None for offer in picked.all()}
        for offer in filter(None, (picked.cheapest, picked.cheapest_allowed)):
            kind = self._kind_of(offer)
            fewer = [count for count in kind.nodes if count < offer.cluster.num_nodes]
            each |= {(kind, count): None for count in fewer[-1:]}
        return [(kind, count) for kind, count in each if not kind.has_made(count)]

    def _search(self, wanted: Sequence[tuple[Searched, int]]) -> None:
        def make(kind: Searched, count: int) -> tuple[Any, ...]:
            return kind.offer(count), kind.simulated.learned(), kind.fastest.reached, kind.fastest.refused

        made = map_forked(lambda one: make(*one), wanted)
        for number, (kind, count) in enumerate(wanted, 1):
            self._progress(f"{count} x {kind.kind.server.name}: offer {number} of {len(wanted)}")
            kind.take(count, *next(made))
            if not kind.has_offers:
                self._left.append(_without_offer(self._goal, kind, kind.nodes))

    def _kind_of(self, offer: SettingOffer) -> Searched:
        return self._searched[offer.cluster.server.name]


def most_useful_nodes(winner: Offer, offers: Sequence[Offer]) -> int | None:
    """Return the number of the winner's servers beyond which more of them are not faster; None if more are."""
    alike = [offer for offer in offers if offer.cluster.server == winner.cluster.server]
    fastest = max(alike, key=lambda offer: offer.tokens_per_second).cluster.num_nodes
    return fastest if fastest < max(offer.cluster.num_nodes for offer in alike) else None


def plan_training(
    model: str | Path | Model | None = None,
    tokens: str | int | None = None,
    *,
    hf_config: str | Path | None = None,
    code: str | None = None,
    servers: str | Sequence[str] = (),
    nodes: Iterable[int] = NODES,
    deadline: str | None = None,
    budget: str | float | None = None,
    global_batch: str | int | None = None,
    price: str | None = None,
    tariff: Tariff | str | None = None,
    headroom: str | int | None = None,
    calibration: str | Path | None = None,
    catalog: str | Path | None = None,
    **setup_fields: Any,
) -> ModelPlan:
    """Find servers, their number and a setting: ``plan_training("Llama-3.1-8B", "1T", deadline="30d")``.

    Needs neither torch nor a GPU; takes seconds. ``winner`` of the answer is the best offer, ``reason`` says why, and
    ``pandas.DataFrame(found.rows())`` makes a table of all that are shown.

    Args:
        model: a name of the catalogue, a size like ``"7B"``, the path of a config.json or of a recorded model.
        tokens: tokens to train on, ``"1T"`` or a number; without it, the best setting on the fewest GPUs.
        hf_config: the path of a Hugging Face config.json, instead of ``model``.
        code: whose code: ``huggingface``, ``torchtitan`` or ``benchmark``.
        servers: servers of the catalogue; by default all.
        nodes: the numbers of nodes to choose from.
        deadline: when training must have ended: ``"30d"``, ``"12h"``, ``"6 weeks"``.
        budget: the most that it may cost: ``"200k"`` or a number.
        global_batch: tokens of one optimizer step on all GPUs; by default one micro-batch on each.
        price: the price of every server, ``"$2.10/gpu-hour"`` or ``"98 EUR/node-hour"``, instead of the catalogue's.
        tariff: which of the catalogue's prices counts: ``on-demand`` (the default), ``reserved`` or ``spot``.
        headroom: memory kept free on each GPU for the CUDA context and NCCL, ``"2GiB"`` or bytes.
        calibration: a file of ``fsdp-bench calibrate --from`` or ``--host``.
        catalog: a file with GPUs, servers and prices of one's own.
        setup_fields: fields of TrainSetup that are not searched; several values of those in PLANNED leave the choice.

    Raises:
        SpecError: for values that are not allowed, naming the argument, the value and what is allowed.
    """
    if (model is None) == (hf_config is None):
        raise SpecError("plan_training: name the model, or hf_config, the path of its config.json; and not both")
    which = Path(hf_config) if hf_config is not None else model
    assert which is not None
    entries = BUILT_IN if catalog is None else load_user_catalog(Path(catalog))
    given = {name: _values(value) for name, value in setup_fields.items()}
    for name, values in given.items():
        if len(values) > 1 and name not in PLANNED:
            raise SpecError(f"{name}: several values; plan_training chooses among those of {', '.join(PLANNED)}")
        if name in FIELDS and (reason := FIELDS[name].not_planned) is not None:
            raise SpecError(f"{name}: plan_training does not take it, because {reason}; estimate does")
    single = {name: values[0] for name, values in given.items() if len(values) == 1}
    named_model = find_model(which, code=code, catalog=entries)
    fields = dict(with_defaults(None, single, named_model))  # type: ignore[arg-type]
    first = {name: values[0] for name, values in given.items()}
    fields |= trainer_defaults(trained_code(named_model), first, None)
    read = build_checked(TrainSetup, fields)
    found = find_model(which, read.sequence_length, code=code, catalog=entries)
    goal = Goal(
        model=found,
        other=in_other_code(which, found, read.sequence_length, entries),
        fixed={name: getattr(read, name) for name in fields},
        open={
            name: tuple(getattr(build_checked(TrainSetup, {**fields, name: one}), name) for one in values)
            for name, values in given.items()
            if len(values) > 1
        },
        calibration=None if calibration is None else read_scaling(Path(calibration)),
        **vars(read_terms(tokens, deadline, budget, global_batch, price, tariff, headroom)),
    )
    named = [servers] if isinstance(servers, str) else servers
    return plan(goal, kinds_of(entries, named), sorted(set(nodes)))


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
