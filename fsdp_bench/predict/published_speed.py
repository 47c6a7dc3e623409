"""Other people's throughput, predicted from datasheets: catalog/published.csv, beside the best constant MFU.

The rows of JUDGED decide whether the model of time is any good. No constant of it was fitted to them: the GPUs' rates
are facts of gpus.toml with their sources, the links' rates NCCL's own model. What a source does not say is assumed, and
listed. Where it does not state the share of checkpointed blocks, that comes from the ratio of the HFU and MFU that are
printed with it: the ratio says how much was computed twice, and nothing about time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import msgspec

from fsdp_bench.catalog import loader
from fsdp_bench.predict.collectives import groups_of
from fsdp_bench.predict.kernels import CUDA, Kernels
from fsdp_bench.predict.published import CaseInputs, PublishedCase, describe, read_cases
from fsdp_bench.predict.rates import ATTENTION_REACH, datasheet
from fsdp_bench.predict.timing import step_time
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, LinkKind, Network, Source
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import Api, Checkpointing, OptimizerKind, Precision, ShardingStrategy, TrainSetup

JUDGED = ("llm-foundry-mpt", "ibm-fms-fsdp", "torchtitan-pr165")
"""Families whose setups are stated far enough, and whose rows judge the model."""

_TRITON = tuple(reach / slower for reach, slower in zip(ATTENTION_REACH[8], (1.4, 2.0), strict=True))
"""FlashAttention in Triton on an A100: FlashAttention-2 is "1.3-1.5x faster in the forward pass and around 2x faster in
the backward pass" (its paper, section 4.1)."""


@dataclass(frozen=True)
class _Framework:
    """What a framework's own code and defaults decide about time."""

    family: Family
    optimizer: OptimizerKind
    facts: tuple[str, ...]
    attention_reach: tuple[float, float] | None = None
    composite_norms: bool = False
    """Where it runs eagerly."""


_FRAMEWORKS = {
    "llm-foundry-mpt": _Framework(
        Family.GPT2,
        OptimizerKind.ADAMW_FOR_LOOP,
        (
            "predicted as gpt2, whose blocks have MPT's products and norms; MPT has no biases, and ALiBi for positions",
            "attention by FlashAttention in Triton (scripts/train/benchmarking/submit_benchmarks.py, attn_impl), 1.4"
            " and 2 times slower than FlashAttention-2",
            "decoupled_adamw is a loop over tensors (composer/optim/decoupled_weight_decay.py); gradients clipped",
        ),
        attention_reach=(_TRITON[0], _TRITON[1]),
    ),
    "ibm-fms-fsdp": _Framework(
        Family.LLAMA,
        OptimizerKind.ADAMW_FOREACH,
        ("gradients clipped; eager norms are elementary operators in fp32 (fms/modules/layernorm.py)",),
        composite_norms=True,
    ),
    "torchtitan-pr165": _Framework(
        Family.LLAMA,
        OptimizerKind.ADAMW_FOREACH,
        ("gradients clipped; eager norms are elementary operators in fp32 (torchtrain/models/llama/model.py)",),
        composite_norms=True,
    ),
}

_CARDS = {
    ("A100 80GB", 80): ("A100-SXM-80GB", "p4de.24xlarge"),
    ("A100 40GB", 40): ("A100-SXM-40GB", "p4d.24xlarge"),
    ("H100 80GB", 80): ("H100-SXM", "p5.48xlarge"),
    ("H100", 96): ("H100-SXM-96GB", "p5.48xlarge"),
}
"""What the sources call a card: the catalogue's GPU, and a server in which such cards are joined by NVSwitch."""


class SpeedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published throughput beside its prediction, or why there is none."""

    case: str
    source: str
    setup: str
    family: str
    compiled: bool
    published_tokens_per_second: float
    """Of one GPU."""
    predicted_tokens_per_second: float | None = None
    error: float | None = None
    """Predicted over published, less one."""
    constant_mfu_error: float | None = None
    """Of the one MFU that fits all judged rows best, chosen afterwards."""
    exposed_share: float | None = None
    """Predicted, of the step."""
    assumptions: tuple[str, ...] = ()
    reason: str | None = None


class SpeedSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the judged rows amount to."""

    num_rows: int
    median_error: float
    """Of the absolute errors."""
    best_constant_mfu: float
    median_error_of_constant_mfu: float
    by_family: dict[str, float]
    """Median of the absolute errors."""


