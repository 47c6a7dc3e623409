"""The time of a rehearsed step as text: step time, what is exposed, what takes the time, and what is not known."""

from __future__ import annotations

from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.plan.rehearsed_time.answer import RehearsedTime
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import UNKNOWN, fact
from fsdp_bench.report.text.speed import percent, step_text
from fsdp_bench.spec.hardware import Cluster
from fsdp_bench.spec.units import format_seconds

MOST_PARTS = 8
"""The most operators that are listed."""
MOST_UNKNOWN = 6

_COPIES = {"to_device": "copy to the GPU", "to_host": "copy to the host"}


def time_lines(found: Rehearsal) -> list[str]:
    """Return the time of a step as a few lines and a table."""
    time = found.time
    if time is None:
        return [fact("step time", f"{UNKNOWN}: {found.why_no_time}")]
    lines = [_step_line(time), *_unknown_lines(time, found), _parts_line(time), _rates_line(time)]
    return [*lines, "", *_table(time)]


def step_cell(found: Rehearsal) -> str:
    """Return the step time for a table of several ranks."""
    time = found.time
    return UNKNOWN if time is None or time.step_seconds is None else step_text(time.step_seconds)


def _step_line(time: RehearsedTime) -> str:
    if time.step_seconds is None:
        least = "" if time.at_least_seconds is None else f"; all else takes {format_seconds(time.at_least_seconds)}"
        return fact("step time", f"{UNKNOWN}: nobody documents how long some of it takes{least}")
    return fact(
        "step time",
        f"{format_seconds(time.step_seconds)}, {_tokens(time)}, MFU {percent(time.mfu)}, HFU {percent(time.hfu)}"
        f" (predicted, for what step {time.step} issued in this rehearsal)",
    )


def _tokens(time: RehearsedTime) -> str:
    rate = time.tokens_per_second_per_gpu
    if rate is None:
        return f"tokens {UNKNOWN} (--tokens-per-step N)"
    given = "" if time.is_tokens_given else f", {time.tokens_per_step:,} tokens looked up by its embedding"
    return f"{rate:,.0f} tokens/s per GPU{given}"


def _unknown_lines(time: RehearsedTime, found: Rehearsal) -> list[str]:
    if not time.unknown:
        return []
    names = [f"{name} ({count} {'time' if count == 1 else 'times'})" for name, count in time.unknown.items()]
    more = f" and {len(names) - MOST_UNKNOWN} more (--json)" if len(names) > MOST_UNKNOWN else ""
    needs = (
        ""
        if isinstance(found.hardware, Cluster)
        else "; collectives need --server NAME, which says what links there are"
    )
    has_collectives = any(" of " in name or "(" in name for name in time.unknown)
    return [fact("", f"{UNKNOWN}: {', '.join(names[:MOST_UNKNOWN])}{more}{needs if has_collectives else ''}")]


def _parts_line(time: RehearsedTime) -> str:
    step = time.time
    known = [
        ("operators", step.compute_seconds),
        ("collectives", step.communication_seconds),
        ("of which while no operator runs", step.exposed_communication_seconds),
        ("copies to and from the host", step.host_copy_seconds or None),
        ("the GPU waits for the host", time.waiting_for_host_seconds),
        ("the host issues work and runs hooks", time.host_seconds),
    ]
    return fact("", "; ".join(f"{name} {format_seconds(value)}" for name, value in known if value is not None))


def _rates_line(time: RehearsedTime) -> str:
    pcie = ", for PCIe not compared with measurements" if time.is_over_pcie else ""
    return fact(
        "",
        f"rates: the GPU's datasheet and NCCL's model of its links{pcie}. The script never ran on a GPU: what it issued is"
        " rehearsed, how long that takes is predicted, and Python's own time is not measured",
    )


def _table(time: RehearsedTime) -> list[str]:
    """Return what takes the time; collectives and operators may run at the same time."""
    rows = [
        [_COPIES.get(part.name, part.name), part.kind, str(part.count), format_seconds(part.seconds)]
        for part in time.parts[:MOST_PARTS]
    ]
    header = [f"in step {time.step}", "kind", "times", "takes"]
    return table_lines(table_columns(header, rows, {"times", "takes"}))
