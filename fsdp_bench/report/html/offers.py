"""The offers of a plan: a table, price against days, and how far predictions may be off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp_bench.plan.purchase.document import OfferDocument, PlanDocument, ServerDocument
from fsdp_bench.report.charts.axis import around
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Key, Line, Plot, Point
from fsdp_bench.report.html.blocks import Block, Cell, Row, Table, table
from fsdp_bench.report.text.common import UNKNOWN

DAY = 86_400
TENTHS_BELOW = 10
"""Fewer days, and less money, are printed with tenths."""


def offers_of(plan: PlanDocument) -> list[OfferDocument]:
    """Return every offer once, the winner first."""
    named = (plan.winner, plan.safest, plan.cheapest_allowed, plan.cheapest, plan.fastest, plan.fewest_nodes)
    found = (one for one in (*named, *plan.pareto, *plan.nearest) if one is not None)
    return list({one.key: one for one in found}.values())


def server_of(plan: PlanDocument, offer: OfferDocument) -> ServerDocument | None:
    """Return what the catalogue says of an offer's kind of server."""
    return next((one for one in plan.servers if one.name == offer.server), None)


def currency_of(plan: PlanDocument, offer: OfferDocument) -> str:
    """Return the currency of an offer's price, after a blank; empty if it is not known."""
    server = server_of(plan, offer)
    if plan.stated_price is not None:
        return "" if plan.stated_price.currency is None else f" {plan.stated_price.currency}"
    return "" if server is None or server.price is None else f" {server.price.currency}"


def days_text(seconds: float) -> str:
    """Return a duration in days."""
    days = seconds / DAY
    return f"{days:,.0f}" if days >= TENTHS_BELOW else f"{days:.1f}"


def money_text(amount: float) -> str:
    """Return a price, in three digits: it is not known better. One below TENTHS_BELOW has cents."""
    if amount < TENTHS_BELOW:
        return f"{amount:,.2f}"
    return f"{float(f'{amount:.3g}'):,.0f}"


def fast_seconds(offer: OfferDocument) -> float | None:
    """Return the time at the fast end of the range; as predicted where there is none."""
    return offer.fast_seconds or offer.seconds


def fast_cost(offer: OfferDocument) -> float | None:
    """Return the price at the fast end of the range; as predicted where there is none."""
    return offer.fast_cost or offer.cost


def days_span(offer: OfferDocument) -> str:
    """Return the days of training, from the fast to the slow end of the range."""
    assert offer.seconds is not None
    first, last = days_text(fast_seconds(offer) or 0.0), days_text(offer.slow_seconds or offer.seconds)
    if offer.range_because is None:
        return f"{first} (range {UNKNOWN})"
    return first if first == last else f"{first} to {last}"


def cost_span(plan: PlanDocument, offer: OfferDocument) -> str:
    """Return the price of training, from the fast to the slow end of the range."""
    if offer.cost is None:
        return f"price {UNKNOWN}"
    first, last = money_text(fast_cost(offer) or 0.0), money_text(offer.slow_cost or offer.cost)
    return (first if first == last else f"{first} to {last}") + currency_of(plan, offer)


def speed_text(offer: OfferDocument) -> str:
    """Return tokens per second of one GPU."""
    return f"{offer.tokens_per_second_per_gpu:,.0f}"


def _labels(plan: PlanDocument, offer: OfferDocument) -> str:
    allowed = "cheapest within the budget" if plan.deadline_seconds is None else "cheapest in time"
    named = {"winner": plan.winner, "safest": plan.safest, allowed: plan.cheapest_allowed}
    named |= {"cheapest": plan.cheapest, "fastest": plan.fastest, "fewest nodes": plan.fewest_nodes}
    words = [name for name, one in named.items() if one is not None and one.key == offer.key]
    return ", ".join(words or (["nearest"] if any(one.key == offer.key for one in plan.nearest) else []))


_TITLES = (
    "#", "offer", "server", "nodes", "GPUs", "days, fast end", "days, slow end", "price, fast end", "price, slow end",
    "currency", "tokens/s per GPU", "reserved, GiB", "headroom, GiB", "strategy", "api", "checkpointing", "loss",
    "offload", "micro-batch", "micro-batches a step", "expandable segments",
)  # fmt: skip
_NUMBERS = (
    "#", "nodes", "GPUs", "days, fast end", "days, slow end", "price, fast end", "price, slow end", "tokens/s per GPU",
    "reserved, GiB", "headroom, GiB", "micro-batch", "micro-batches a step",
)  # fmt: skip


def offer_table(plan: PlanDocument, offers: Sequence[OfferDocument]) -> Table:
    """Return one row for each offer, the winner first."""
    rows = [_row(plan, number, offer) for number, offer in enumerate(offers, start=1)]
    return table(f"{len(offers)} of {plan.num_offers} offers that fit (predicted)", _TITLES, rows, _NUMBERS)


