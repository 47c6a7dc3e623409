"""A plan as text: the winner and why, then what it rests on, then the offers beside it, one line each."""

from __future__ import annotations

from datetime import date

from fsdp_bench.plan.defaults import assumptions
from fsdp_bench.plan.purchase.goal import SECONDS_PER_DAY
from fsdp_bench.plan.purchase.offer import Offer
from fsdp_bench.plan.purchase.planner import Plan
from fsdp_bench.plan.ranges import peak_range
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import UNKNOWN, assumed_lines, fact
from fsdp_bench.spec.recording.model import code_of, whose_code
from fsdp_bench.spec.setup import Checkpointing, Loss, Offload, Reentrant, TrainSetup
from fsdp_bench.spec.units import format_count, format_gib

_HEADERS = ("", "nodes", "server", "days", "price", "tokens/s\nper GPU", "setting")
_NUMBERS = ("nodes", "days", "price", "tokens/s\nper GPU")
_DROPPABLE = ("tokens/s\nper GPU",)
_ENOUGH_DAYS = 10
"""From so many days on no tenths are printed."""
_NEVER_COMPARED = " *"


def plan_text(found: Plan) -> str:
    """Return a plan as text; the first line is the answer."""
    winner = found.picked.winner
    lines = [_answer(found), f"  {_code(found)}"]
    if winner is not None:
        lines += assumed_lines(assumptions(found.goal.model, winner.timed.setup))
    if winner is not None:
        lines += [f"  why: {found.reason}", "", *_facts(winner, found.picked.safest)]
        if found.most_useful_nodes is not None:
            most = f"{found.most_useful_nodes} x {winner.cluster.server.name}"
            lines.append(fact("more nodes", f"do not help: beyond {most} training is not faster (predicted)"))
    rows = _rows(found)
    if rows:
        lines += ["", *table_lines(table_columns(_HEADERS, rows, _NUMBERS, _droppable(found)))]
    if any(_NEVER_COMPARED in cell for row in rows for cell in row):
        lines.append("* as predicted: no published run of such a setup on such a GPU was ever compared")
        lines.append("  (the winner is one of these only where no other is in time and in budget)")
    shown = {offer.cluster.server.name for offer in found.picked.all()}
    if beaten := [name for name in found.looked_at if name not in shown]:
        why = "none of their offers is the cheapest or the fastest, or their price is unknown"
        lines += ["", fact("not shown", f"{', '.join(beaten)}: {why}")]
    if found.left_out:
        lines += ["", *_left_out(found)]
    return "\n".join(lines)


def _droppable(found: Plan) -> tuple[str, ...]:
    """Return the columns that a narrow terminal leaves out. Without tokens, the speed is the answer."""
    return _DROPPABLE if found.goal.tokens is not None else ()


def _left_out(found: Plan) -> list[str]:
    names: dict[str, list[str]] = {}
    for left in found.left_out:
        names.setdefault(left.reason, []).append(left.server.name)
    return [fact("left out", f"{', '.join(several)}: {reason}") for reason, several in names.items()]


def _answer(found: Plan) -> str:
    winner, goal = found.picked.winner, found.goal
    if winner is None:
        return f"no plan (predicted): {found.reason}"
    cluster = winner.cluster
    where = f"{cluster.num_nodes} x {cluster.server.name} ({cluster.world_size} {cluster.gpu.name})"
    if goal.tokens is None:
        speed = f"{winner.timed.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        return f"{goal.model.name} trains on {where} (predicted): {speed}{_to_speed(winner)}"
    if winner.range is None:
        first = f"never compared with such a run on {cluster.gpu.name}"
        return f"{where} (predicted, {first}): {_span(winner)}, {_price_span(winner)}"
    return f"{where} (predicted): {_span(winner)}, {_price_span(winner)}"


