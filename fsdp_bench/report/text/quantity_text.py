"""The names of the quantities that max-size searches for, in tables, charts and messages."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_bench.plan.search.search import SearchResult
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.units import format_count


@dataclass(frozen=True)
class QuantityText:
    """The names of one quantity."""

    option: str
    """The value of ``--of`` on the command line."""
    title: str
    """The title of a chart, and the beginning of an answer."""
    axes: tuple[tuple[float, str], ...]
    """Axis scales of the chart: divisor and label, largest first."""
    unit: str
    """The unit of a value."""
    smallest: str
    """The smallest value as a phrase, with placeholders ``{model}`` and ``{value}``."""


QUANTITY_TEXTS = {
    "num_parameters": QuantityText(
        "params",
        "Largest model that fits",
        ((1e9, "largest model that fits, billion parameters"), (1e6, "largest model that fits, million parameters")),
        "parameters",
        "the smallest model, {model},",
    ),
    "num_hidden_layers": QuantityText(
        "num_hidden_layers",
        "Deepest model that fits",
        ((1.0, "most layers that fit"),),
        "layers",
        "one layer of {model}",
    ),
    "micro_batch_size": QuantityText(
        "micro_batch_size",
        "Largest batch per GPU that fits",
        ((1.0, "largest batch per GPU that fits, sequences"),),
        "sequences per GPU",
        "a batch of 1 of {model}",
    ),
    "sequence_length": QuantityText(
        "sequence_length",
        "Longest sequence that fits",
        ((1.0, "longest sequence that fits, tokens"),),
        "tokens",
        "a sequence of {value} tokens of {model}",
    ),
    "world_size": QuantityText(
        "gpus",
        "Fewest GPUs on which it fits",
        ((1.0, "fewest GPUs on which it fits"),),
        "GPUs",
        "{model} on {value} GPUs",
    ),
}
"""Texts by the name of the quantity, which is a field of ModelShape or TrainSetup."""


def quantity_text(cell: SearchResult) -> QuantityText:
    """Return the names of a setting's quantity."""
    return QUANTITY_TEXTS[cell.quantity.name]


def value_text(name: str, value: int) -> str:
    """Return a value as text: ``6.74B`` parameters, ``32`` layers, ``8,192`` tokens."""
    return format_count(value) if name == "num_parameters" else f"{value:,}"


def model_line(cell: SearchResult) -> str:
    """Return the model, or the range of models that are tried."""
    first, count = cell.quantity[0].model, len(cell.quantity)
    if cell.quantity.name == "num_parameters":
        last = cell.quantity[count - 1].model
        sizes = f"{format_count(first.num_parameters)} to {format_count(last.num_parameters)}"
        vocabulary = f", vocabulary {first.vocab_size}" if isinstance(first, ModelShape) else ""
        return f"ladder of {first.kind} models, {sizes} in {count} steps{vocabulary}"
    if cell.quantity.name == "num_hidden_layers":
        widths = f", {first.hidden_size} wide" if first.hidden_size else ""
        if isinstance(first, ModelShape):
            heads = f"{first.num_attention_heads} heads / {first.num_key_value_heads} kv"
            widths += f", {heads}, vocabulary {first.vocab_size}"
        return f"{first.name} with other depths: {first.kind}{widths}"
    return f"{first.name}: {first.describe()}"