def compare_speed(cases: Iterable[PublishedCase] | None = None) -> tuple[list[SpeedRow], SpeedSummary]:
    """Predict every published throughput of the judged families; the packaged cases by default."""
    found = [case for case in (read_cases() if cases is None else cases) if case.tokens_per_second_per_gpu]
    recomputed = _recomputed_shares(found)
    rows = [_compare(case, recomputed) for case in found]
    mfus = {row.case: _mfu(case) for row, case in zip(rows, found, strict=True) if row.error is not None}
    best = min((i / 1000 for i in range(150, 800)), key=lambda mfu: _constant_error(mfu, mfus.values()))
    rows = [
        msgspec.structs.replace(row, constant_mfu_error=best / mfus[row.case] - 1) if row.case in mfus else row
        for row in rows
    ]
    judged = [row for row in rows if row.error is not None]
    return rows, SpeedSummary(
        num_rows=len(judged),
        median_error=median(abs(row.error or 0.0) for row in judged),
        best_constant_mfu=best,
        median_error_of_constant_mfu=_constant_error(best, mfus.values()),
        by_family={
            family: median(abs(row.error or 0.0) for row in judged if row.family == family)
            for family in dict.fromkeys(row.family for row in judged)
        },
    )


def _constant_error(mfu: float, published: Iterable[float]) -> float:
    return median(abs(mfu / one - 1) for one in published)


def _mfu(case: PublishedCase) -> float:
    """Return the MFU of a published throughput, by the formula that most of the sources use: attention not halved."""
    inputs = case.inputs
    gpu, _ = _CARDS[inputs.gpu, inputs.gpu_memory_gb or 0]
    shape = _shape(inputs, _FRAMEWORKS[inputs.family])
    attention = 12 * shape.num_hidden_layers * shape.hidden_size * (inputs.sequence_length or 0)
    peak = loader.gpu(gpu).peak_flops_per_second("bf16")
    assert peak is not None
    assert case.tokens_per_second_per_gpu is not None
    return case.tokens_per_second_per_gpu * (6 * shape.num_parameters + attention) / peak


def _recomputed_shares(cases: Sequence[PublishedCase]) -> dict[tuple[str, str], float]:
    """Return by model and GPU the share of blocks that is checkpointed, from rows that print HFU and MFU.

    Recomputing every block's forward adds a third to a step's FLOPs.
    """
    return {
        (case.inputs.model, case.inputs.gpu): min(max(3 * (case.hfu / case.mfu - 1), 0.0), 1.0)
        for case in cases
        if case.hfu and case.mfu
    }


def _compare(case: PublishedCase, recomputed: dict[tuple[str, str], float]) -> SpeedRow:
    inputs, published = case.inputs, case.tokens_per_second_per_gpu
    assert published is not None
    row = SpeedRow(
        case=inputs.case,
        source=inputs.source,
        setup=describe(inputs),
        family=inputs.family,
        compiled=inputs.compiled == "yes",
        published_tokens_per_second=published,
    )
    if inputs.family not in JUDGED:
        return msgspec.structs.replace(row, reason="not among the families that judge")
    try:
        seconds, exposed, assumptions = _predict(inputs, recomputed.get((inputs.model, inputs.gpu)))
    except SpecError as error:
        return msgspec.structs.replace(row, reason=str(error))
    tokens = (inputs.micro_batch_size or 0) * (inputs.sequence_length or 0) * (inputs.gradient_accumulation_steps or 1)
    return msgspec.structs.replace(
        row,
        predicted_tokens_per_second=tokens / seconds,
        error=tokens / seconds / published - 1,
        exposed_share=exposed / seconds,
        assumptions=assumptions,
    )