def _code(found: Plan) -> str:
    """Return whose code the answer is for, and what the same servers take with the other code."""
    answered, other = f"for {whose_code(code_of(found.goal.model))}", found.other_code
    if other is None:
        return answered
    said = f"{answered}; with --code {other.code}, {whose_code(other.code)}"
    if other.offer is None:
        return f"{said}, nothing fits on these servers"
    setting = "the same setting" if other.is_same_setting else _short(other.offer)
    winner = found.picked.winner
    if winner is not None and other.offer.expandable_segments and not winner.expandable_segments:
        setting += " with expandable segments"
    misses = f" ({word.strip()})" if (word := _misses(other.offer)) else ""
    if found.goal.tokens is None:
        return f"{said}, {setting}: {other.offer.timed.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
    return f"{said}, {setting}: {_span(other.offer)}{misses}, {_price_span(other.offer)}"


def _facts(offer: Offer, safest: Offer | None) -> list[str]:
    setup, prediction, goal = offer.timed.setup, offer.prediction, offer.goal
    tokens = f"{format_count(goal.tokens)} tokens, " if goal.tokens is not None else ""
    left, kept = prediction.headroom_bytes, prediction.required_headroom_bytes
    memory = (
        f"reserved {format_gib(prediction.needed_bytes)} of {format_gib(prediction.estimate.gpu_bytes or 0)} usable"
    )
    if left is not None and kept is not None:
        memory += f", {format_gib(left)} left; {format_gib(kept)} of that kept free for the CUDA context and NCCL"
    span = peak_range(setup.compile)
    if span is not None:
        usable = prediction.estimate.available_bytes
        too_much = usable is not None and prediction.needed_bytes * span.highest > usable
        memory += f"; {span.because}{', with which it would not fit' if too_much else ''}"
        memory += " (the row safest would)" if too_much and safest is not None else ""
    lines = [
        fact("model", f"{goal.model.name}: {goal.model.describe()}"),
        fact("training", f"{tokens}{_batch(setup)}"),
        fact("setting", _setting(setup, offer.expandable_segments)),
        fact("memory", memory),
        fact("speed", _speed(offer)),
        fact("price", _price(offer)),
    ]
    if offer.goal.tokens is not None:
        lines.append(fact("energy", _energy(offer)))
    return lines


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


def _speed(offer: Offer) -> str:
    speed, span = offer.timed.tokens_per_second_per_gpu, offer.range
    if span is None:
        return f"{speed:,.0f} tokens/s per GPU; never compared with such a run on {offer.cluster.gpu.name}"
    low, high = speed * span.slowest, speed * span.fastest
    return f"{low:,.0f} to {high:,.0f} tokens/s per GPU: predicted {speed:,.0f}, and {span.because}"


def _to_speed(offer: Offer) -> str:
    span, speed = offer.range, offer.timed.tokens_per_second_per_gpu
    if span is None:
        return f", never compared with such a run on {offer.cluster.gpu.name}"
    return f", {speed * span.slowest:,.0f} to {speed * span.fastest:,.0f} by the errors of earlier predictions"


def _energy(offer: Offer) -> str:
    fast, slow = offer.megawatt_hours, offer.slow_megawatt_hours
    if fast is None or slow is None:
        return UNKNOWN
    return f"at most {slow:,.1f} MWh: the servers' largest power for as long, without cooling and switches"


def _price(offer: Offer) -> str:
    goal, price = offer.goal, offer.price
    if goal.stated_price is not None:
        unit = "GPU" if goal.stated_price.is_per_gpu else "server"
        return f"{goal.stated_price.per_hour:,.2f}{_currency(offer)} a {unit} and hour, stated"
    if price is None or offer.per_hour is None:
        return f"{UNKNOWN}: the catalogue has none for {offer.cluster.server.name}; --price 2.10/gpu-hour states one"
    each = offer.per_hour / offer.cluster.num_nodes
    age = price.age_days(date.today())
    old = "" if age is None or age < 1 else f", {age} days ago"
    region = "" if price.region is None else f" in {price.region}"
    return f"{each:,.2f} {price.currency} a server and hour, {goal.tariff.value}{region} ({price.source.date}{old})"


def _span(offer: Offer) -> str:
    return f"{_days_range(offer)} days"


