"""A plan as text: the winner and why, what it rests on, other offers. Pages print durations and prices alike."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import NamedTuple

from fsdp_bench.plan.purchase.document import PlanDocument, ServerDocument
from fsdp_bench.plan.purchase.offer import OfferDocument, OfferKey
from fsdp_bench.plan.setup_text import SIZES, setup_line
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import UNKNOWN, assumed_lines, fact
from fsdp_bench.report.text.conditions import Fact
from fsdp_bench.spec.recording.model import whose_code
from fsdp_bench.spec.setup import Checkpointing, Loss
from fsdp_bench.spec.units import format_count, format_gib

_INTEGER_FROM = 10
"""Longer durations are printed without tenths."""
_SPEED = "tokens/s\nper GPU"
_NEVER_COMPARED = " *"
Ends = tuple[float | None, float | None]
"""The fast and the slow end of a range; as predicted where there is none."""


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
    longest = max((times(offer)[1] or 0.0 for offer in offers), default=0.0)
    return _unit(longest) if longest else _UNITS[0]


def _unit(seconds: float) -> DurationUnit:
    return next((unit for unit in _UNITS if seconds >= unit.seconds), _UNITS[-1])


def duration_text(seconds: float) -> str:
    """Return a duration in days, hours or minutes."""
    unit = _unit(seconds)
    return f"{unit.text(seconds)} {unit.name}"


def times(offer: OfferDocument) -> Ends:
    """Return the seconds of training."""
    return offer.fast_seconds or offer.seconds, offer.slow_seconds or offer.seconds


def costs(offer: OfferDocument) -> Ends:
    """Return the price of training."""
    return offer.fast_cost or offer.cost, offer.slow_cost or offer.cost


def _span(text: Callable[[float], str], ends: Ends) -> str:
    first, last = (text(end or 0.0) for end in ends)
    return first if first == last else f"{first} to {last}"


def training_time(offer: OfferDocument, beside: OfferDocument | None = None) -> str:
    """Return the time of training, from the fast to the slow end of the range, in the unit of an offer beside it."""
    unit = unit_of([beside or offer])
    return f"{_span(unit.text, times(offer))} {unit.name}"


def short_money(amount: float) -> str:
    """Return a price in three digits: it is not known better. ``1.66M``, ``166k``."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if amount >= unit:
            return f"{amount / unit:.3g}{name}" if amount < 999.5 * unit else f"{amount / unit:,.0f}{name}"
    return f"{amount:,.0f}"


def _price_span(plan: PlanDocument, offer: OfferDocument, money: Callable[[float], str]) -> str:
    return f"price {UNKNOWN}" if offer.cost is None else f"{_span(money, costs(offer))}{currency_of(plan, offer)}"


def server_of(plan: PlanDocument, offer: OfferDocument) -> ServerDocument | None:
    """Return what the catalogue says of an offer's kind of server."""
    return next((one for one in plan.servers if one.name == offer.server), None)


def currency_of(plan: PlanDocument, offer: OfferDocument) -> str:
    """Return the currency of an offer's price, after a blank; empty if it is not known."""
    server = server_of(plan, offer)
    price = server.price if server and plan.stated_price is None else plan.stated_price
    return "" if price is None or price.currency is None else f" {price.currency}"


def stated_price(plan: PlanDocument) -> str:
    """Return the price that the user stated; empty if he stated none."""
    price = plan.stated_price
    if price is None:
        return ""
    currency = "" if price.currency is None else f" {price.currency}"
    return f"{price.per_hour:,.2f}{currency} a {'GPU' if price.unit == 'gpu' else price.unit} and hour, stated"


def _where(offer: OfferDocument) -> str:
    limit = "" if offer.gpu_power_watts is None else f" at {offer.gpu_power_watts:g} W"
    return f"{offer.num_nodes} x {offer.server} ({offer.num_gpus} {offer.gpu}{limit})"


def _speed_text(offer: OfferDocument) -> str:
    return f"{offer.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"


def never_compared(offer: OfferDocument) -> str:
    """Return that no published run checks an offer's speed."""
    return f"never compared with such a run on {offer.gpu}"


