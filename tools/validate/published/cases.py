"""Reads published.csv: other people's measurements.

Each row was copied from the source that it names. An empty cell means that the source does not say. The column
``from_defaults`` names values from the framework's code, ``derived`` values computed from printed numbers.
``CaseInputs`` is the run without its measurements; predictions are made from it alone.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from fsdp_bench.catalog import loader
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu, Hardware, LinkKind, Network, Source
from fsdp_bench.spec.units import GIB

_COLUMNS = {
    "case": "id",
    "num_hidden_layers": "n_layers",
    "hidden_size": "hidden",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "ffn_hidden",
    "vocab_size": "vocab",
    "num_parameters": "params",
    "gpu_memory_gb": "gpu_mem_nominal_gb",
    "num_gpus": "n_gpus",
    "num_nodes": "n_nodes",
    "precision": "precision_as_stated",
    "stored_dtype": "param_storage_dtype",
    "compute_dtype": "compute_allgather_dtype",
    "offload": "cpu_offload",
    "checkpointing": "act_ckpt",
    "compiled": "compile",
    "micro_batch_size": "micro_batch_per_gpu",
    "sequence_length": "seq_len",
    "gradient_accumulation_steps": "grad_accum",
    "step": "notes",
}
"""The columns of published.csv that have other names than fields."""


class CaseInputs(msgspec.Struct, frozen=True, kw_only=True, rename=_COLUMNS):
    """The description of a published run, without measurements. None: the source does not say."""

    case: str
    family: str
    """The publisher and the framework: torchtitan-pr165, litgpt-thunder, torchtune, ..."""
    source: str
    model: str
    num_hidden_layers: int | None
    hidden_size: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    intermediate_size: int | None
    vocab_size: int | None
    num_parameters: int | None
    gpu: str
    gpu_memory_gb: int | None
    """Nominal GPU memory."""
    num_gpus: int | None
    num_nodes: int | None
    api: str
    sharding: str | None
    precision: str | None
    """The precision in the source's own terms: ``amp_bf16 / DEFAULT``, ``amp_fp8 / DEFAULT``."""
    stored_dtype: str | None
    compute_dtype: str | None
    reduce_dtype: str | None
    offload: str | None
    checkpointing: str | None
    compiled: str | None
    """``yes``, ``no``, or another compiler's name."""
    optimizer: str | None
    micro_batch_size: int | None
    sequence_length: int | None
    gradient_accumulation_steps: int | None
    interconnect: str | None
    step: str | None
    """The last of TORCHTUNE_STEPS that is on, for torchtune's rows, each of which adds an option."""


class PublishedPeak(msgspec.Struct, frozen=True, kw_only=True):
    """One published peak of memory."""

    kind: str
    """max_allocated, max_active, max_reserved, or unknown."""
    num_bytes: int | None
    """None if the source does not name the unit."""


class PublishedCase(msgspec.Struct, frozen=True, kw_only=True):
    """One row: the description of a run, and its measurements."""

    inputs: CaseInputs
    measured: tuple[PublishedPeak, ...]
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    """HFU as printed."""
    outcome: str | None = None
    """``fits`` if the run completed, ``OOM`` if it ran out of memory."""


