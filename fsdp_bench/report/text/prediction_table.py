"""Predictions as one table: a conclusion, then the fastest that fits first, by tokens a second per GPU."""

from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Any

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.setup_text import (
    FIELDS,
    NUMBERS,
    PLACES,
    SELDOM,
    Values,
    header_of,
    named_values,
    spaced,
    text_of,
    title,
    value_text,
    varying,
)
from fsdp_bench.plan.table import SETUP_FIELDS, Row, TableOptions, answer_row
from fsdp_bench.report.table import Column, fits_width, table_lines
from fsdp_bench.report.text.common import UNKNOWN, assumed_lines, fact
from fsdp_bench.report.text.conditions import conditions, note_facts
from fsdp_bench.report.text.prediction import fits_text, verdict
from fsdp_bench.report.text.speed import percent, rests_on, step_text
from fsdp_bench.spec.units import format_count, format_gib

_USUAL = (
    *("peak_allocated_bytes", "peak_phase", "needed_bytes", "fits", "headroom_bytes", "largest_category"),
    *("step_seconds", "exposed_fraction", "tokens_per_second_per_gpu", "mfu"),
)
"""Columns of the answer if the user names none."""
_DROPPED = (
    *("exposed_fraction", "peak_allocated_bytes", "headroom_bytes", "peak_phase", "mfu", "largest_category"),
    *("step_seconds", "tokens_per_second_per_gpu"),
)
"""Columns to leave out if the terminal is too narrow, in this order."""


_SETUP_WIDTH = 40
"""Characters of a line of the one column that says what a row is of, where several would be too wide."""


def arranged(
    predictions: Sequence[Prediction], refused: Sequence[Question], options: TableOptions
) -> list[tuple[Question, Row]]:
    """Return rows with their questions, as sorted or the fastest first; setups that cannot run are last."""
    ordered = sorted(predictions, key=_order)
    documents = [(one.question, one.document(with_communication=False)) for one in ordered]
    documents += [(question, question.document()) for question in refused]
    return options.arranged((question, answer_row(one)) for question, one in documents)


def side_by_side(
    predictions: Sequence[Prediction], refused: Sequence[Question], options: TableOptions | None = None
) -> str:
    """Return the conclusion and one row per setup. Setups that fit come first, sorted by speed."""
    options = options or TableOptions()
    documents = [*(one.document(with_time=False, with_communication=False) for one in predictions),
                 *(question.document() for question in refused)]  # fmt: skip
    differing = varying([one.values for one in documents]) or ["strategy"]
    rows = [(question, row) for question, row in arranged(predictions, refused, options) if not row["impossible"]]
    shown = "" if len(rows) == len(predictions) else f", of which {len(rows)} are shown"
    rates = dict.fromkeys(rests_on(found.speed, found.question.profile) for found in predictions)
    lines = [
        conclusion(predictions, differing),
        *assumed_lines(one for prediction in predictions for one in prediction.question.assumptions),
        "",
        fact("predicted", f"{len(predictions):,} setups{shown}; peaks of rank 0 on one GPU"),
        *(fact(*one) for one in conditions(documents, differing)),
        *(fact("rates", text) for text in rates),
        fact("needs", "what the allocator reserves without retries; left: what the GPU has beyond that"),
        "",
        *(table_lines(_columns(rows, differing, options)) if rows else ["no setup fits"]),
        *_refused_lines(refused, differing),
    ]
    notes = [fact(*one) for one in note_facts(documents)]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)


def _columns(rows: Sequence[tuple[Question, Row]], differing: Sequence[str], options: TableOptions) -> list[Column]:
    chosen = options.columns or _USUAL
    dropped = () if options.columns else _DROPPED
    answer = [answer_column(name, [row for _, row in rows], dropped) for name in chosen]
    return answer if options.columns else [*label_columns([q for q, _ in rows], differing, 24), *answer]


def answer_column(name: str, rows: Sequence[Row], dropped: Sequence[str] = ()) -> Column:
    """Return a column of the answer, or of a setup's field; ``dropped`` are left out first where there is no room."""
    cells = tuple(cell_text(name, row) for row in rows)
    priority = len(dropped) - dropped.index(name) if name in dropped else 0
    values = tuple(row[name] for row in rows)
    warnings = tuple(value is False for value in values) if name == "fits" else ()
    return Column(column_header(name), cells, is_number(name), priority, values=values, warnings=warnings)


ALWAYS = ("strategy", *(field for field in FIELDS if field not in SELDOM), "loss")
"""Fields of which a page has a column in any case, or a line above the table where all rows have the same value."""


def setup_columns(setups: Sequence[Values], fields: Collection[str], without: str | None = None) -> list[Column]:
    """Return a column for each of the fields that setups differ in, without one that is searched."""
    order = (field for field in ("strategy", *PLACES, *FIELDS) if field in fields and field != without)
    return [
        Column(
            header_of(field),
            tuple(text_of(field, one) for one in setups),
            field in NUMBERS,
            values=tuple(float(value) if isinstance(value := one.get(field), int) else None for one in setups),
        )
        for field in order
    ]


def label_columns(questions: Sequence[Question], differing: Sequence[str], others: int) -> list[Column]:
    """Return the columns that name setups, or one if they are too wide beside ``others`` characters."""
    setups = [question.values for question in questions]
    columns = setup_columns(setups, differing)
    if fits_width(columns, others):
        return columns
    names = (", ".join(named_values(one, differing)) for one in setups)
    return [Column("setup", tuple(names), most_characters=_SETUP_WIDTH)]


