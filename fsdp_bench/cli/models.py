"""``fsdp-bench models [NAME]``: print the catalogue's models."""

from pathlib import Path
from typing import Any

import click

from fsdp_bench.catalog.architectures import is_recorded
from fsdp_bench.catalog.loader import load_user_catalog
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.cli.common.printing import Fact, known, print_facts, print_json, source_facts
from fsdp_bench.report.terminal import print_lines
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.units import format_count


@click.command("models")
@click.argument("name", required=False)
@click.option("--catalog", "file", type=click.Path(path_type=Path), help="A TOML file that adds entries or overrides.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(name: str | None, file: Path | None, as_json: bool) -> None:
    """Print the catalogue's models, or with a NAME one of them with its source and exact parameter count.

    \b
    fsdp-bench models
    fsdp-bench models Llama-3.1-8B
    """
    catalog = load_user_catalog(file)
    entries = catalog.models() if name is None else (catalog.model(name),)
    if as_json:
        document = [_document(entry) for entry in entries]
        print_json({"models": document} if name is None else document[0])
    elif name is None:
        from fsdp_bench.report.table import table_columns, table_lines

        header = ("model", "family", "parameters", "layers", "hidden", "heads / kv", "positions", "predicted")
        numbers = ("parameters", "layers", "hidden", "heads / kv", "positions")
        table = table_columns(header, [_row(entry) for entry in entries], numbers, ("heads / kv", "hidden", "layers"))
        print_lines("\n".join(table_lines(table)))
    else:
        print_facts(_facts(entries[0]))


def _document(entry: ModelEntry) -> dict[str, Any]:
    """Return the entry's fields for JSON: the published and the computed number of parameters, and the support."""
    fields = to_builtins(entry)
    fields["published_num_parameters"] = fields.pop("num_parameters")
    fields["num_parameters"] = entry.shape().num_parameters if entry.supported else None
    return {**fields, "supported": entry.supported, "unsupported_because": entry.unsupported_because}


def _row(entry: ModelEntry) -> tuple[str, ...]:
    layers = str(entry.num_hidden_layers)
    if entry.num_decoder_layers is not None:
        layers += f" + {entry.num_decoder_layers}"
    count = entry.shape().num_parameters if entry.supported else entry.num_parameters
    return (
        entry.name,
        entry.family,
        known(count, format_count),
        layers,
        str(entry.hidden_size),
        f"{entry.num_attention_heads} / {entry.num_key_value_heads or entry.num_attention_heads}",
        known(entry.max_position_embeddings, str),
        "yes" if entry.supported or is_recorded(entry.family) else "no",
    )


def _facts(entry: ModelEntry) -> list[Fact]:
    facts: list[Fact] = [
        ("model", entry.name),
        ("also called", ", ".join(entry.aliases) or "-"),
        ("same architecture", ", ".join(entry.same_architecture) or "-"),
        ("family", entry.family),
    ]
    facts += _parameters(entry)
    skipped = ("name", "aliases", "same_architecture", "family", "num_parameters", "source", "config")
    fields = {field: getattr(entry, field) for field in entry.__struct_fields__ if field not in skipped}
    for field, value in (fields | entry.config).items():
        if value is not None:
            facts.append((field, str(value).lower() if isinstance(value, bool) else str(value)))
    if entry.max_position_embeddings is None:
        facts.append(("max_position_embeddings", UNKNOWN))
    return [*facts, *source_facts(entry.source)]


def _recorded(entry: ModelEntry) -> str:
    """Return how a model is predicted whose code is not the benchmark's, and why it is not."""
    if is_recorded(entry.family):
        return f"with Hugging Face's code; {entry.unsupported_because}"
    return (
        "no: Hugging Face's code could not be recorded, because its operators depend on sizes or data;"
        f" {entry.unsupported_because}"
    )


def _parameters(entry: ModelEntry) -> list[Fact]:
    published = known(entry.num_parameters, lambda count: f"{count:,}")
    if not entry.supported:
        return [("parameters", f"{published} (published)"), ("predicted", _recorded(entry))]
    exact = entry.shape().num_parameters
    return [("parameters", f"{exact:,} (computed from the sizes); published {published}"), ("predicted", "yes")]
