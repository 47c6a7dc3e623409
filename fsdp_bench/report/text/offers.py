"""The offers of a plan as text: duration, price, speed and code, as the terminal and a page print them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fsdp_bench.plan.purchase.document import OfferDocument, PlanDocument, ServerDocument
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.recording.model import whose_code
from fsdp_bench.spec.setup import Checkpointing, Loss, TrainSetup

_INTEGER_FROM = 10
"""Longer durations are printed without tenths."""


class DurationUnit(NamedTuple):
    """A unit of durations."""

    seconds: int
    name: str

    def text(self, seconds: float) -> str:
        """Return a duration as a number."""
        count = seconds / self.seconds
        return f"{count:,.0f}" if count >= _INTEGER_FROM else f"{count:.1f}"


_UNITS = (DurationUnit(86_400, "days"), DurationUnit(3600, "hours"), DurationUnit(60, "minutes"))


def unit_of(offers: Iterable[OfferDocument]) -> DurationUnit:
    """Return the unit of the offers' durations: the largest that is shorter than the longest of them."""
    longest = max((offer.slow_seconds or offer.seconds or 0.0 for offer in offers), default=0.0)
    return _unit(longest) if longest else _UNITS[0]


def _unit(seconds: float) -> DurationUnit:
    return next((unit for unit in _UNITS if seconds >= unit.seconds), _UNITS[-1])


def duration_text(seconds: float) -> str:
    """Return a duration in days, hours or minutes."""
    unit = _unit(seconds)
    return f"{unit.text(seconds)} {unit.name}"


def fast_seconds(offer: OfferDocument) -> float | None:
    """Return the time at the fast end of the range; as predicted where there is none."""
    return offer.fast_seconds or offer.seconds


def fast_cost(offer: OfferDocument) -> float | None:
    """Return the price at the fast end of the range; as predicted where there is none."""
    return offer.fast_cost or offer.cost


def time_span(offer: OfferDocument, unit: DurationUnit) -> str:
    """Return the time of training in a unit, from the fast to the slow end of the range."""
    return _span(unit.text, fast_seconds(offer), offer.slow_seconds or offer.seconds)


def training_time(offer: OfferDocument, beside: OfferDocument | None = None) -> str:
    """Return the time of training, from the fast to the slow end of the range, in the unit of an offer beside it."""
    unit = unit_of([beside or offer])
    return f"{time_span(offer, unit)} {unit.name}"


def short_money(amount: float) -> str:
    """Return a price in three digits: it is not known better. ``1.66M``, ``166k``."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if amount >= unit:
            return f"{amount / unit:.3g}{name}" if amount < 999.5 * unit else f"{amount / unit:,.0f}{name}"
    return f"{amount:,.0f}"


def cost_span(offer: OfferDocument, money: Callable[[float], str] = short_money) -> str:
    """Return the price of training, from the fast to the slow end of the range."""
    return UNKNOWN if offer.cost is None else _span(money, fast_cost(offer), offer.slow_cost or offer.cost)


def _span(text: Callable[[float], str], low: float | None, high: float | None) -> str:
    first, last = text(low or 0.0), text(high or 0.0)
    return first if first == last else f"{first} to {last}"


def price_span(plan: PlanDocument, offer: OfferDocument, money: Callable[[float], str] = short_money) -> str:
    """Return the price of training with its currency."""
    return f"price {UNKNOWN}" if offer.cost is None else f"{cost_span(offer, money)}{currency_of(plan, offer)}"


def server_of(plan: PlanDocument, offer: OfferDocument) -> ServerDocument | None:
    """Return what the catalogue says of an offer's kind of server."""
    return next((one for one in plan.servers if one.name == offer.server), None)


def currency_of(plan: PlanDocument, offer: OfferDocument) -> str:
    """Return the currency of an offer's price, after a blank; empty if it is not known."""
    server = server_of(plan, offer)
    if plan.stated_price is not None:
        return "" if plan.stated_price.currency is None else f" {plan.stated_price.currency}"
    return "" if server is None or server.price is None else f" {server.price.currency}"


def stated_price(plan: PlanDocument) -> str:
    """Return the price that the user stated; empty if he stated none."""
    if plan.stated_price is None:
        return ""
    currency = "" if plan.stated_price.currency is None else f" {plan.stated_price.currency}"
    unit = "GPU" if plan.stated_price.unit == "gpu" else plan.stated_price.unit
    return f"{plan.stated_price.per_hour:,.2f}{currency} a {unit} and hour, stated"


def where(offer: OfferDocument) -> str:
    """Return an offer's servers and GPUs."""
    return f"{offer.num_nodes} x {offer.server} ({offer.num_gpus} {offer.gpu})"


def speed_text(offer: OfferDocument) -> str:
    """Return tokens per second of one GPU, as predicted."""
    return f"{offer.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"


