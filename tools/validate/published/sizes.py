"""The one published chart of largest models, beside predictions: lessw2020, July 2022, eight A10G of a g5.48xlarge.

Strategy, batch and reserved memory are taken from the chart. Everything that it does not state is assumed and listed.
So the comparison shows whether predictions are plausible, not how accurate they are.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from fsdp_bench.catalog import loader
from fsdp_bench.plan.max_size import HardwareResult, document_of, max_sizes
from fsdp_bench.plan.search.fit import FitCheck
from fsdp_bench.plan.search.quantity import layer_counts
from fsdp_bench.plan.search.search import SearchResult
from fsdp_bench.report.charts.description import Slide
from fsdp_bench.report.charts.max_size import NONE_FITS, PUBLISHED, MaxSizeBar, size_bars
from fsdp_bench.report.charts.slide import CHARACTERS
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import fact
from fsdp_bench.report.text.max_size import QUANTITY_TEXTS
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.spec.hardware import Hardware, Source
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import Precision, ShardingStrategy, TrainSetup
from fsdp_bench.spec.units import GIB, format_count, format_gib
from tools.validate.published.cases import packaged_rows

CASES = "less_max_"
"""The prefix of the IDs of the chart's rows in published.csv."""
SERVER = "g5.48xlarge"
PRECISIONS = ("fp32", "bf16-mixed")

TOKENS = 65
"""Tokens of an image of 256 x 256: 64 patches of 32 x 32 pixels and a class token (deepvit_config.py)."""

BLOCKS = ModelShape(
    name="DeepViT-like",
    family=Family.GPT2,
    num_hidden_layers=1,
    hidden_size=1024,
    num_attention_heads=16,
    num_key_value_heads=16,
    intermediate_size=2048,
    vocab_size=10000,
    max_position_embeddings=TOKENS,
    tie_word_embeddings=True,
)
"""The nearest model that can be expressed: gpt2 blocks of these widths. The number of layers is searched."""

NOT_STATED = (
    "the model's family and dimensions",
    "sequence length",
    "precision",
    "optimizer",
    "activation checkpointing",
    "sizes between its steps",
)
ASSUMED = (
    "blocks 1024 wide, 16 heads, feed-forward 2048, 65 tokens an image (the author's deepvit_config.py), as gpt2 blocks"
    " of any depth with fused attention (DeepViT's own is not modelled)",
    "fp32 or bf16-mixed",
    "adamw-foreach",
    "no checkpointing",
    f"torch {TORCH_VERSION} as modelled, where the chart's was 1.13 nightly",
)
CLAIM = "a plausibility check: with so much not stated, it says nothing about accuracy"


@dataclass(frozen=True)
class PublishedSize:
    """One bar of the published chart."""

    strategy: ShardingStrategy
    micro_batch_size: int
    num_parameters: int
    reserved_bytes: int
    as_printed: str
    """Reserved memory as a fraction of the GPU's memory, as the chart prints it."""
    source: str
    date: str


@dataclass(frozen=True)
class SizeComparison:
    """A published bar, and the models that are predicted to reserve as much, by precision."""

    published: PublishedSize
    predicted: HardwareResult

    def cells(self) -> list[tuple[str, SearchResult]]:
        """Return the predictions, each with its precision."""
        return [(str(cell.setup.precision), cell) for cell in self.predicted.cells]


def read_published_sizes() -> tuple[PublishedSize, ...]:
    """Return the chart's bars in its order."""
    return tuple(_read(row) for row in packaged_rows() if row["id"].startswith(CASES))


def _read(row: Mapping[str, str]) -> PublishedSize:
    return PublishedSize(
        strategy=ShardingStrategy(row["sharding"].rpartition("/")[2]),
        micro_batch_size=int(float(row["micro_batch_per_gpu"])),
        num_parameters=int(float(row["max_model_params"])),
        reserved_bytes=round(float(row["peak_mem_gib"]) * GIB),
        as_printed=row["peak_mem_as_printed"],
        source=row["source"],
        date=row["source_date"],
    )


def compare_published_sizes() -> list[SizeComparison]:
    """For each bar, predict the deepest model that reserves no more than the bar."""
    bars = read_published_sizes()
    places = []
    for bar in bars:
        cluster = _cluster(bar)
        setups = [_setup(bar, precision, cluster.world_size) for precision in PRECISIONS]
        places.append((cluster, [layer_counts(BLOCKS, setup, cluster) for setup in setups]))
    return [SizeComparison(*pair) for pair in zip(bars, max_sizes(places, FitCheck(headroom_bytes=0)), strict=True)]