def packaged_rows() -> list[dict[str, str]]:
    """Return the rows of published.csv unchanged."""
    text = (Path(__file__).parent / "published.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def read_cases(rows: Iterable[Mapping[str, str]] | None = None) -> tuple[PublishedCase, ...]:
    """Read the packaged cases, or the given rows with the same columns."""
    return tuple(
        PublishedCase(
            inputs=_inputs(row),
            measured=_measured(row),
            tokens_per_second_per_gpu=_number(row["tokens_per_s_per_gpu"]),
            mfu=_number(row["mfu_pct"], 0.01),
            hfu=_number(row["hfu_pct"], 0.01),
            outcome=row["outcome"] or None,
        )
        for row in (packaged_rows() if rows is None else rows)
    )


def _number(text: str, unit: float = 1.0) -> float | None:
    return float(text) * unit if text else None


def _inputs(row: Mapping[str, str]) -> CaseInputs:
    given: dict[str, str | int | None] = {}
    for one in msgspec.structs.fields(CaseInputs):
        text = row[one.encode_name]
        blank = "" if one.type is str else None
        given[one.name] = (int(float(text)) if one.type == (int | None) else text) if text else blank
    for name in ("sharding", "checkpointing"):  # what follows in brackets explains it
        given[name] = str(given[name]).partition(" (")[0] if given[name] else None
    return CaseInputs(**{**given, "step": _torchtune_step(row["notes"])})  # type: ignore[arg-type]


def _measured(row: Mapping[str, str]) -> tuple[PublishedPeak, ...]:
    pairs = ((row["peak_mem_kind"], row["peak_mem_gib"]), (row["second_mem_kind"], row["second_mem_gib"]))
    return tuple(
        PublishedPeak(kind=kind, num_bytes=round(float(gib) * GIB) if gib else None) for kind, gib in pairs if kind
    )


_STEP_NOTE = "cumulative step: "
TORCHTUNE_STEPS = (
    "baseline unpacked",
    "+packed",
    "+compile",
    "+chunked CE",
    "+activation ckpt",
    "+opt in backward",
    "+activation offload",
    "+8-bit AdamW",
)
"""The options in torchtune's README, in their order. Each row keeps the options before it."""


def _torchtune_step(notes: str) -> str | None:
    return notes.removeprefix(_STEP_NOTE) if notes.startswith(_STEP_NOTE) else None


def has_step(inputs: CaseInputs, step: str) -> bool:
    """Return whether a step of TORCHTUNE_STEPS, and so all steps before it, is on."""
    return inputs.step is not None and TORCHTUNE_STEPS.index(inputs.step) >= TORCHTUNE_STEPS.index(step)


def describe(inputs: CaseInputs) -> str:
    """Return a case in one line. ``?`` means that the source does not say."""
    dtypes = "/".join(dtype or "?" for dtype in (inputs.stored_dtype, inputs.compute_dtype, inputs.reduce_dtype))
    compiled = {"yes": ", compiled", "no": "", None: ", compiled?"}.get(inputs.compiled, f", {inputs.compiled}")
    batch, length = (value or "?" for value in (inputs.micro_batch_size, inputs.sequence_length))
    return (
        f"{inputs.model}, {inputs.num_gpus or '?'} x {inputs.gpu}, {inputs.api} {inputs.sharding or '?'}, {dtypes},"
        f" AC {inputs.checkpointing or '?'}{compiled}, {batch} x {length}"
    )


# -- The hardware of published runs: GPUs and networks under the names that the sources use ----------------------------

_GPUS = {
    ("A100 80GB", 80): ("A100-SXM-80GB", "p4de.24xlarge"),
    ("A100-SXM4-80GB", 80): ("A100-SXM-80GB", "p4de.24xlarge"),
    ("A100 40GB", 40): ("A100-SXM-40GB", "p4d.24xlarge"),
    ("A100-SXM4-40GB", 40): ("A100-SXM-40GB", "p4d.24xlarge"),
    ("H100 80GB", 80): ("H100-SXM", "p5.48xlarge"),
    ("H100", 96): ("H100-SXM-96GB", "p5.48xlarge"),
    ("H100 96GB HBM2e 500W", 96): ("H100-SXM-96GB", "p5.48xlarge"),
    ("A100-SXM-80GB", 80): ("A100-SXM-80GB", "p4de.24xlarge"),
}
"""The catalogue's GPU, and a server with such GPUs and NVSwitch, by the sources' name of the GPU."""


def gpu_of(inputs: CaseInputs) -> Gpu | None:
    """Return the catalogue's GPU. None if the row's name may mean several GPUs."""
    names = _GPUS.get((inputs.gpu, inputs.gpu_memory_gb or 0))
    return loader.gpu(names[0]) if names else None


def cluster_of(inputs: CaseInputs) -> Hardware:
    """Return the nodes: GPUs connected by NVSwitch, and between nodes the network that the source states, if any.

    Raises SpecError if the source does not state the GPU, the number of GPUs, or the network's bandwidth.
    """
    names = _GPUS.get((inputs.gpu, inputs.gpu_memory_gb or 0))
    if names is None or not inputs.num_gpus or not inputs.num_nodes:
        raise SpecError("the source does not state which GPUs, or how many on how many nodes")
    gpu, server = loader.gpu(names[0]), loader.server(names[1])
    network = None
    if inputs.num_nodes > 1 and inputs.interconnect is not None:
        network = read_network(inputs.interconnect, inputs.source)
    return Hardware(
        server=msgspec.structs.replace(server, gpu=gpu.name, inter_node=network),
        gpu=gpu,
        num_nodes=inputs.num_nodes,
        gpus_per_node=inputs.num_gpus // inputs.num_nodes,
    )


_NETWORK = re.compile(r"(?:(?P<count>\d+) ?x ?)?(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[GT])(?P<bit>bit|b|B)(?:ps|/s)")
_KINDS = {"roce": LinkKind.ROCE, "efa": LinkKind.EFA, "infiniband": LinkKind.INFINIBAND, "ib": LinkKind.INFINIBAND}


def read_network(stated: str, source: str) -> Network:
    """Read ``400 Gb/s per node``, ``1600 Gbps/node RoCE``, ``8 x 200 Gbit/s per node``, ``EFA 0.4 Tb/s per node``.

    Without a named kind it is InfiniBand; without a number of interfaces there are eight, one for each GPU.

    Raises SpecError for text without the bandwidth of a node.
    """
    found = _NETWORK.search(stated)
    if found is None or re.search(r"(per |/)node", stated) is None:
        raise SpecError(f"network {stated!r}: what a node has is not said as in '400 Gb/s per node'")
    bits = float(found["number"]) * {"G": 1e9, "T": 1e12}[found["unit"]] * (8 if found["bit"] == "B" else 1)
    words = [_KINDS[word] for word in re.findall(r"[a-z]+", stated.lower()) if word in _KINDS]
    return Network(
        kind=words[0] if words else LinkKind.INFINIBAND,
        source=Source(title=source, date="published"),
        num_nics=int(found["count"] or 8),
        bandwidth_bytes_per_second=int(found["count"] or 1) * bits / 8,
    )