def never_compared(offer: OfferDocument) -> str:
    """Return that no published run checks an offer's speed."""
    return f"never compared with such a run on {offer.gpu}"


def answer_text(plan: PlanDocument, money: Callable[[float], str] = short_money) -> str:
    """Return the answer of a plan in one line."""
    winner = plan.winner
    if winner is None:
        return f"no plan ({plan.source}): {plan.reason}"
    span = winner.tokens_per_second_per_gpu_range
    if winner.seconds is None:
        errors = f"{span[0]:,.0f} to {span[1]:,.0f} by the errors of earlier predictions" if span else ""
        speed = f"{speed_text(winner)}, {errors or never_compared(winner)}"
        return f"{plan.model} trains on {where(winner)} ({plan.source}): {speed}"
    source = plan.source if span else f"{plan.source}, {never_compared(winner)}"
    return f"{where(winner)} ({source}): {training_time(winner)}, {price_span(plan, winner, money)}"


def code_text(plan: PlanDocument, money: Callable[[float], str] = short_money) -> str:
    """Return whose code the answer is for, and what the same servers take with the other code."""
    answered, other, winner = whose_code(plan.code or "benchmark"), plan.other_code, plan.winner
    if other is None:
        return answered
    said = f"{answered}; with --code {other.code}, {whose_code(other.code)}"
    if other.offer is None:
        return f"{said}, nothing fits on these servers"
    setting = "the same setting" if other.is_same_setting else short_setting(other.offer.setup)
    if winner is not None and other.offer.expandable_segments and not winner.expandable_segments:
        setting += " with expandable segments"
    misses = f" ({missed})" if (missed := missed_limit(plan, other.offer)) else ""
    if plan.tokens is None:
        return f"{said}, {setting}: {speed_text(other.offer)}"
    return f"{said}, {setting}: {training_time(other.offer, winner)}{misses}, {price_span(plan, other.offer, money)}"


def missed_limit(plan: PlanDocument, offer: OfferDocument) -> str:
    """Return ``late`` or ``dear`` if an offer misses the deadline or the budget, at the slow end; else nothing."""
    if plan.deadline_seconds is not None and (offer.slow_seconds or 0.0) > plan.deadline_seconds:
        return "late"
    is_dear = plan.budget is not None and (offer.slow_cost is None or offer.slow_cost > plan.budget)
    return "dear" if is_dear else ""


def peak_warning(plan: PlanDocument, offer: OfferDocument) -> str:
    """Return how far published peaks were off, and whether the offer would not fit then; empty if none is known."""
    memory, server = offer.memory, server_of(plan, offer)
    if memory.peak_reserved_bytes_range is None or memory.range_because is None:
        return ""
    usable, kept = server and server.gpu_memory_bytes, memory.required_headroom_bytes
    if not usable or kept is None or memory.peak_reserved_bytes_range[1] <= usable - kept:
        return memory.range_because
    safest = "" if plan.safest is None else " (the row safest would)"
    return f"{memory.range_because}, with which it would not fit{safest}"


def energy_text(offer: OfferDocument) -> str:
    """Return the energy of training, at most."""
    energy = offer.slow_energy_megawatt_hours or offer.energy_megawatt_hours
    if energy is None:
        return UNKNOWN
    return f"at most {energy:,.1f} MWh: the servers' largest power for as long, without cooling and switches"


def short_setting(setup: TrainSetup) -> str:
    """Return a setting in a few words."""
    parts = [setup.strategy.value, setup.api.value]
    parts += [] if setup.checkpointing is Checkpointing.NONE else [f"checkpointing {setup.checkpointing.value}"]
    parts += [] if setup.loss is Loss.PLAIN else [setup.loss.value]
    parts.append(f"batch {setup.micro_batch_size}")
    parts += [f"x {setup.gradient_accumulation_steps}"] if setup.gradient_accumulation_steps > 1 else []
    return " ".join(parts)


def named_offers(plan: PlanDocument) -> list[tuple[str, OfferDocument]]:
    """Return every offer once, the winner first, with the names of what it is the best in."""
    named = {"winner": plan.winner, "safest": plan.safest}
    if plan.cheapest_allowed is not None and (plan.cheapest is None or plan.cheapest_allowed.key != plan.cheapest.key):
        limit = "in time" if plan.deadline_seconds is not None else "within budget"
        named[f"cheapest {limit}"] = plan.cheapest_allowed
    named |= {"cheapest": plan.cheapest, "fastest": plan.fastest, "fewest nodes": plan.fewest_nodes}
    found: dict[tuple[str, int, TrainSetup], tuple[list[str], OfferDocument]] = {}
    for name, offer in named.items():
        if offer is not None:
            found.setdefault(offer.key, ([], offer))[0].append(name)
    for name, several in (("nearest", plan.nearest), ("", plan.pareto)):
        for offer in several:
            found.setdefault(offer.key, ([name] if name else [], offer))
    return [(", ".join(names), offer) for names, offer in found.values()]
