"""Setups as text: one as a line; several by what differs between them, in a table and in a sentence.

A setup is given by its values: the fields of TrainSetup and the strategy that runs, what it runs on, and its model.
They are ``Question.values``, or what a JSON document has (``AnswerDocument.values``), which may lack some.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fsdp_bench.spec.field import DEFAULT, Field
from fsdp_bench.spec.setup import FIELDS as SETUP
from fsdp_bench.spec.setup import TrainSetup

Values = Mapping[str, Any]

HARDWARE = ("server", "gpu", "num_nodes", "gpus_per_node", "world_size")
PLACES = ("model", "code", "lora", *HARDWARE)
"""Fields in which setups may differ, beside those of a step: the model and the hardware."""
_COLUMNS = [one for one in SETUP.values() if one.has_column]
SIZES = tuple(one.name for one in _COLUMNS if one.is_size)
_USUAL = tuple(one.name for one in _COLUMNS if not one.seldom and not one.is_size)
SELDOM = tuple(one.name for one in _COLUMNS if one.seldom)
"""Fields that are printed only if they differ from TrainSetup's default."""
FIELDS = (*_USUAL, *SIZES, *SELDOM)
"""The fields of a step, without the strategy, in the order of a table's columns."""

_OTHER = Field(None, "")
NUMBERS = (
    *("num_nodes", "gpus_per_node", "world_size"),
    *(one.name for one in _COLUMNS if one.kind is int and not one.is_magnitude),
)
"""Fields whose column is aligned on the right."""
_PLAIN = ("strategy", "model", "server", "gpu", *(one.name for one in _COLUMNS if one.is_plain))
"""Fields whose values say in a sentence what they are."""
_HEADERS = {"num_nodes": "nodes", "world_size": "GPUs", "lora": "LoRA", **{one.name: one.header for one in _COLUMNS}}


def values_of(setup: TrainSetup) -> dict[str, Any]:
    """Return the values of a setup alone."""
    runs = {"effective_strategy": setup.effective_strategy, "shard_size": setup.shard_group_size}
    return {**msgspec.structs.asdict(setup), **runs}


def setup_line(setup: TrainSetup | Values, varying: Iterable[str] = (), sought: str | None = None) -> str:
    """Return a setup as one line: usual fields, then those off their defaults, without ``varying`` and ``sought``."""
    values = values_of(setup) if isinstance(setup, TrainSetup) else setup
    known = [name for name in SETUP if values.get(name) is not None and name not in varying]
    api = [value_text("api", values["api"])] if "api" in known else []
    parts = [" under ".join([strategy_text(values), *api])] if "strategy" in known else api
    if "world_size" in known and not {*varying} & {*HARDWARE}:
        ranks = "1 rank" if values["world_size"] == 1 else f"{values['world_size']} ranks"
        parts.append("as few ranks as fit" if sought == "world_size" else ranks)
    batch = "as many as fit" if sought == "micro_batch_size" else values.get("micro_batch_size")
    tokens = "as many tokens as fit" if sought == "sequence_length" else f"{values.get('sequence_length')} tokens"
    sizes = [f"batch {batch}"] if "micro_batch_size" in known else []
    sizes += [tokens] if "sequence_length" in known else []
    parts += [" x ".join(sizes)] if sizes else []
    others = [one for one in SELDOM if one in known and str(values[one]) != str(SETUP[one].default)]
    usual = [one for one in _USUAL if one in known and one != "api"]
    return ", ".join([*parts, *named_values(values, [*usual, *others])])


def varying(setups: Sequence[Values]) -> list[str]:
    """Return what differs between setups: strategy, with the size of its shard groups; some of PLACES and FIELDS."""
    found = [field for field in (*PLACES, *FIELDS) if len({one.get(field) for one in setups}) > 1]
    found = [*(["strategy"] if len(set(map(strategy_text, setups))) > 1 else []), *found]
    if "server" in found:  # each has its own
        found = [field for field in found if field not in ("gpu", "gpus_per_node")]
    if any(one.get("num_nodes") is not None for one in setups):
        found = [field for field in found if field != "world_size"]
    return found


def strategy_text(values: Values) -> str:
    """Return a setup's strategy, with the size of its shard groups and what runs instead, if that is another."""
    strategy, runs, shard, ranks = map(values.get, ("strategy", "effective_strategy", "shard_size", "world_size"))
    name = str(strategy)
    if isinstance(shard, int) and isinstance(ranks, int) and 1 < shard < ranks:
        name += f" ({shard})"
    return name if runs in (None, strategy) else f"{name} (runs {runs})"


def title(values: Values, varying: Iterable[str]) -> str:
    """Return the name of a setup in a sentence: its strategy, whether it varies or not, and the varying fields."""
    return ", ".join(named_values(values, dict.fromkeys(("strategy", *varying))))


def named_values(values: Values, fields: Iterable[str]) -> list[str]:
    """Return fields with their values as in a sentence, without those that have no value of their own."""
    texts = ((field, text_of(field, values)) for field in fields)
    return [named(field, text) for field, text in texts if text != DEFAULT]


def text_of(field: str, values: Values) -> str:
    """Return the value that a setup has of a field, as text in a table."""
    return strategy_text(values) if field == "strategy" else value_text(field, values.get(field))


def named(field: str, value: str) -> str:
    """Return a field with its value, as in a sentence."""
    if field in _PLAIN:
        return value
    if field in ("num_nodes", "world_size"):
        return f"{value} {header_of(field)}" if value != "1" else f"1 {header_of(field)[:-1]}"
    return f"{spaced(SETUP[field].word if field in SETUP else field)} {value}"


def value_text(field: str, value: Any) -> str:
    """Return the value of a field of the setup, as text."""
    return SETUP.get(field, _OTHER).text(value)


def header_of(field: str) -> str:
    """Return the header of a field's column."""
    return _HEADERS.get(field, field.replace("_", "\n"))


def spaced(name: str) -> str:
    """Return a field's name with blanks for underscores."""
    return name.replace("_", " ")
