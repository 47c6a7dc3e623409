"""The offers of a plan on its page: a table, price against days, and how far predictions may be off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp_bench.plan.purchase.document import OfferDocument, PlanDocument
from fsdp_bench.report.charts.axis import around
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Key, Line, Plot, Point
from fsdp_bench.report.html.blocks import Block, Cell, Row, Table, table
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.offers import (
    DurationUnit,
    currency_of,
    fast_cost,
    fast_seconds,
    named_offers,
    never_compared,
    training_time,
    unit_of,
)

CENTS_BELOW = 10
"""Smaller prices are printed with cents."""


def money_text(amount: float) -> str:
    """Return a price, in three digits: it is not known better. One below CENTS_BELOW has cents."""
    if amount < CENTS_BELOW:
        return f"{amount:,.2f}"
    return f"{float(f'{amount:.3g}'):,.0f}"


def offers_of(plan: PlanDocument) -> list[OfferDocument]:
    """Return every offer once, the winner first."""
    return [offer for _, offer in named_offers(plan)]


_BEFORE = ("#", "offer", "server", "nodes", "GPUs")
_AFTER = (
    *("price, fast end", "price, slow end", "currency", "tokens/s per GPU", "reserved, GiB", "left, GiB", "strategy"),
    *("api", "checkpointing", "loss", "offload", "micro-batch", "micro-batches a step", "expandable segments"),
)
_NUMBERS = (
    *("#", "nodes", "GPUs", "price, fast end", "price, slow end", "tokens/s per GPU", "reserved, GiB", "left, GiB"),
    *("micro-batch", "micro-batches a step"),
)


def offer_table(plan: PlanDocument) -> Table:
    """Return one row for each offer, the winner first."""
    offers = named_offers(plan)
    unit = unit_of(offer for _, offer in offers)
    rows = [_row(plan, unit, number, name, offer) for number, (name, offer) in enumerate(offers, start=1)]
    times = (f"{unit.name}, fast end", f"{unit.name}, slow end")
    caption = f"{len(offers)} of {plan.num_offers} offers that fit (predicted)"
    return table(caption, (*_BEFORE, *times, *_AFTER), rows, (*_NUMBERS, *times))


def _row(plan: PlanDocument, unit: DurationUnit, number: int, name: str, offer: OfferDocument) -> Row:
    setup, memory = offer.setup, offer.memory
    known = offer.range_because is not None
    cells = (
        Cell(str(number), number),
        Cell(name),
        Cell(offer.server),
        Cell(str(offer.num_nodes), offer.num_nodes),
        Cell(str(offer.num_gpus), offer.num_gpus),
        _cell(fast_seconds(offer), unit.text, ""),
        _cell(offer.slow_seconds if known else None, unit.text, "" if offer.seconds is None else UNKNOWN),
        _cell(fast_cost(offer), money_text, "" if offer.seconds is None else UNKNOWN),
        _cell(offer.slow_cost if known else None, money_text, "" if offer.seconds is None else UNKNOWN),
        Cell(currency_of(plan, offer).strip()),
        Cell(f"{offer.tokens_per_second_per_gpu:,.0f}", offer.tokens_per_second_per_gpu),
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
    """Return price against time, as predicted, and each range from its fast to its slow end.

    None without two known prices.
    """
    priced = [(number, one) for number, one in enumerate(offers, start=1) if one.cost and one.seconds]
    if len(priced) < 2:
        return None
    unit, lines = unit_of(offers), []
    for _, one in priced:
        seconds, cost = _end(one)
        times = ((fast_seconds(one) or 0) / unit.seconds, seconds / unit.seconds)
        lines.append(Line(RANGE, times, (fast_cost(one) or 0.0, cost)))
    points = [
        Point(
            WINNER if plan.winner is not None and one.key == plan.winner.key else OTHER,
            (one.seconds or 0.0) / unit.seconds,
            one.cost or 0.0,
            number,
            f"{one.num_nodes} x {one.server}: {training_time(one)}",
        )
        for number, one in priced
    ]
    unpriced = len(offers) - len(priced)
    remarks = ["a number stands at the prediction; its line is the range that the errors of published runs leave"]
    remarks += [f"{unpriced} offers have no known price"] if unpriced else []
    return Plot(
        f"Price against {unit.name}: the numbers are those of the table below (predicted)",
        around(f"{unit.name} of training", [value for line in lines for value in line.x], may_be_log=True),
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
    """Return seconds and price at the slow end of the range; as predicted where that is not known."""
    is_known = offer.range_because is not None
    seconds, cost = (offer.slow_seconds, offer.slow_cost) if is_known else (offer.seconds, offer.cost)
    return seconds or offer.seconds or 0.0, cost or offer.cost or 0.0


def ranges(offers: Sequence[OfferDocument]) -> Table:
    """Return the range of each kind of server's speed, and why."""
    titles = ("server", "GPU", "nodes", "predicted", "slow end", "fast end", "why")
    rows = []
    for offer in offers:
        span = offer.tokens_per_second_per_gpu_range
        why = offer.range_because or never_compared(offer)
        ends = [Cell(UNKNOWN)] * 2 if span is None else [Cell(f"{value:,.0f}", value) for value in span]
        speed = Cell(f"{offer.tokens_per_second_per_gpu:,.0f}", offer.tokens_per_second_per_gpu)
        nodes = Cell(str(offer.num_nodes), offer.num_nodes)
        rows.append(Row((Cell(offer.server), Cell(offer.gpu), nodes, speed, *ends, Cell(why))))
    return table("Tokens/s per GPU (predicted), and the range that published runs leave", titles, rows, titles[2:6])
