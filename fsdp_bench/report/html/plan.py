"""The page of a plan: the winner and why, price against days, all offers, one step of the winner, what it rests on."""

import shlex
from collections.abc import Sequence

from fsdp_bench.plan.purchase.document import PlanDocument
from fsdp_bench.plan.purchase.offer import OfferDocument
from fsdp_bench.report.charts.axis import around
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Key, Line, Plot, Point
from fsdp_bench.report.charts.memory_timeline import breakdown_bars, memory_plot
from fsdp_bench.report.charts.step import both_views
from fsdp_bench.report.html.blocks import Block, Facts, Page, Section, Table, Text, table
from fsdp_bench.report.table import Column, numbers, words
from fsdp_bench.report.text import plan as text
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.hardware import Source
from fsdp_bench.spec.units import GIB, format_count, format_gib

CENTS_BELOW = 10
"""Smaller prices are printed with cents."""
WINNER, OTHER, RANGE = Style("brown"), Style("steel"), Style("faint", is_line=True)


def money_text(amount: float) -> str:
    """Return a price, in three digits: it is not known better. One below CENTS_BELOW has cents."""
    return f"{amount:,.2f}" if amount < CENTS_BELOW else f"{float(f'{amount:.3g}'):,.0f}"


def plan_page(plan: PlanDocument) -> Page:
    """Return the page of a plan."""
    named, winner = text.named_offers(plan), plan.winner
    offers = [offer for _, offer in named]
    sections = []
    if offers or plan.left_out:
        left_out = {"server": words(one.server for one in plan.left_out)}
        left_out["reason"] = words(one.reason for one in plan.left_out)
        servers = [table("Servers without an offer", left_out)] if plan.left_out else []
        sections.append(Section("All offers", (_offer_table(plan, named), *servers)))
    if winner is not None:
        sections += _step_sections(plan, winner)
    sections.append(Section("Conditions, versions and sources", _conditions(plan)))
    lead: list[Block] = [] if winner is None else [Facts(tuple(text.facts(plan, winner)))]
    prices = chart(plan)
    return Page(
        title=f"Plan for {plan.title}" + ("" if plan.tokens is None else f" on {format_count(plan.tokens)} tokens"),
        source=text.source_text(plan),
        answer="No plan" if winner is None else text.answer_text(plan, money_text),
        reason=("Why: " if winner is not None else "") + plan.reason,
        lead=(*lead, *([prices] if prices else [])),
        sections=tuple(sections),
    )


def _offer_table(plan: PlanDocument, named: Sequence[tuple[str, OfferDocument]]) -> Table:
    offers = [offer for _, offer in named]
    unit, memories = text.unit_of(offers), [one.memory for one in offers]
    slow = [(one.slow_seconds, one.slow_cost) if one.range_because is not None else (None, None) for one in offers]
    spans, speed = [one.tokens_per_second_per_gpu_range or (None, None) for one in offers], "{:,.0f}".format
    unknown, marked = "" if plan.tokens is None else UNKNOWN, [0] if plan.winner else []
    columns = {
        "#": numbers(range(1, len(offers) + 1)),
        "offer": words(name for name, _ in named),
        "server": words(one.server for one in offers),
        "nodes": numbers(one.num_nodes for one in offers),
        "GPUs": numbers(one.num_gpus for one in offers),
        f"{unit.name}, fast end": numbers((text.times(one)[0] for one in offers), unit.text, unknown),
        f"{unit.name}, slow end": numbers((seconds for seconds, _ in slow), unit.text, unknown),
        "price, fast end": numbers((text.costs(one)[0] for one in offers), money_text, unknown),
        "price, slow end": numbers((cost for _, cost in slow), money_text, unknown),
        "currency": words(text.currency_of(plan, one).strip() for one in offers),
        "tokens/s per GPU": numbers((one.tokens_per_second_per_gpu for one in offers), speed),
        "tokens/s, slow end": numbers((low for low, _ in spans), speed),
        "tokens/s, fast end": numbers((high for _, high in spans), speed),
        "range": words(one.range_because or text.never_compared(one) for one in offers),
        "reserved, GiB": numbers((one.peak_reserved_bytes for one in memories), _in_gib),
        "left, GiB": numbers((one.headroom_bytes for one in memories), _in_gib),
        **_setting_columns(offers),
    }
    return table(f"{len(offers)} of {plan.num_offers} offers that fit ({text.source_text(plan)})", columns, marked)


def _setting_columns(offers: Sequence[OfferDocument]) -> dict[str, Column]:
    setups = [one.setup for one in offers if one.setup is not None]
    if len(setups) < len(offers):  # of a script
        names = dict.fromkeys(name for one in offers for name in one.values)
        return {
            **{name: words(one.values.get(name, "") for one in offers) for name in names},
            "command": words(shlex.join(one.command) for one in offers),
        }
    return {
        "strategy": words(one.strategy.value for one in setups),
        "api": words(one.api.value for one in setups),
        "checkpointing": words(one.checkpointing.value for one in setups),
        "loss": words(one.loss.value for one in setups),
        "offload": words(one.offload.value for one in setups),
        "micro-batch": numbers(one.micro_batch_size for one in setups),
        "micro-batches a step": numbers(one.gradient_accumulation_steps for one in setups),
        "expandable segments": words("yes" if one.expandable_segments else "no" for one in offers),
    }


