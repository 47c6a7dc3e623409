"""The time of a rehearsed step as text: step time, what is exposed, what takes the time, and what is not known."""

from __future__ import annotations

from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.plan.rehearsed_time.answer import RehearsedTime
from fsdp_bench.rates.collectives import KINDS
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import UNKNOWN, fact
from fsdp_bench.report.text.speed import PCIE_IS_UNCERTAIN, parts_text, percent, range_text, step_text
from fsdp_bench.simulate.events import Stream

MOST_PARTS = 8
"""The most operators that are listed."""
MOST_UNKNOWN = 6
_SHOWN_SECONDS = 0.05e-3
"""Less than that prints as 0.0 ms."""

_COPIES = {"to_device": "copy to the GPU", "to_host": "copy to the host"}


def time_lines(found: Rehearsal) -> list[str]:
    """Return the time of a step as a few lines and a table."""
    time = found.time
    if time is None:
        return [fact("step time", f"{UNKNOWN}: {found.why_no_time}")]
    lines = [_step_line(time)]
    if count := found.report.num_retries_in_last_step:
        retries = "an allocation retry" if count == 1 else f"{count} allocation retries"
        lines.append(fact("", f"without the time of {retries} in the last step"))
    if time.unknown:
        lines += _unknown_lines(time, found)
    if time.step_seconds is not None:
        lines += [fact("range", range_text(time.range, time.step_seconds)), fact("of it", parts_text(time.time))]
    lines.append(_parts_line(time))
    if time.tokens_per_step is not None and not time.is_tokens_given:
        lines.append(fact("", f"tokens: {time.tokens_per_step:,} in a step, which are what its embedding looks up"))
    if (count := time.num_streams) > len(Stream):
        as_one = f"all but {len(Stream) - 1} of them count as one, in the order of issue"
        lines.append(fact("", f"streams: {count}; {as_one}"))
    pcie = PCIE_IS_UNCERTAIN if time.is_over_pcie else ""
    lines.append(
        fact(
            "",
            f"rates: the GPU's datasheet and NCCL's model of its links{pcie}. The script never ran on a GPU; the time"
            " of its Python is assumed",
        )
    )
    # what takes the time; collectives and operators may run at the same time
    rows = [
        [_COPIES.get(part.name, part.name), part.kind, str(part.count), step_text(part.seconds)]
        for part in time.parts[:MOST_PARTS]
    ]
    header = [f"in step {time.step}", "kind", "times", "takes"]
    return [*lines, "", *table_lines(table_columns(header, rows, {"times", "takes"}))]


def step_cell(found: Rehearsal) -> str:
    """Return the step time for a table of several ranks."""
    time = found.time
    return UNKNOWN if time is None or time.step_seconds is None else step_text(time.step_seconds)


def _step_line(time: RehearsedTime) -> str:
    if time.step_seconds is None:
        least = "" if time.at_least_seconds is None else f"; all else takes {step_text(time.at_least_seconds)}"
        return fact("step time", f"{UNKNOWN}, as nobody documents how long some of it takes{least}")
    tokens = time.tokens_per_second_per_gpu
    rate = f"{tokens:,.0f} tokens/s per GPU" if tokens is not None else f"tokens/s {UNKNOWN} (--tokens-per-step N)"
    return fact(
        "step time",
        f"{step_text(time.step_seconds)}, {rate}, MFU {percent(time.mfu)}, HFU {percent(time.hfu)}"
        f" (rehearsed: what step {time.step} issued; predicted: how long that takes)",
    )


def _unknown_lines(time: RehearsedTime, found: Rehearsal) -> list[str]:
    names = [f"{name}, {count} {'time' if count == 1 else 'times'}" for name, count in time.unknown.items()]
    more = [f"and {len(names) - MOST_UNKNOWN} more (--json)"] if len(names) > MOST_UNKNOWN else []
    lines = [fact("", f"{UNKNOWN}: {'; '.join([*names[:MOST_UNKNOWN], *more])}")]
    needs_links = any(name.partition(" ")[0] in (*KINDS, *_COPIES) for name in time.unknown)
    if needs_links and not found.hardware.has_server:
        lines.append(fact("", "--server NAME says which links collectives and copies have"))
    return lines


def _parts_line(time: RehearsedTime) -> str:
    step = time.time
    parts = []
    if step.communication_seconds:
        parts.append(f"collectives run for {step_text(step.communication_seconds)}")
    if step.host_copy_seconds and step.host_copy_seconds >= _SHOWN_SECONDS:
        parts.append(f"copies to and from the host {step_text(step.host_copy_seconds)}")
    if step.cpu_optimizer_seconds:
        parts.append(f"operators on the CPU {step_text(step.cpu_optimizer_seconds)}")
    parts.append(
        f"host {step_text(time.host_seconds)}, of which {step_text(time.waiting_for_host_seconds)} while the"
        " GPU has nothing to do"
    )
    return fact("", "; ".join(parts))