def answer_text(plan: PlanDocument, money: Callable[[float], str] = short_money) -> str:
    """Return the answer of a plan in one line."""
    winner = plan.winner
    if winner is None:
        return f"no plan ({source_text(plan)}): {plan.reason}"
    span = winner.tokens_per_second_per_gpu_range
    if winner.seconds is None:
        errors = f"{span[0]:,.0f} to {span[1]:,.0f} by the errors of earlier predictions" if span else ""
        speed = f"{_speed_text(winner)}, {errors or never_compared(winner)}"
        return f"{plan.title} trains on {_where(winner)} ({source_text(plan)}): {speed}"
    source = source_text(plan) if span else f"{source_text(plan)}, {never_compared(winner)}"
    return f"{_where(winner)} ({source}): {training_time(winner)}, {_price_span(plan, winner, money)}"


def source_text(plan: PlanDocument) -> str:
    """Return what the numbers are: predicted, or rehearsed with a predicted time."""
    return plan.source if plan.command is None else f"{plan.source}, time predicted"


def code_text(plan: PlanDocument, money: Callable[[float], str] = short_money) -> str:
    """Return whose code the answer is for, and what the same servers take with the other code."""
    if plan.command is not None:
        return plan.command if plan.winner is None else shlex.join(plan.winner.command)
    answered, other, winner = whose_code(plan.code or "benchmark"), plan.other_code, plan.winner
    if other is None:
        return answered
    said = f"{answered}; with --code {other.code}, {whose_code(other.code)}"
    if other.offer is None:
        return f"{said}, nothing fits on these servers"
    setting = "the same setting" if other.is_same_setting else _short_setting(other.offer)
    if winner is not None and other.offer.expandable_segments and not winner.expandable_segments:
        setting += " with expandable segments"
    misses = f" ({missed})" if (missed := _missed_limit(plan, other.offer)) else ""
    if plan.tokens is None:
        return f"{said}, {setting}: {_speed_text(other.offer)}"
    return f"{said}, {setting}: {training_time(other.offer, winner)}{misses}, {_price_span(plan, other.offer, money)}"


def _missed_limit(plan: PlanDocument, offer: OfferDocument) -> str:
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


def _short_setting(offer: OfferDocument) -> str:
    setup = offer.setup
    if setup is None:
        return ", ".join(f"{name} {value}" for name, value in offer.values.items())
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
    found: dict[OfferKey, tuple[list[str], OfferDocument]] = {}
    for name, offer in named.items():
        if offer is not None:
            found.setdefault(offer.key, ([], offer))[0].append(name)
    for name, several in (("nearest", plan.nearest), ("", plan.pareto)):
        for offer in several:
            found.setdefault(offer.key, ([name] if name else [], offer))
    return [(", ".join(names), offer) for names, offer in found.values()]


def plan_text(plan: PlanDocument) -> str:
    """Return a plan as text; the first line is the answer."""
    winner, offers = plan.winner, named_offers(plan)
    lines = [answer_text(plan), f"  for {code_text(plan)}"]
    if winner is not None:
        lines += [*assumed_lines(winner.assumptions), f"  why: {plan.reason}", ""]
        lines += [fact(*one) for one in facts(plan, winner)]
        if plan.most_useful_nodes is not None:
            most = f"{plan.most_useful_nodes} x {winner.server}"
            lines.append(fact("more nodes", f"do not help: beyond {most} training is not faster (predicted)"))
    if offers:
        lines += ["", *_table(plan, offers)]
    if not all(offer.is_like_published for _, offer in offers):
        lines.append("* unlike all published runs that were compared: the range is wide")
        lines.append("  (the winner is one of these only where no other is in time and in budget)")
    shown = {offer.server for _, offer in offers}
    if beaten := [name for name in plan.looked_at if name not in shown]:
        why = "none of their offers is the cheapest or the fastest, or their price is unknown"
        lines += ["", fact("not shown", f"{', '.join(beaten)}: {why}")]
    left_out: dict[str, list[str]] = {}
    for left in plan.left_out:
        left_out.setdefault(left.reason, []).append(left.server)
    lines += [""] if left_out else []
    return "\n".join(
        [*lines, *(fact("left out", f"{', '.join(several)}: {reason}") for reason, several in left_out.items())]
    )


def facts(plan: PlanDocument, offer: OfferDocument) -> list[Fact]:
    """Return what an offer trains and needs, and at what speed and price."""
    span, predicted = offer.tokens_per_second_per_gpu_range, offer.tokens_per_second_per_gpu
    speed = f"{_speed_text(offer)}; {never_compared(offer)}"
    if span is not None:
        speed = f"{span[0]:,.0f} to {span[1]:,.0f} tokens/s per GPU: predicted {predicted:,.0f}, and"
        speed += f" {offer.range_because}"
    found = [*_trains(plan, offer), ("memory", _memory(plan, offer)), ("speed", speed), ("price", _price(plan, offer))]
    return found if plan.tokens is None else [*found, ("energy", energy_text(offer))]