def _price_span(offer: Offer) -> str:
    if offer.cost is None:
        return f"price {UNKNOWN}"
    return f"{_cost_range(offer)}{_currency(offer)}"


def _currency(offer: Offer) -> str:
    return "" if offer.currency is None else f" {offer.currency}"


def _days_range(offer: Offer) -> str:
    assert offer.fast_seconds is not None
    assert offer.slow_seconds is not None
    fast, slow = _days(offer.fast_seconds / SECONDS_PER_DAY), _days(offer.slow_seconds / SECONDS_PER_DAY)
    return fast if fast == slow else f"{fast} to {slow}"


def _cost_range(offer: Offer) -> str:
    assert offer.fast_cost is not None
    assert offer.slow_cost is not None
    fast, slow = _money(offer.fast_cost), _money(offer.slow_cost)
    return fast if fast == slow else f"{fast} to {slow}"


def _money(amount: float) -> str:
    """Return three digits: prices and speeds are not known better."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if amount >= unit:
            return f"{amount / unit:.3g}{name}" if amount < 999.5 * unit else f"{amount / unit:,.0f}{name}"
    return f"{amount:,.0f}"


def _days(days: float) -> str:
    if days < 1:
        return f"{days:.2g}"
    return f"{days:,.0f}" if days >= _ENOUGH_DAYS else f"{days:.1f}"


def _rows(found: Plan) -> list[tuple[str, ...]]:
    picked = found.picked
    allowed = "cheapest in time" if found.goal.deadline_seconds is not None else "cheapest within budget"
    named = {"winner": picked.winner, "safest": picked.safest}
    if picked.cheapest_allowed is not picked.cheapest:
        named[allowed] = picked.cheapest_allowed
    named |= {"cheapest": picked.cheapest, "fastest": picked.fastest}
    named["fewest nodes"] = picked.fewest_nodes
    labels: dict[tuple[str, int, TrainSetup], list[str]] = {}
    offers: dict[tuple[str, int, TrainSetup], Offer] = {}
    for name, offer in named.items():
        if offer is not None:
            labels.setdefault(offer.identity, []).append(name)
            offers[offer.identity] = offer
    for name, several in (("nearest", picked.nearest), ("", picked.pareto)):
        for offer in several:
            if offer.identity not in offers:
                offers[offer.identity] = offer
                labels[offer.identity] = [name] if name else []
    return [_row(", ".join(labels[key]), offer) for key, offer in offers.items()]


def _row(label: str, offer: Offer) -> tuple[str, ...]:
    star = _NEVER_COMPARED if offer.range is None else ""
    return (
        label,
        str(offer.cluster.num_nodes),
        offer.cluster.server.name,
        "" if offer.seconds is None else f"{_days_range(offer)}{star}{_misses(offer)}",
        _cost(offer),
        f"{offer.timed.tokens_per_second_per_gpu:,.0f}{star if offer.seconds is None else ''}",
        _short(offer),
    )


def _misses(offer: Offer) -> str:
    """Return that an offer misses the deadline or the budget, at the slow end."""
    if offer.meets_deadline and offer.meets_budget:
        return ""
    return " late" if not offer.meets_deadline else " dear"


def _cost(offer: Offer) -> str:
    if offer.goal.tokens is None:
        each = offer.cost_per_billion_tokens
        return UNKNOWN if each is None else f"{each:,.2f}/B tokens"
    return UNKNOWN if offer.cost is None else _cost_range(offer)


def _short(offer: Offer) -> str:
    setup = offer.timed.setup
    parts = [setup.strategy.value, setup.api.value]
    parts += [] if setup.checkpointing is Checkpointing.NONE else [f"checkpointing {setup.checkpointing.value}"]
    parts += [] if setup.loss is Loss.PLAIN else [setup.loss.value]
    parts.append(f"batch {setup.micro_batch_size}")
    parts += [f"x {setup.gradient_accumulation_steps}"] if setup.gradient_accumulation_steps > 1 else []
    return " ".join(parts)
