"""The JSON form of a plan: bytes, seconds and prices. A page of a plan reads it back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any

import msgspec

from fsdp_bench.plan.chart_data import DrawnStep, drawn_memory, drawn_streams
from fsdp_bench.plan.defaults import assumptions
from fsdp_bench.plan.document import Bytes, Count, Positive
from fsdp_bench.plan.headroom import Headroom
from fsdp_bench.plan.purchase.goal import Terms
from fsdp_bench.plan.purchase.offer import Offer, SettingOffer
from fsdp_bench.plan.purchase.pick import OfferT
from fsdp_bench.plan.purchase.planner import ModelPlan, Plan
from fsdp_bench.plan.ranges import PeakRange, peak_range
from fsdp_bench.plan.speed import speed
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.spec.hardware import Source
from fsdp_bench.spec.recording.model import code_of
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.version import __version__


class OfferMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of an offer."""

    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes
    peak_reserved_bytes_range: tuple[Bytes, Bytes] | None = None
    range_because: str | None = None
    headroom_bytes: int | None = None
    required_headroom_bytes: Bytes | None = None
    required_headroom_source: str | None = None
    breakdown_bytes: dict[str, Bytes] = {}


OfferKey = tuple[str, int, TrainSetup | None, tuple[str, ...]]
"""What tells offers from each other."""


class OfferDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One offer of a plan."""

    server: str
    gpu: str
    num_nodes: Count
    num_gpus: Count
    setup: TrainSetup | None = None
    """None for a script."""
    assumptions: tuple[str, ...] = ()
    expandable_segments: bool = False
    values: dict[str, str] = {}
    """The values of a script's placeholders that differ between offers."""
    command: tuple[str, ...] = ()
    """The script's command with its values."""
    tokens_per_step: Count | None = None
    """Tokens of an optimizer step of a script on all GPUs."""
    memory: OfferMemory
    tokens_per_second_per_gpu: Positive
    tokens_per_second_per_gpu_range: tuple[Positive, Positive] | None
    range_because: str | None
    seconds: Positive | None
    fast_seconds: Positive | None = None
    slow_seconds: Positive | None
    price_per_hour: Positive | None
    cost: Positive | None
    fast_cost: Positive | None = None
    slow_cost: Positive | None
    energy_megawatt_hours: Positive | None
    slow_energy_megawatt_hours: Positive | None = None

    @property
    def key(self) -> OfferKey:
        """The kind of server, the number of nodes, and the setting."""
        return self.server, self.num_nodes, self.setup, self.command


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
        _offer,
        source="predicted",
        model=model.name,
        code=code_of(model),
        other_code=_other_code(found),
        torch=TORCH_VERSION,
        model_description=model.describe(),
        winner_step=_step(winner) if winner is not None and with_step else None,
    )


def plan_document(found: Plan[OfferT], offer: Callable[[OfferT], OfferDocument], **own: Any) -> PlanDocument:
    """Return what every plan says, with the fields that are its own. ``offer`` makes the document of an offer."""
    goal, picked = found.goal, found.picked

    def one(this: OfferT | None) -> OfferDocument | None:
        return None if this is None else offer(this)

    return PlanDocument(
        tokens=goal.tokens,
        deadline_seconds=goal.deadline_seconds,
        budget=goal.budget,
        global_batch_tokens=goal.global_batch_tokens,
        winner=one(picked.winner),
        reason=found.reason,
        safest=one(picked.safest),
        cheapest_allowed=one(picked.cheapest_allowed),
        cheapest=one(picked.cheapest),
        fastest=one(picked.fastest),
        fewest_nodes=one(picked.fewest_nodes),
        pareto=tuple(map(offer, picked.pareto)),
        nearest=tuple(map(offer, picked.nearest)),
        left_out=tuple(LeftOutDocument(server=left.server.name, reason=left.reason) for left in found.left_out),
        num_offers=found.num_offers,
        looked_at=tuple(found.looked_at),
        most_useful_nodes=found.most_useful_nodes,
        fsdp_bench=__version__,
        made_on=date.today().isoformat(),
        tariff=goal.tariff.value if goal.stated_price is None else None,
        stated_price=_stated_price(goal),
        servers=tuple(_server(offer) for offer in {one.cluster.server.name: one for one in picked.all()}.values()),
        **own,
    )


def _other_code(found: ModelPlan) -> OtherCodeDocument | None:
    other = found.other_code
    if other is None:
        return None
    offer = None if other.offer is None else _offer(other.offer)
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


def _offer(offer: SettingOffer) -> OfferDocument:
    prediction, setup = offer.prediction, offer.timed.setup
    memory = memory_document(
        prediction.memory.peak_allocated_bytes,
        prediction.needed_bytes,
        prediction.headroom_bytes,
        prediction.required_headroom,
        peak_range(setup.compile),
        prediction.memory.breakdown_bytes,
    )
    return offer_document(
        offer,
        memory,
        setup=setup,
        assumptions=assumptions(offer.goal.model, setup),
        expandable_segments=offer.expandable_segments,
    )


def memory_document(
    allocated: int,
    reserved: int,
    left: int | None,
    kept_free: Headroom,
    peaks: PeakRange | None,
    breakdown: dict[str, int],
) -> OfferMemory:
    """Return the memory of an offer: bytes at its peaks, those that are left, and those that are kept free."""
    return OfferMemory(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        peak_reserved_bytes_range=peaks and (round(reserved * peaks.lowest), round(reserved * peaks.highest)),
        range_because=peaks and peaks.because,
        headroom_bytes=left,
        required_headroom_bytes=kept_free.num_bytes,
        required_headroom_source=kept_free.source,
        breakdown_bytes=breakdown,
    )


def offer_document(offer: Offer, memory: OfferMemory, **own: Any) -> OfferDocument:
    """Return what every offer says, with the fields that are its own."""
    span, speed = offer.range, offer.tokens_per_second_per_gpu
    return OfferDocument(
        server=offer.cluster.server.name,
        gpu=offer.cluster.gpu.name,
        num_nodes=offer.cluster.num_nodes,
        num_gpus=offer.cluster.world_size,
        memory=memory,
        tokens_per_second_per_gpu=speed,
        tokens_per_second_per_gpu_range=span and (speed * span.slowest, speed * span.fastest),
        range_because=span and span.because,
        seconds=offer.seconds,
        fast_seconds=offer.fast_seconds,
        slow_seconds=offer.slow_seconds,
        price_per_hour=offer.per_hour,
        cost=offer.cost,
        fast_cost=offer.fast_cost,
        slow_cost=offer.slow_cost,
        energy_megawatt_hours=offer.megawatt_hours,
        slow_energy_megawatt_hours=offer.slow_megawatt_hours,
        **own,
    )