def _row(plan: PlanDocument, number: int, offer: OfferDocument) -> Row:
    setup, memory = offer.setup, offer.memory
    known = offer.range_because is not None
    cells = (
        Cell(str(number), number),
        Cell(_labels(plan, offer)),
        Cell(offer.server),
        Cell(str(offer.num_nodes), offer.num_nodes),
        Cell(str(offer.num_gpus), offer.num_gpus),
        _cell(fast_seconds(offer), days_text, ""),
        _cell(offer.slow_seconds if known else None, days_text, "" if offer.seconds is None else UNKNOWN),
        _cell(fast_cost(offer), money_text, "" if offer.seconds is None else UNKNOWN),
        _cell(offer.slow_cost if known else None, money_text, "" if offer.seconds is None else UNKNOWN),
        Cell(currency_of(plan, offer).strip()),
        Cell(speed_text(offer), offer.tokens_per_second_per_gpu),
        _gib(memory.peak_reserved_bytes),
        _gib(memory.headroom_bytes),
        Cell(setup.strategy.value),
        Cell(setup.api.value),
        Cell(setup.checkpointing.value),
        Cell(setup.loss.value),
        Cell(setup.offload.value),
        Cell(str(setup.micro_batch_size), setup.micro_batch_size),
        Cell(str(setup.gradient_accumulation_steps), setup.gradient_accumulation_steps),
        Cell("yes" if offer.expandable_segments else "no"),
    )
    return Row(cells, is_marked=plan.winner is not None and plan.winner.key == offer.key)


def _cell(value: float | None, text: Callable[[float], str], without: str) -> Cell:
    return Cell(without) if value is None else Cell(text(value), value)


def _gib(size: int | None) -> Cell:
    return Cell(UNKNOWN) if size is None else Cell(f"{size / 2**30:,.1f}", size)


def left_out(plan: PlanDocument) -> list[Block]:
    """Return the servers without an offer."""
    rows = [Row((Cell(left.server), Cell(left.reason))) for left in plan.left_out]
    return [table("Servers without an offer", ("server", "reason"), rows)] if rows else []


WINNER, OTHER, RANGE = Style("brown"), Style("steel"), Style("faint", is_line=True)


def chart(plan: PlanDocument, offers: Sequence[OfferDocument]) -> Plot | None:
    """Return price against days, as predicted, and each range from its fast to its slow end.

    None without two known prices.
    """
    priced = [(number, one) for number, one in enumerate(offers, start=1) if one.cost and one.seconds]
    if len(priced) < 2:
        return None
    lines = []
    for _, one in priced:
        days, cost = _end(one)
        lines.append(Line(RANGE, ((fast_seconds(one) or 0) / DAY, days), (fast_cost(one) or 0.0, cost)))
    points = [
        Point(
            WINNER if plan.winner is not None and one.key == plan.winner.key else OTHER,
            (one.seconds or 0.0) / DAY,
            one.cost or 0.0,
            number,
            f"{one.num_nodes} x {one.server}: {days_span(one)} days",
        )
        for number, one in priced
    ]
    unpriced = len(offers) - len(priced)
    remarks = ["a number stands at the prediction; its line is the range that the errors of published runs leave"]
    remarks += [f"{unpriced} offers have no known price"] if unpriced else []
    return Plot(
        "Price against days: the numbers are those of the table below (predicted)",
        around("days of training", [value for line in lines for value in line.x], may_be_log=True),
        around(f"price{currency_of(plan, priced[0][1])}", [value for line in lines for value in line.y]),
        lines=tuple(lines),
        points=tuple(points),
        legend=(
            Key(WINNER, "winner"),
            Key(OTHER, "other offers"),
            Key(RANGE, "from the fast to the slow end of the range"),
        ),
        remarks=tuple(remarks),
    )


def _end(offer: OfferDocument) -> tuple[float, float]:
    """Return days and price at the slow end of the range; as predicted where that is not known."""
    is_known = offer.range_because is not None
    seconds, cost = (offer.slow_seconds, offer.slow_cost) if is_known else (offer.seconds, offer.cost)
    return (seconds or offer.seconds or 0.0) / DAY, cost or offer.cost or 0.0


def ranges(offers: Sequence[OfferDocument]) -> Table:
    """Return the range of each kind of server's speed, and why."""
    titles = ("server", "GPU", "nodes", "predicted", "slow end", "fast end", "why")
    rows = []
    for offer in offers:
        span = offer.tokens_per_second_per_gpu_range
        why = offer.range_because or f"never compared with such a run on {offer.gpu}"
        ends = [Cell(UNKNOWN)] * 2 if span is None else [Cell(f"{value:,.0f}", value) for value in span]
        speed = Cell(speed_text(offer), offer.tokens_per_second_per_gpu)
        nodes = Cell(str(offer.num_nodes), offer.num_nodes)
        rows.append(Row((Cell(offer.server), Cell(offer.gpu), nodes, speed, *ends, Cell(why))))
    return table("Tokens/s per GPU (predicted), and the range that published runs leave", titles, rows, titles[2:6])
