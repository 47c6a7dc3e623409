"""The page of a plan: the winner and why, price against days, all offers, one step of the winner, what it rests on."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_bench.plan.purchase.document import OfferDocument, PlanDocument
from fsdp_bench.report.charts.memory_timeline import breakdown_bars, memory_plot
from fsdp_bench.report.charts.step import both_views
from fsdp_bench.report.html.blocks import (
    Block,
    Cell,
    Facts,
    Page,
    Row,
    Section,
    Table,
    Text,
    Tile,
    Tiles,
    table,
)
from fsdp_bench.report.html.offers import chart, left_out, money_text, offer_table, offers_of, ranges
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.offers import (
    answer_text,
    code_text,
    currency_of,
    duration_text,
    energy_text,
    peak_warning,
    server_of,
    stated_price,
)
from fsdp_bench.report.text.setups import setup_line
from fsdp_bench.spec.hardware import Source
from fsdp_bench.spec.units import format_count, format_gib


def plan_page(plan: PlanDocument) -> Page:
    """Return the page of a plan."""
    offers, winner = offers_of(plan), plan.winner
    sections = [Section("All offers", (offer_table(plan), *left_out(plan)))] if offers or plan.left_out else []
    if winner is not None:
        sections += [
            *_step_sections(plan, winner),
            Section("How far the prediction may be off", (ranges(offers),)),
        ]
    sections.append(Section("Conditions, versions and sources", _conditions(plan)))
    lead: list[Block] = [] if winner is None else [_tiles(plan, winner)]
    prices = chart(plan, offers)
    return Page(
        title=f"Plan for {plan.model}" + ("" if plan.tokens is None else f" on {format_count(plan.tokens)} tokens"),
        source=plan.source,
        answer="No plan" if winner is None else answer_text(plan, money_text),
        reason=("Why: " if winner is not None else "") + plan.reason,
        lead=(*lead, *([prices] if prices else [])),
        sections=tuple(sections),
    )


def _tiles(plan: PlanDocument, winner: OfferDocument) -> Tiles:
    setup, memory = winner.setup, winner.memory
    found = [Tile("setting", f"{setup.strategy.value} {setup.api.value}", setup_note(winner))]
    found.append(
        Tile("speed", f"{winner.tokens_per_second_per_gpu:,.0f} tokens/s", f"per GPU, predicted{_to_slow(winner)}")
    )
    if winner.price_per_hour is not None:
        found.append(
            Tile("price an hour", f"{money_text(winner.price_per_hour)}{currency_of(plan, winner)}", "all servers")
        )
    of = server_of(plan, winner)
    usable = "" if of is None or of.gpu_memory_bytes is None else f" of {format_gib(of.gpu_memory_bytes)} usable"
    found.append(Tile("memory", format_gib(memory.peak_reserved_bytes), f"reserved on each GPU{usable}, predicted"))
    return Tiles(tuple(found))


def _to_slow(offer: OfferDocument) -> str:
    span = offer.tokens_per_second_per_gpu_range
    return f"; {span[0]:,.0f} to {span[1]:,.0f} with the errors of published runs" if span else f"; range {UNKNOWN}"


def setup_note(offer: OfferDocument) -> str:
    """Return what of a setting its strategy does not say, in a few words."""
    setup = offer.setup
    steps = "" if setup.gradient_accumulation_steps == 1 else f" x {setup.gradient_accumulation_steps} micro-batches"
    return f"checkpointing {setup.checkpointing.value}, batch {setup.micro_batch_size}{steps}"


def _step_sections(plan: PlanDocument, winner: OfferDocument) -> list[Section]:
    """Return memory over a step of the winner, and what runs when in it."""
    memory, step, server = winner.memory, plan.winner_step, server_of(plan, winner)
    usable = None if server is None else server.gpu_memory_bytes
    blocks: list[Block] = []
    if step is not None:
        caption = "Memory over one training step of the winner (predicted)"
        reserved = memory.peak_reserved_bytes
        blocks.append(memory_plot(step.memory, caption, usable=usable, reserved=reserved, gpu=winner.gpu))
        if winner.setup.gradient_accumulation_steps > step.num_micro_batches:
            many = winner.setup.gradient_accumulation_steps
            blocks.append(Text(f"Drawn: {step.num_micro_batches} of {many} micro-batches; the others are alike."))
    if memory.breakdown_bytes:
        blocks.append(breakdown_bars(memory.breakdown_bytes, "Alive at the peak, on one GPU (predicted)"))
    blocks.append(Facts(tuple(_memory_facts(plan, winner, usable))))
    found = [Section("Memory of the winner", tuple(blocks))]
    if step is not None and step.streams is not None:
        found.append(
            Section(
                "What runs when",
                both_views(step.streams, step.num_micro_batches, winner.setup.gradient_accumulation_steps),
            )
        )
    return found


def _memory_facts(plan: PlanDocument, winner: OfferDocument, usable: int | None) -> Iterable[tuple[str, str]]:
    memory = winner.memory
    yield "peak allocated", format_gib(memory.peak_allocated_bytes)
    of = "" if usable is None else f" of {format_gib(usable)} usable"
    yield "peak reserved", f"{format_gib(memory.peak_reserved_bytes)}{of}"
    yield "left", UNKNOWN if memory.headroom_bytes is None else format_gib(memory.headroom_bytes)
    if memory.required_headroom_bytes is not None:
        why = f", {memory.required_headroom_source}" if memory.required_headroom_source else ""
        yield "of that kept free", f"{format_gib(memory.required_headroom_bytes)}{why}"
    if memory.peak_reserved_bytes_range is not None:
        low, high = map(format_gib, memory.peak_reserved_bytes_range)
        yield "may be", f"{low} to {high}: {peak_warning(plan, winner)}"


def _conditions(plan: PlanDocument) -> tuple[Block, ...]:
    winner = plan.winner
    known = [
        ("model", plan.model + (f": {plan.model_description}" if plan.model_description else "")),
        ("code", "" if plan.code is None else code_text(plan, money_text)),
        ("tokens", UNKNOWN if plan.tokens is None else format_count(plan.tokens)),
        ("deadline", "" if plan.deadline_seconds is None else duration_text(plan.deadline_seconds)),
        ("budget", "" if plan.budget is None else money_text(plan.budget)),
        (
            "global batch",
            "" if plan.global_batch_tokens is None else f"{format_count(plan.global_batch_tokens)} tokens",
        ),
        ("setting", "" if winner is None else setup_line(winner.setup)),
        ("as the Trainer", "" if winner is None else "; ".join(winner.assumptions)),
        ("energy", "" if winner is None or winner.seconds is None else energy_text(winner)),
        ("prices", stated_price(plan) or (f"the catalogue's, {plan.tariff}" if plan.tariff else UNKNOWN)),
        ("source", f"{plan.source}: a simulation of the training step; no GPU was used"),
        ("PyTorch", f"{plan.torch or UNKNOWN}, as modelled"),
        ("fsdp-bench", plan.fsdp_bench or UNKNOWN),
        ("made on", plan.made_on or UNKNOWN),
    ]
    facts = Facts(tuple((name, value) for name, value in known if value))
    return (facts, *([_server_table(plan)] if plan.servers else []))


def _server_table(plan: PlanDocument) -> Table:
    titles = ("server", "provider", "GPUs", "usable memory", "price an hour", "source of the price", "other sources")
    rows = []
    for server in plan.servers:
        price = server.price
        hour = UNKNOWN
        if price is not None and price.per_hour is not None:
            region = "" if price.region is None else f", {price.region}"
            hour = f"{price.per_hour:,.2f} {price.currency}{region}"
        memory = UNKNOWN if server.gpu_memory_bytes is None else format_gib(server.gpu_memory_bytes)
        others = [source_text(one) for one in (server.source, server.gpu_memory_source) if one is not None]
        texts = (server.name, server.provider, f"{server.gpus_per_node} x {server.gpu}", memory, hour)
        paid = UNKNOWN if price is None else source_text(price.source)
        rows.append(Row(tuple(map(Cell, (*texts, paid, "; ".join(others))))))
    return table("Hardware, and where its facts are from", titles, rows)


def source_text(source: Source) -> str:
    """Return a source and its date."""
    return f"{source.title} ({source.date})"