def _predict(inputs: CaseInputs, recomputed: float | None) -> tuple[float, float, tuple[str, ...]]:
    """Return a step's seconds, the exposed ones among them, and what was taken for granted."""
    framework, assumptions = _FRAMEWORKS[inputs.family], list(_FRAMEWORKS[inputs.family].facts)
    cluster = _cluster(inputs)
    kernels = replace(CUDA, composite_norms=framework.composite_norms and inputs.compiled != "yes")
    if inputs.compiled == "yes":
        assumptions.append("compiled: predicted for eager with norms of one kernel each")
    kinds = {"none": [(Checkpointing.NONE, 1.0)], "full": [(Checkpointing.FULL, 1.0)]}
    kinds["selective_op"] = [(Checkpointing.SELECTIVE, 1.0)]
    if inputs.checkpointing == "selective_block":
        if recomputed is None:
            raise SpecError("some blocks are checkpointed; the source does not say which share")
        assumptions.append(f"{recomputed:.0%} of the blocks checkpointed: from the printed HFU over MFU")
        kinds["selective_block"] = [(Checkpointing.NONE, 1 - recomputed), (Checkpointing.FULL, recomputed)]
    if inputs.checkpointing not in kinds:
        raise SpecError("the source does not state how activations are checkpointed")
    seconds = exposed = 0.0
    for checkpointing, share in kinds[inputs.checkpointing]:
        step, waited = _step(inputs, framework, cluster, kernels, checkpointing)
        seconds, exposed = seconds + share * step, exposed + share * waited
    return seconds, exposed, tuple(assumptions)


def _step(
    inputs: CaseInputs, framework: _Framework, cluster: Cluster, kernels: Kernels, checkpointing: Checkpointing
) -> tuple[float, float]:
    setup = _setup(inputs, framework, cluster, checkpointing)
    rates = datasheet(cluster, cluster.gpu, setup, groups_of(cluster, setup))
    rates = replace(rates, attention_reach=framework.attention_reach)
    time = step_time(_shape(inputs, framework), setup, kernels, rates)
    if time.step_seconds is None or time.exposed_communication_seconds is None:
        raise SpecError(f"unknown: {', '.join(time.unknown)}")
    return time.step_seconds, time.exposed_communication_seconds


def _setup(inputs: CaseInputs, framework: _Framework, cluster: Cluster, checkpointing: Checkpointing) -> TrainSetup:
    strategy, stored = ShardingStrategy(inputs.sharding or ""), inputs.stored_dtype or "fp32"
    return TrainSetup(
        strategy=strategy,
        api=Api.FSDP2 if inputs.api == "FSDP2" else Api.FSDP1,
        precision=Precision(stored, inputs.compute_dtype or stored, inputs.reduce_dtype or stored),
        checkpointing=checkpointing,
        optimizer=framework.optimizer,
        world_size=cluster.world_size,
        shard_size=cluster.gpus_per_node if strategy.is_hybrid else None,
        micro_batch_size=inputs.micro_batch_size or 0,
        sequence_length=inputs.sequence_length or 0,
        gradient_accumulation_steps=inputs.gradient_accumulation_steps or 1,
        max_grad_norm=1.0,
    )


def _shape(inputs: CaseInputs, framework: _Framework) -> ModelShape:
    heads = inputs.num_attention_heads or 0
    return ModelShape(
        name=inputs.model,
        family=framework.family,
        num_hidden_layers=inputs.num_hidden_layers or 0,
        hidden_size=inputs.hidden_size or 0,
        num_attention_heads=heads,
        num_key_value_heads=inputs.num_key_value_heads or heads,
        intermediate_size=inputs.intermediate_size or 0,
        vocab_size=inputs.vocab_size or 0,
        max_position_embeddings=inputs.sequence_length or 0,
        tie_word_embeddings=framework.family is Family.GPT2,
    )


def _cluster(inputs: CaseInputs) -> Cluster:
    """Return the nodes: cards joined by NVSwitch, and between nodes the network that the source states."""
    card = _CARDS.get((inputs.gpu, inputs.gpu_memory_gb or 0))
    if card is None or not inputs.num_gpus or not inputs.num_nodes:
        raise SpecError("the source does not state which GPUs, or how many on how many nodes")
    gpu, server = loader.gpu(card[0]), loader.server(card[1])
    return Cluster(
        server=msgspec.structs.replace(server, gpu=gpu.name, inter_node=_network(inputs)),
        gpu=gpu,
        num_nodes=inputs.num_nodes,
        gpus_per_node=inputs.num_gpus // inputs.num_nodes,
    )


def _network(inputs: CaseInputs) -> Network | None:
    """Read ``400 Gb/s per node`` or ``1600 Gbps/node RoCE``."""
    stated = re.match(r"(\d+) Gb", inputs.interconnect or "")
    if stated is None:
        return None
    return Network(
        kind=LinkKind.ROCE if "RoCE" in (inputs.interconnect or "") else LinkKind.INFINIBAND,
        source=Source(title=inputs.source, date="published"),
        num_nics=8,
        bandwidth_bytes_per_second=float(stated[1]) * 1e9 / 8,
    )
