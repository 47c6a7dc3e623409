"""Several answers as a table: rows of plain values, which are sorted, selected, printed and written as CSV.

A row is an answer, or a setting of max-size: bytes and seconds, with the unit in each name, as in the JSON document.
Columns are named as users write them, for --sort and --columns.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import asdict

from fsdp_bench.plan.document import AnswerDocument, TimeDocument
from fsdp_bench.spec.errors import SpecError, nearest, shown
from fsdp_bench.spec.setup import FIELDS
from fsdp_bench.spec.subprocesses.dry_run import CATEGORIES

Row = dict[str, Any]
"""One row: values by the name of their column, None where there is none."""
T = TypeVar("T")

_HEADERS = {
    "nodes": "num_nodes",
    "phase": "peak_phase",
    "in_phase": "peak_phase",
    "needs": "needed_bytes",
    "left": "headroom_bytes",
    "mostly": "largest_category",
    "exposed": "exposed_fraction",
    "tokens": "tokens_per_second_per_gpu",
    "tokens/s": "tokens_per_second_per_gpu",
    "tokens/s_per_gpu": "tokens_per_second_per_gpu",
    "reserved": "peak_reserved_bytes",
    "layers": "num_hidden_layers",
}
"""Headers of tables, with the column that each is of."""
_AT_PEAK = re.compile(r"\w+(?=_at_peak)")
"""The category in the name of a column of bytes at the peak."""
_REASONS = ("impossible", "unknown", "exceeds", "rates", "for_eager")
"""Columns that an error message leaves out, to be short."""
_RANKS = {"verdict": ("fits", None, "runs_with_retries", "does_not_fit"), "fits": (True, None, False)}
"""Columns whose values have an order of their own."""


def find_column(word: str, known: Sequence[str], option: str) -> str:
    """Return the column that a word, option or header means. Raises SpecError, naming the nearest column and all."""
    folded = word.strip().lower().replace("-", "_").replace(" ", "_")
    short = short_names(known)
    by_word = {**{header: name for header, name in _HEADERS.items() if name in known}, **short}
    if folded in known:
        return folded
    if folded in by_word:
        return by_word[folded]
    hidden = {*known[: known.index("impossible")], *_REASONS}  # model, hardware and setup stand before the answer
    results = dict.fromkeys(_AT_PEAK.sub("CATEGORY", name) for name in short if short[name] not in hidden)
    raise SpecError(
        f"{option}: {shown(word.strip())} is no column{nearest(folded, (*by_word, *known))};"
        f" {', '.join(results)}, or an option of the setup"
    )


def short_names(known: Sequence[str]) -> dict[str, str]:
    """Return the columns by their short names: the option that sets it, or the name without its unit."""
    return {FIELDS[name].word if name in FIELDS else re.sub("_(bytes|seconds)$", "", name): name for name in known}


@dataclass(frozen=True)
class TableOptions:
    """The rows and columns of a table that are shown, in order."""

    sort: tuple[tuple[str, bool], ...] = ()
    """Columns to sort by, each with whether the largest value comes first. Without any: the table's own order."""
    columns: tuple[str, ...] = ()
    """The columns of the printed table; without any, its usual ones."""
    only_fits: bool = False
    """Whether rows that do not fit, or of which it is not known, are left out."""

    @property
    def is_given(self) -> bool:
        """Whether anything differs from the table's usual form."""
        return self != TableOptions()

    def arranged(self, rows: Iterable[tuple[T, Row]]) -> list[tuple[T, Row]]:
        """Return the rows that are shown, each with what it is of, in their order."""
        kept = [(item, row) for item, row in rows if not self.only_fits or row["fits"] is True]
        for name, is_descending in reversed(self.sort):
            known = [one for one in kept if _is_known(name, one[1][name])]
            unknown = [one for one in kept if not _is_known(name, one[1][name])]
            kept = [*sorted(known, key=lambda one: _rank(name, one[1][name]), reverse=is_descending), *unknown]
        return kept


def read_table_options(
    known: Sequence[str], sort: str | None = None, columns: str | None = None, only_fits: bool = False
) -> TableOptions:
    """Read ``--sort``, ``--columns`` and ``--only-fits``. Raises SpecError for an unknown column."""
    keys = []
    for word in sort.split(",") if sort else ():
        name = word.strip()
        keys.append((find_column(name.removeprefix("-"), known, "sort"), name.startswith("-")))
    chosen = [find_column(word, known, "columns") for word in columns.split(",")] if columns else []
    return TableOptions(tuple(keys), tuple(dict.fromkeys(chosen)), only_fits)


def _is_known(name: str, value: Any) -> bool:
    return name in _RANKS or value is not None


def _rank(name: str, value: Any) -> Any:
    if name in _RANKS:
        return _RANKS[name].index(value)
    return value.lower() if isinstance(value, str) else value


SETUP_FIELDS = tuple(name for name, one in FIELDS.items() if one.of_step)
"""Fields that change memory or time."""

_PLACE = ("gpu", "num_nodes", "gpus_per_node", "gpu_memory_bytes")
_SETUP = (
    *("source", "model", "code", "lora", "num_parameters", "server", *_PLACE, *SETUP_FIELDS, "effective_strategy"),
    "impossible",
)
_FIT = ("fits", "verdict", "exceeds", "headroom_bytes", "required_headroom_bytes", "for_eager")
_PEAK_COLUMNS = {f"{category}_at_peak_bytes": category for category in CATEGORIES}
_ANSWERED = (
    *("fits", "verdict", "exceeds", "peak_allocated_bytes", "peak_phase", "peak_operator", "largest_category"),
    *_PEAK_COLUMNS,
    *("peak_reserved_bytes", "needed_bytes", "headroom_bytes", "required_headroom_bytes", "peak_host_bytes_per_node"),
    *("step_seconds", "compute_seconds", "communication_seconds", "exposed_communication_seconds", "exposed_fraction"),
    *("tokens_per_second_per_gpu", "mfu", "hfu", "rates", "for_eager"),
)

PREDICTION_COLUMNS = (*_SETUP, *_ANSWERED)
"""The columns of ``predict`` of several setups."""

MAX_SIZE_COLUMNS = (
    *_SETUP,
    *("unknown", "quantity", "fits_value", "runs_value", "num_hidden_layers", "hidden_size"),
    *("limited_by", "next_value", "next_needed_bytes"),
    *_ANSWERED,
)
"""The columns of ``max-size``."""


def answer_row(found: AnswerDocument) -> Row:
    """Return an answer as a row of PREDICTION_COLUMNS; of a setup that cannot run, the reason and nothing else."""
    memory, time, model = found.memory, found.time or TimeDocument(), found.model
    values = {
        **found.setup,
        **asdict(time),
        "exposed_fraction": time.exposed_fraction,
        **{name: getattr(found, name) for name in ("source", "impossible", *_FIT)},
        **{name: getattr(found.server, name) for name in _PLACE},
        **{"server": found.server.name, "model": model.name, "code": model.code},
        **{"lora": model.lora and model.lora.text(), "num_parameters": model.num_parameters},
    }
    if memory is not None:
        values |= {**asdict(memory), "largest_category": memory.largest_category}
        values |= {name: memory.breakdown_bytes.get(category, 0) for name, category in _PEAK_COLUMNS.items()}
    return {name: values.get(name) for name in PREDICTION_COLUMNS}
