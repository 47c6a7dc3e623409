"""A plan as text: the winner and why, then what it rests on, then the offers beside it, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from fsdp_bench.plan.purchase.document import OfferDocument, PlanDocument
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import UNKNOWN, assumed_lines, fact
from fsdp_bench.report.text.offers import (
    answer_text,
    code_text,
    cost_span,
    energy_text,
    missed_limit,
    named_offers,
    never_compared,
    peak_warning,
    server_of,
    short_setting,
    speed_text,
    stated_price,
    time_span,
    unit_of,
)
from fsdp_bench.spec.setup import Checkpointing, Loss, Offload, Reentrant, TrainSetup
from fsdp_bench.spec.units import format_count, format_gib

_SPEED = "tokens/s\nper GPU"
_NEVER_COMPARED = " *"


def plan_text(plan: PlanDocument) -> str:
    """Return a plan as text; the first line is the answer."""
    winner, offers = plan.winner, named_offers(plan)
    lines = [answer_text(plan), f"  for {code_text(plan)}"]
    if winner is not None:
        lines += [*assumed_lines(winner.assumptions), f"  why: {plan.reason}", "", *_facts(plan, winner)]
        if plan.most_useful_nodes is not None:
            most = f"{plan.most_useful_nodes} x {winner.server}"
            lines.append(fact("more nodes", f"do not help: beyond {most} training is not faster (predicted)"))
    if offers:
        lines += ["", *_table(plan, offers)]
    if any(offer.range_because is None for _, offer in offers):
        lines.append("* as predicted: no published run of such a setup on such a GPU was ever compared")
        lines.append("  (the winner is one of these only where no other is in time and in budget)")
    shown = {offer.server for _, offer in offers}
    if beaten := [name for name in plan.looked_at if name not in shown]:
        why = "none of their offers is the cheapest or the fastest, or their price is unknown"
        lines += ["", fact("not shown", f"{', '.join(beaten)}: {why}")]
    if plan.left_out:
        lines += ["", *_left_out(plan)]
    return "\n".join(lines)


def _left_out(plan: PlanDocument) -> list[str]:
    names: dict[str, list[str]] = {}
    for left in plan.left_out:
        names.setdefault(left.reason, []).append(left.server)
    return [fact("left out", f"{', '.join(several)}: {reason}") for reason, several in names.items()]


def _facts(plan: PlanDocument, offer: OfferDocument) -> list[str]:
    tokens = f"{format_count(plan.tokens)} tokens, " if plan.tokens is not None else ""
    lines = [
        fact("model", f"{plan.model}: {plan.model_description}"),
        fact("training", f"{tokens}{_batch(offer.setup)}"),
        fact("setting", _setting(offer.setup, offer.expandable_segments)),
        fact("memory", _memory(plan, offer)),
        fact("speed", _speed(offer)),
        fact("price", _price(plan, offer)),
    ]
    return lines if plan.tokens is None else [*lines, fact("energy", energy_text(offer))]


def _memory(plan: PlanDocument, offer: OfferDocument) -> str:
    memory, server, warning = offer.memory, server_of(plan, offer), peak_warning(plan, offer)
    left, kept, usable = memory.headroom_bytes, memory.required_headroom_bytes, server and server.gpu_memory_bytes
    text = f"reserved {format_gib(memory.peak_reserved_bytes)} of {format_gib(usable or 0)} usable"
    if left is not None and kept is not None:
        text += f", {format_gib(left)} left; {format_gib(kept)} of that kept free for the CUDA context and NCCL"
    return f"{text}; {warning}" if warning else text


def _batch(setup: TrainSetup) -> str:
    batch = f"batch {setup.micro_batch_size} x {setup.sequence_length} tokens on each GPU"
    steps = setup.gradient_accumulation_steps
    more = f", {steps} micro-batches a step" if steps > 1 else ""
    return f"{batch}{more}: {format_count(setup.tokens_per_step_per_rank * setup.world_size)} tokens a step"


_OF_STEPS = ("gradient_accumulation_steps", "sync_every_micro_batch")
"""Fields that are said beside the batch, or assumed."""


def _setting(setup: TrainSetup, segments: bool) -> str:
    parts = [setup.strategy.value, setup.api.value, str(setup.precision)]
    parts.append(f"checkpointing {setup.checkpointing.value}")
    if setup.checkpointing is Checkpointing.SELECTIVE and setup.checkpointing_policy is not None:
        parts[-1] += f" {setup.checkpointing_policy}"
    parts[-1] += "" if setup.reentrant is Reentrant.NO else f" reentrant {setup.reentrant.value}"
    parts += [] if setup.loss is Loss.PLAIN else [f"loss {setup.loss.value}"]
    parts += [] if setup.offload is Offload.NONE else [f"offload {setup.offload.value}"]
    others = setup.changed("checkpointing_policy", "reentrant", "loss", *_OF_STEPS)
    parts += [one.phrase(getattr(setup, one.name)) for one in others]
    parts += ["expandable segments"] if segments else []
    return ", ".join(parts)


def _speed(offer: OfferDocument) -> str:
    span = offer.tokens_per_second_per_gpu_range
    if span is None:
        return f"{speed_text(offer)}; {never_compared(offer)}"
    predicted = f"{offer.tokens_per_second_per_gpu:,.0f}"
    return f"{span[0]:,.0f} to {span[1]:,.0f} tokens/s per GPU: predicted {predicted}, and {offer.range_because}"


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
        star = _NEVER_COMPARED if offer.range_because is None else ""
        missed = f" {word}" if (word := missed_limit(plan, offer)) else ""
        speed = f"{offer.tokens_per_second_per_gpu:,.0f}{star if offer.seconds is None else ''}"
        time = "" if offer.seconds is None else f"{time_span(offer, unit)}{star}{missed}"
        rows.append((label, str(offer.num_nodes), offer.server, time, _cost(offer), speed, short_setting(offer.setup)))
    numbers = ("nodes", unit.name, "price", _SPEED)
    return table_lines(table_columns(headers, rows, numbers, (_SPEED,) if plan.tokens is not None else ()))


def _cost(offer: OfferDocument) -> str:
    """Return the price of training; without tokens, of a billion of them."""
    if offer.seconds is not None:
        return cost_span(offer)
    if offer.price_per_hour is None:
        return UNKNOWN
    each = offer.price_per_hour / 3600 / (offer.tokens_per_second_per_gpu * offer.num_gpus) * 1e9
    return f"{each:,.2f}/B tokens"