def _trains(plan: PlanDocument, offer: OfferDocument) -> list[Fact]:
    """Return the model or the script, its tokens and its setting."""
    setup, tokens = offer.setup, f"{format_count(plan.tokens)} tokens, " if plan.tokens is not None else ""
    if setup is None:
        each = format_count(offer.tokens_per_step or 0)
        return [("command", shlex.join(offer.command)), ("training", f"{tokens}{each} tokens a step on all GPUs")]
    batch = f"batch {setup.micro_batch_size} x {setup.sequence_length} tokens on each GPU"
    steps = setup.gradient_accumulation_steps
    batch += f", {steps} micro-batches a step" if steps > 1 else ""
    each = format_count(setup.tokens_per_step_per_rank * setup.world_size)
    return [
        ("model", plan.title + (f": {plan.model_description}" if plan.model_description else "")),
        ("training", f"{tokens}{batch}: {each} tokens a step"),
        ("setting", setup_line(setup, _BESIDE) + ", expandable segments" * offer.expandable_segments),
    ]


def _memory(plan: PlanDocument, offer: OfferDocument) -> str:
    memory, server, warning = offer.memory, server_of(plan, offer), peak_warning(plan, offer)
    left, kept, usable = memory.headroom_bytes, memory.required_headroom_bytes, server and server.gpu_memory_bytes
    text = f"reserved {format_gib(memory.peak_reserved_bytes)}" + (f" of {format_gib(usable)} usable" if usable else "")
    if left is not None and kept is not None:
        text += f", {format_gib(left)} left; {format_gib(kept)} of that kept free for the CUDA context and NCCL"
    if memory.peak_reserved_bytes_range is None:
        return text
    low, high = map(format_gib, memory.peak_reserved_bytes_range)
    return f"{text}; may be {low} to {high}" + (f": {warning}" if warning else "")


_BESIDE = ("world_size", *SIZES, "gradient_accumulation_steps", "sync_every_micro_batch")
"""Fields that are said beside the setting, or assumed."""


def _price(plan: PlanDocument, offer: OfferDocument) -> str:
    server = server_of(plan, offer)
    if plan.stated_price is not None:
        return stated_price(plan)
    if server is None or server.price is None or offer.price_per_hour is None:
        return f"{UNKNOWN}: the catalogue has none for {offer.server}; --price 2.10/gpu-hour states one"
    price = server.price
    each, age = offer.price_per_hour / offer.num_nodes, price.source.age_days(date.today())
    old = "" if age is None or age < 1 else f", {age} days ago"
    region = "" if price.region is None else f" in {price.region}"
    return f"{each:,.2f} {price.currency} a server and hour, {plan.tariff}{region} ({price.source.date}{old})"


def _table(plan: PlanDocument, offers: Sequence[tuple[str, OfferDocument]]) -> list[str]:
    """Return one line for each offer. Without tokens the speed is the answer, which no narrow terminal leaves out."""
    unit = unit_of(offer for _, offer in offers)
    headers = ("", "nodes", "server", unit.name, "price", _SPEED, "setting")
    rows = []
    for label, offer in offers:
        star = "" if offer.is_like_published else _NEVER_COMPARED
        missed = f" {word}" if (word := _missed_limit(plan, offer)) else ""
        speed = f"{offer.tokens_per_second_per_gpu:,.0f}{star if offer.seconds is None else ''}"
        time = "" if offer.seconds is None else f"{_span(unit.text, times(offer))}{star}{missed}"
        setting = _short_setting(offer)
        rows.append((label, str(offer.num_nodes), offer.server, time, _cost(offer), speed, setting))
    numbers = ("nodes", unit.name, "price", _SPEED)
    return table_lines(table_columns(headers, rows, numbers, (_SPEED,) if plan.tokens is not None else ()))


def _cost(offer: OfferDocument) -> str:
    if offer.seconds is not None:
        return UNKNOWN if offer.cost is None else _span(short_money, costs(offer))
    if offer.price_per_hour is None:
        return UNKNOWN
    each = offer.price_per_hour / 3600 / (offer.tokens_per_second_per_gpu * offer.num_gpus) * 1e9
    return f"{each:,.2f}/B tokens"