def _cluster(bar: PublishedSize) -> Hardware:
    """Return the server, with GPUs whose usable memory is what the bar reserved."""
    server = loader.server(SERVER)
    source = Source(title=f"{bar.as_printed}, {bar.source}", date=bar.date)
    gpu = replace(loader.gpu(server.gpu), usable_memory_bytes=bar.reserved_bytes, usable_memory_source=source)
    return Hardware(server=server, gpu=gpu, gpus_per_node=server.gpus_per_node)


def _setup(bar: PublishedSize, precision: str, world_size: int) -> TrainSetup:
    return TrainSetup(
        strategy=bar.strategy,
        precision=Precision.parse(precision),
        world_size=world_size,
        micro_batch_size=bar.micro_batch_size,
        sequence_length=TOKENS,
    )


def published_document(found: list[SizeComparison]) -> dict[str, Any]:
    """Return the JSON form."""
    return {
        "claim": CLAIM,
        "not_stated": NOT_STATED,
        "assumed": ASSUMED,
        "bars": [
            {
                "strategy": c.published.strategy.value,
                "micro_batch_size": c.published.micro_batch_size,
                "published": {
                    "source": c.published.source,
                    "date": c.published.date,
                    "max_parameters": c.published.num_parameters,
                    "reserved_bytes": c.published.reserved_bytes,
                    "reserved_as_printed": c.published.as_printed,
                },
                "predicted": document_of([c.predicted])["cells"],
            }
            for c in found
        ],
    }


# -- as text and as a chart -------------------------------------------------------------------------------------------


def published_text(found: Sequence[SizeComparison]) -> str:
    """Return the chart as a table, followed by the conditions that are not stated."""
    header = ["strategy", "batch", "reserved of the GPU", "published", *(f"predicted,\n{name}" for name in PRECISIONS)]
    rows = [
        [
            c.published.strategy.value,
            str(c.published.micro_batch_size),
            f"{c.published.as_printed} = {format_gib(c.published.reserved_bytes)}",
            format_count(c.published.num_parameters),
            *(_size(cell) for _, cell in c.cells()),
        ]
        for c in found
    ]
    return "\n".join([
        f"largest model on 8 x A10G ({SERVER}): published beside predicted; {CLAIM}",
        "",
        *table_lines(table_columns(header, rows, {"batch", *header[2:]}, ["reserved of the GPU"])),
        "",
        fact("source", f"{found[0].published.source} ({found[0].published.date})"),
        fact("not stated", "; ".join(NOT_STATED)),
        fact("assumed", "; ".join(ASSUMED)),
        fact("predicted is", "the largest that reserves no more, without allocation retries, than the published run"),
    ])  # fmt: skip


def _size(cell: SearchResult) -> str:
    return format_count(cell.at.question.model.num_parameters) if cell.at else "none fits"


def published_slide(found: Sequence[SizeComparison]) -> Slide:
    """Return the chart of published bars, each followed by its predictions."""
    bars = []
    for c in found:
        group = f"{c.published.strategy.value}\nbatch {c.published.micro_batch_size}"
        bars.append(MaxSizeBar(group, ("published 2022",), c.published.num_parameters, PUBLISHED))
        for precision, cell in c.cells():
            size = cell.at.question.model.num_parameters if cell.at else None
            bars.append(MaxSizeBar(group, (f"predicted, {precision}",), size, note="" if size else NONE_FITS))
    printed = ", ".join(c.published.as_printed.removesuffix(" of GPU") for c in found)
    return Slide(
        "Largest model, published in 2022 and predicted: 1 x g5.48xlarge (8 x A10G)",
        CLAIM,
        (
            f"published: {found[0].published.source}, {found[0].published.date}: {SERVER}, 8 x A10G, FSDP, batch per"
            f" GPU as above, {printed} of the GPU reserved",
            "predicted, not measured: the largest that reserves no more than that, without allocation retries",
        ),
        size_bars({"": bars}, QUANTITY_TEXTS["num_parameters"].axes, ("",)),
        notes=(
            f"the published chart does not state: {', '.join(NOT_STATED)}",
            *textwrap.wrap(f"assumed here: {'; '.join(ASSUMED)}", CHARACTERS),
        ),
    )