def _refused_lines(refused: Sequence[Question], differing: Sequence[str]) -> list[str]:
    reasons: dict[str | None, list[Question]] = {}
    for question in refused:
        reasons.setdefault(question.impossible, []).append(question)
    lines = [
        f"impossible: {title(alike[0].values, differing)}{f' and {len(alike) - 1} more' if alike[1:] else ''}: {reason}"
        for reason, alike in reasons.items()
    ]
    return ["", *lines] if lines else []


RANK = {Verdict.FITS: 0, None: 1, Verdict.RUNS_WITH_RETRIES: 2, Verdict.DOES_NOT_FIT: 3}


def _order(prediction: Prediction) -> tuple[int, float, int]:
    seconds = prediction.speed.time.step_seconds if prediction.fits is not False else None
    work = prediction.setup.tokens_per_step_per_rank
    return RANK[prediction.verdict], inf if seconds is None else seconds / work, prediction.needed_bytes


def conclusion(predictions: Sequence[Prediction], differing: Sequence[str]) -> str:
    """Return one sentence about the fastest setup that fits, or about the nearest one if none fits."""
    best = min(predictions, key=_order)
    name, fitting = title(best.question.values, differing), [one for one in predictions if one.fits]
    if not fitting and best.fits is None:
        return f"whether any fits is unknown (predicted): {verdict(best).partition(': ')[2]}"
    if not fitting:
        least = min(predictions, key=lambda one: one.needed_bytes)
        name, needs = title(least.question.values, differing), format_gib(least.needed_bytes)
        return f"none of {len(predictions)} fits (predicted); {name} is nearest and needs {needs}"
    of = f"of the {len(fitting)} that fit" if len(fitting) > 1 else "the only one that fits"
    reserved = f"{format_gib(best.needed_bytes)} reserved"
    time, tokens = best.speed.time.step_seconds, best.speed.tokens_per_second_per_gpu
    if time is None or tokens is None:
        least = min(fitting, key=lambda one: one.needed_bytes)
        name, reserved = title(least.question.values, differing), f"{format_gib(least.needed_bytes)} reserved"
        return f"{of}, {name} needs the least memory (predicted): {reserved}; times are unknown"
    differ = len({(one.setup.tokens_per_step_per_rank, one.setup.world_size) for one in fitting}) > 1
    fastest = "trains" if len(fitting) == 1 else "trains the most tokens per GPU" if differ else "is the fastest"
    speed = f"{step_text(time)} a step, {tokens:,.0f} tokens/s per GPU"
    return f"{of}, {name} {fastest} (predicted): {speed}, {reserved}"


_HEADERS = {
    "peak_allocated_bytes": "peak\nallocated",
    "peak_phase": "in phase",
    "needed_bytes": "needs",
    "headroom_bytes": "left",
    "largest_category": "mostly",
    "step_seconds": "step",
    "exposed_fraction": "exposed",
    "tokens_per_second_per_gpu": "tokens/s\nper GPU",
    "mfu": "MFU",
    "hfu": "HFU",
    "fits_value": "fits,\npredicted",
    "runs_value": "without\nOOM",
    "num_hidden_layers": "layers",
    "limited_by": "limited by",
    "next_needed_bytes": "the next\nneeds",
    "peak_host_bytes_per_node": "host\nmemory",
}
_OF_TIME = ("step_seconds", "exposed_fraction", "tokens_per_second_per_gpu", "mfu", "hfu")
"""Columns that are left empty where a setup does not fit."""


def column_header(name: str) -> str:
    """Return the header of a column."""
    if name in _HEADERS:
        return _HEADERS[name]
    if name in (*SETUP_FIELDS, "num_nodes", "world_size"):
        return header_of(name)
    return name.removesuffix("_bytes").removesuffix("_seconds").replace("_", "\n")


def is_number(name: str) -> bool:
    """Whether a column is aligned on the right."""
    ends = ("_bytes", "_seconds", "_value", "per_node")
    return name.endswith(ends) or name in (*_OF_TIME, *NUMBERS, "num_parameters", "num_hidden_layers", "hidden_size")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


_FORMS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("mfu", "hfu", "exposed_fraction"), percent),
    "verdict": spaced,
    "limited_by": lambda words: words.removesuffix(" on the GPU"),
}
_FORMS_OF_UNITS: dict[str, Callable[[Any], str]] = {"bytes": format_gib, "seconds": step_text}


def cell_text(name: str, row: Row) -> str:
    """Return a cell as text."""
    value, form = row[name], _FORMS.get(name) or _FORMS_OF_UNITS.get(name.rpartition("_")[2], _plain)
    if name == "fits":  # a setting of max-size under which nothing fits has no verdict
        return (
            "NO" if row["verdict"] is None and value is False else fits_text(row["verdict"], row["exceeds"] == "host")
        )
    if name in ("impossible", "unknown"):
        return value or ""
    if name in SETUP_FIELDS:
        return value_text(name, value)
    if value is None or (name in _OF_TIME and row["fits"] is False):
        has_none = name == "largest_category" or row["fits"] is not None or row["impossible"]
        return "-" if has_none else UNKNOWN
    if name == "largest_category":
        return f"{spaced(value)} {row[f'{value}_at_peak_bytes'] / row['peak_allocated_bytes']:.0%}"
    is_size = name.endswith("_value") and row["quantity"] == "num_parameters"
    return format_count(value) if is_size else form(value)
