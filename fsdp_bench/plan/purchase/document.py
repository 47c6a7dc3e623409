"""The JSON form of a plan: bytes, seconds and prices. A page of a plan reads it back."""

from datetime import date
from typing import Any

import msgspec

from fsdp_bench.plan.chart_data import DrawnStep, drawn_memory, drawn_streams
from fsdp_bench.plan.document import Bytes, Count, Positive
from fsdp_bench.plan.purchase.goal import Terms
from fsdp_bench.plan.purchase.offer import Offer, OfferDocument, SettingOffer
from fsdp_bench.plan.purchase.pick import OfferT
from fsdp_bench.plan.purchase.planner import ModelPlan, Plan
from fsdp_bench.plan.speed import speed
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.spec.hardware import Source
from fsdp_bench.spec.recording.model import code_of
from fsdp_bench.version import __version__


class OtherCodeDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The winner's servers with the same model in other code."""

    code: str
    is_same_setting: bool
    offer: OfferDocument | None


class LeftOutDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of server without an offer."""

    server: str
    reason: str


class StatedPriceDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The price that the user stated for all servers."""

    per_hour: Positive
    unit: str
    currency: str | None = None


class ServerPrice(msgspec.Struct, frozen=True, kw_only=True):
    """The catalogue's price of a server."""

    currency: str
    region: str | None
    per_hour: Positive | None
    source: Source


class ServerDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The catalogue's facts about a kind of server."""

    name: str
    provider: str
    gpu: str
    gpus_per_node: Count
    source: Source
    gpu_memory_bytes: Bytes | None
    gpu_memory_source: Source | None
    price: ServerPrice | None


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document that ``plan --json`` prints and a page reads. Fields that are younger than it have a default."""

    source: str
    model: str | None = None
    """None for a script."""
    command: str | None = None
    """The script's command, with placeholders."""
    code: str | None = None
    tokens: Count | None
    deadline_seconds: Positive | None
    budget: Positive | None
    global_batch_tokens: Count | None
    winner: OfferDocument | None
    reason: str
    other_code: OtherCodeDocument | None = None
    safest: OfferDocument | None = None
    cheapest_allowed: OfferDocument | None = None
    cheapest: OfferDocument | None
    fastest: OfferDocument | None
    fewest_nodes: OfferDocument | None
    pareto: tuple[OfferDocument, ...]
    nearest: tuple[OfferDocument, ...]
    left_out: tuple[LeftOutDocument, ...]
    num_offers: int
    looked_at: tuple[str, ...] = ()
    most_useful_nodes: int | None = None
    fsdp_bench: str | None = None
    torch: str | None = None
    made_on: str | None = None
    model_description: str | None = None
    tariff: str | None = None
    stated_price: StatedPriceDocument | None = None
    servers: tuple[ServerDocument, ...] = ()
    winner_step: DrawnStep | None = None

    @property
    def title(self) -> str:
        """The model, or the script's command."""
        return self.model or self.command or ""


def document(found: ModelPlan, with_step: bool = True) -> PlanDocument:
    """Return a plan as a document. Without the winner's step, which charts draw, it takes no further simulation."""
    model, winner = found.goal.model, found.winner
    return plan_document(
        found,
        source="predicted",
        model=model.name,
        code=code_of(model),
        other_code=_other_code(found),
        torch=TORCH_VERSION,
        model_description=model.describe(),
        winner_step=_step(winner) if winner is not None and with_step else None,
    )


def plan_document(found: Plan[OfferT], **own: Any) -> PlanDocument:
    """Return what every plan says, with the fields that are its own."""
    goal, picked = found.goal, found.picked
    single = {name: None if one is None else one.document() for name, one in picked.single().items()}
    return PlanDocument(
        tokens=goal.tokens,
        deadline_seconds=goal.deadline_seconds,
        budget=goal.budget,
        global_batch_tokens=goal.global_batch_tokens,
        reason=found.reason,
        pareto=tuple(one.document() for one in picked.pareto),
        nearest=tuple(one.document() for one in picked.nearest),
        left_out=tuple(LeftOutDocument(server=left.server.name, reason=left.reason) for left in found.left_out),
        num_offers=found.num_offers,
        looked_at=tuple(found.looked_at),
        most_useful_nodes=found.most_useful_nodes,
        fsdp_bench=__version__,
        made_on=date.today().isoformat(),
        tariff=goal.tariff.value if goal.stated_price is None else None,
        stated_price=_stated_price(goal),
        servers=tuple(_server(offer) for offer in {one.cluster.server.name: one for one in picked.all()}.values()),
        **single,  # type: ignore[arg-type]
        **own,
    )


def _other_code(found: ModelPlan) -> OtherCodeDocument | None:
    other = found.other_code
    if other is None:
        return None
    offer = None if other.offer is None else other.offer.document()
    return OtherCodeDocument(code=other.code, is_same_setting=other.is_same_setting, offer=offer)


def _stated_price(goal: Terms) -> StatedPriceDocument | None:
    price = goal.stated_price
    if price is None:
        return None
    unit = "gpu" if price.is_per_gpu else "server"
    return StatedPriceDocument(per_hour=price.per_hour, unit=unit, currency=price.currency)


def _server(offer: Offer) -> ServerDocument:
    """Return what the catalogue says of an offer's kind of server, with its sources."""
    server, gpu, price = offer.cluster.server, offer.cluster.gpu, offer.price
    return ServerDocument(
        name=server.name,
        provider=server.provider,
        gpu=gpu.name,
        gpus_per_node=offer.cluster.gpus_per_node,
        source=server.source,
        gpu_memory_bytes=gpu.usable_memory_bytes,
        gpu_memory_source=gpu.usable_memory_source,
        price=None
        if price is None
        else ServerPrice(
            currency=price.currency,
            region=price.region,
            per_hour=price.per_hour(offer.goal.tariff, server.power_watts),
            source=price.source,
        ),
    )


def _step(offer: SettingOffer) -> DrawnStep:
    """Return one step of an offer as charts draw it; only the first few micro-batches are simulated."""
    asked = offer.prediction.question
    found = speed(asked.simulated, asked.hardware, asked.profile, with_spans=True)
    return DrawnStep(
        num_micro_batches=asked.setup.gradient_accumulation_steps,
        memory=drawn_memory(asked.simulated),
        streams=drawn_streams(found.time, asked.model.num_hidden_layers),
    )