def _in_gib(size: float) -> str:
    return f"{size / GIB:,.1f}"


def chart(plan: PlanDocument) -> Plot | None:
    """Return price against time and its range from fast to slow; None without two known prices."""
    offers = [offer for _, offer in text.named_offers(plan)]
    priced = [(number, one) for number, one in enumerate(offers, start=1) if one.cost and one.seconds]
    if len(priced) < 2:
        return None
    unit = text.unit_of(offers)
    lines = [
        Line(
            RANGE,
            tuple((seconds or 0.0) / unit.seconds for seconds in text.times(one)),
            tuple(cost or 0.0 for cost in text.costs(one)),
        )
        for _, one in priced
    ]
    points = [
        Point(
            WINNER if one is plan.winner else OTHER,
            (one.seconds or 0.0) / unit.seconds,
            one.cost or 0.0,
            number,
            f"{one.num_nodes} x {one.server}: {text.training_time(one)}",
        )
        for number, one in priced
    ]
    unpriced = len(offers) - len(priced)
    remarks = ["a number stands at the prediction; its line is the range that the errors of published runs leave"]
    remarks += [f"{unpriced} offers have no known price"] if unpriced else []
    range_text = "from the fast to the slow end of the range"
    return Plot(
        f"Price against {unit.name}: the numbers are those of the table below ({text.source_text(plan)})",
        around(f"{unit.name} of training", [value for line in lines for value in line.x], may_be_log=True),
        around(f"price{text.currency_of(plan, priced[0][1])}", [value for line in lines for value in line.y]),
        lines=tuple(lines),
        points=tuple(points),
        legend=(Key(WINNER, "winner"), Key(OTHER, "other offers"), Key(RANGE, range_text)),
        remarks=tuple(remarks),
    )


def _step_sections(plan: PlanDocument, winner: OfferDocument) -> list[Section]:
    memory, step, server = winner.memory, plan.winner_step, text.server_of(plan, winner)
    usable = None if server is None else server.gpu_memory_bytes
    blocks = list[Block]()
    many = 1 if winner.setup is None else winner.setup.gradient_accumulation_steps
    if step is not None:
        caption = "Memory over one training step of the winner (predicted)"
        reserved = memory.peak_reserved_bytes
        blocks.append(memory_plot(step.memory, caption, usable=usable, reserved=reserved, gpu=winner.gpu))
        if many > step.num_micro_batches:
            blocks.append(Text(f"Drawn: {step.num_micro_batches} of {many} micro-batches; the others are alike."))
    if memory.breakdown_bytes:
        blocks.append(breakdown_bars(memory.breakdown_bytes, "Alive at the peak, on one GPU (predicted)"))
    found = [Section("Memory of the winner", tuple(blocks))]
    if step is not None and step.streams is not None:
        found.append(Section("What runs when", both_views(step.streams, step.num_micro_batches, many)))
    return found


def _conditions(plan: PlanDocument) -> tuple[Block, ...]:
    winner = plan.winner
    how = (
        "a simulation of the training step" if plan.command is None else "PyTorch on a stand-in for NVIDIA's libraries"
    )
    torch = "as modelled" if plan.command is None else "the script's own"
    known = [
        ("code", "" if plan.code is None else text.code_text(plan, money_text)),
        ("command", plan.command or ""),
        ("tokens", UNKNOWN if plan.tokens is None else format_count(plan.tokens)),
        ("deadline", "" if plan.deadline_seconds is None else text.duration_text(plan.deadline_seconds)),
        ("budget", "" if plan.budget is None else money_text(plan.budget)),
        (
            "global batch",
            "" if plan.global_batch_tokens is None else f"{format_count(plan.global_batch_tokens)} tokens",
        ),
        ("as the Trainer", "" if winner is None else "; ".join(winner.assumptions)),
        ("prices", text.stated_price(plan) or (f"the catalogue's, {plan.tariff}" if plan.tariff else UNKNOWN)),
        ("source", f"{text.source_text(plan)}: {how}; no GPU was used"),
        ("PyTorch", f"{plan.torch or UNKNOWN}, {torch}"),
        ("fsdp-bench", plan.fsdp_bench or UNKNOWN),
        ("made on", plan.made_on or UNKNOWN),
    ]
    facts = Facts(tuple((name, value) for name, value in known if value))
    return (facts, *([_server_table(plan)] if plan.servers else []))


def _server_table(plan: PlanDocument) -> Table:
    known, prices = plan.servers, [server.price for server in plan.servers]
    usable = (UNKNOWN if one.gpu_memory_bytes is None else format_gib(one.gpu_memory_bytes) for one in known)
    others = (filter(None, (server.source, server.gpu_memory_source)) for server in known)
    columns = {
        "server": words(server.name for server in known),
        "provider": words(server.provider for server in known),
        "GPUs": words(f"{server.gpus_per_node} x {server.gpu}" for server in known),
        "usable memory": words(usable),
        "price an hour": words(
            UNKNOWN
            if price is None or price.per_hour is None
            else f"{price.per_hour:,.2f} {price.currency}" + ("" if price.region is None else f", {price.region}")
            for price in prices
        ),
        "source of the price": words(UNKNOWN if price is None else _source(price.source) for price in prices),
        "other sources": words("; ".join(map(_source, sources)) for sources in others),
    }
    return table("Hardware, and where its facts are from", columns)


def _source(source: Source) -> str:
    return f"{source.title} ({source.date})"
