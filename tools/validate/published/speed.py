"""Other people's throughput, predicted from datasheets: published.csv, compared with the best constant MFU.

No constant was fitted to these rows: GPU rates are facts of gpus.toml with their sources, link rates NCCL's own model.
If a source does not state something, it is taken from the framework's code and listed, or the row is not compared, with
the reason. If it does not state the fraction of checkpointed blocks, that follows from the ratio of the printed HFU and
MFU: the ratio says how much was computed twice, and nothing about time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import msgspec

from fsdp_bench.catalog import loader
from fsdp_bench.rates.attention_time import FLASH_ATTENTION_2, TRITON
from fsdp_bench.rates.datasheet import datasheet
from fsdp_bench.replay.schedule import schedule
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import Checkpointing
from tools.validate.published.cases import CaseInputs, PublishedCase, cluster_of, describe, read_cases
from tools.validate.published.setups import FRAMEWORKS, LLM_FOUNDRY, Plan, is_large_mpt, plan_case

_WRITES_NORMS_IN_PYTHON = {
    "ibm-fms-fsdp": "fms/modules/layernorm.py",
    "torchtitan-pr165": "torchtrain/models/llama/model.py",
    "torchtitan-h100-202412": "torch.nn.RMSNorm, aten/src/ATen/native/layer_norm.cpp of torch 2.6, rms_norm",
}
"""Publishers whose RMSNorm runs as elementary operators in fp32, and where that is written."""

COMPARED = (LLM_FOUNDRY, "ibm-fms-fsdp", "torchtitan-pr165", "torchtitan-h100-202412", "fms-acceleration")
"""Publishers whose code was read for effects on time."""

_USUAL_SERVER = "DGX-H100"
"""Whose network is assumed between H100s where the source states none."""
_FLASH_ATTENTION_2_MODELS = ("MPT-1b", "MPT-3b", "MPT-7b", "MPT-70b")
"""Models that run FlashAttention-2 on 128 H100 and more (llm-foundry, scripts/train/benchmarking/sweep.py:
``--attn_impl flash``, with flash-attn 2.4.2); all else ran ``triton``, the default of submit_benchmarks.py."""


class SpeedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published throughput and its prediction, or the reason why there is none."""

    case: str
    source: str
    setup: str
    family: str
    gpu: str
    """The GPU generation: ``A100``, ``H100``."""
    compiled: bool
    num_nodes: int = 1
    published_tokens_per_second: float
    """Tokens per second of one GPU."""
    predicted_tokens_per_second: float | None = None
    error: float | None = None
    """``predicted / published - 1``."""
    constant_mfu_error: float | None = None
    """The error with a constant MFU, the best one for all compared rows of this GPU."""
    exposed_share: float | None = None
    """Predicted fraction of the step with exposed communication."""
    assumptions: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def publisher(self) -> str:
        """The publisher, which may have several families of rows."""
        return "torchtitan" if self.family.startswith("torchtitan") else self.family


class SpeedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Compared rows that have something in common."""

    num_rows: int
    median_error: float
    """The median of the absolute errors."""
    median_error_of_constant_mfu: float
    num_too_fast: int


class SpeedSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers and errors of the compared rows."""

    num_rows: int
    num_left_out: int
    best_constant_mfu: dict[str, float]
    """The best constant MFU by GPU generation."""
    groups: dict[str, SpeedGroup]
    """``all``, then by publisher, by publisher and GPU, by GPU, and by GPU and whether compiled."""


def compare_speed(cases: Iterable[PublishedCase] | None = None) -> tuple[list[SpeedRow], SpeedSummary]:
    """Predict every published throughput; by default of the packaged cases."""
    found = [case for case in (read_cases() if cases is None else cases) if case.tokens_per_second_per_gpu]
    recomputed = _recomputed_fractions(found)
    pairs = [_compare(case, recomputed) for case in found]
    plain, mfus = [row for row, _ in pairs], {row.case: mfu for row, mfu in pairs if mfu is not None}
    best = {gpu: _best_constant(mfus[row.case] for row in plain if row.case in mfus and row.gpu == gpu)
            for gpu in dict.fromkeys(row.gpu for row in plain if row.case in mfus)}  # fmt: skip
    done = [
        msgspec.structs.replace(row, constant_mfu_error=best[row.gpu] / mfus[row.case] - 1) if row.case in mfus else row
        for row in plain
    ]
    return done, _summary(done, best)


def _summary(rows: Sequence[SpeedRow], best: dict[str, float]) -> SpeedSummary:
    compared = [row for row in rows if row.error is not None]
    if not compared:
        raise SpecError("published: no row with a throughput can be predicted")
    groups = {"all": compared}
    for family in dict.fromkeys(row.family for row in compared):
        groups[family] = [row for row in compared if row.family == family]
        on = sorted({row.gpu for row in groups[family]})
        if len(on) > 1:
            groups |= {f"{family} on {gpu}": [row for row in groups[family] if row.gpu == gpu] for gpu in on}
    for gpu in sorted(best):
        groups[gpu] = [row for row in compared if row.gpu == gpu]
        for kind in ("eager", "compiled"):
            groups[f"{gpu} {kind}"] = [row for row in groups[gpu] if kind_of(row) == kind]
    return SpeedSummary(
        num_rows=len(compared),
        num_left_out=len(rows) - len(compared),
        best_constant_mfu=best,
        groups={name: _group(group) for name, group in groups.items() if group},
    )


def _group(rows: Sequence[SpeedRow]) -> SpeedGroup:
    return SpeedGroup(
        num_rows=len(rows),
        median_error=median(abs(row.error or 0.0) for row in rows),
        median_error_of_constant_mfu=median(abs(row.constant_mfu_error or 0.0) for row in rows),
        num_too_fast=sum((row.error or 0.0) > 0 for row in rows),
    )


def kind_of(row: SpeedRow) -> str:
    """Return ``eager`` or ``compiled``."""
    return "compiled" if row.compiled else "eager"


def _best_constant(mfus: Iterable[float]) -> float:
    """Return the MFU with the least median error."""
    published = list(mfus)
    return min((i / 1000 for i in range(150, 800)), key=lambda mfu: median(abs(mfu / one - 1) for one in published))


def _recomputed_fractions(cases: Sequence[PublishedCase]) -> dict[tuple[str, str], float]:
    """Return the fraction of checkpointed blocks by model and GPU, from rows that print HFU and MFU.

    Recomputing every block's forward adds a third to a step's FLOPs.
    """
    return {
        (case.inputs.model, case.inputs.gpu): min(max(3 * (case.hfu / case.mfu - 1), 0.0), 1.0)
        for case in cases
        if case.hfu and case.mfu
    }


# -- one row ---------------------------------------------------------------------------------------------------------


def _compare(case: PublishedCase, recomputed: dict[tuple[str, str], float]) -> tuple[SpeedRow, float | None]:
    """Return a row, and where it is predicted the published MFU, to which the constant MFU is fitted."""
    inputs, published = case.inputs, case.tokens_per_second_per_gpu
    assert published is not None
    row = SpeedRow(
        case=inputs.case,
        source=inputs.source,
        setup=describe(inputs),
        family=inputs.family,
        gpu=inputs.gpu.split()[0].split("-")[0],
        compiled=inputs.compiled == "yes",
        num_nodes=inputs.num_nodes or 1,
        published_tokens_per_second=published,
    )
    if inputs.family not in COMPARED:
        reason = f"{inputs.family}: what its code costs in time (norms, attention, optimizer) was not read"
        return msgspec.structs.replace(row, reason=reason), None
    try:
        parts = _parts(inputs, recomputed.get((inputs.model, inputs.gpu)))
        cluster = _cluster(inputs)
        seconds = exposed = 0.0
        for fraction, plan in parts:
            step, waited = _step(inputs, plan, cluster)
            seconds, exposed = seconds + fraction * step, exposed + fraction * waited
    except SpecError as error:
        return msgspec.structs.replace(row, reason=str(error)), None
    plan = parts[0][1]
    predicted = plan.setup.tokens_per_step_per_rank / seconds
    row = msgspec.structs.replace(
        row,
        predicted_tokens_per_second=predicted,
        error=predicted / published - 1,
        exposed_share=exposed / seconds,
        assumptions=(*plan.assumptions, *_assumptions(inputs, parts)),
    )
    return row, _mfu(published, plan, cluster)


def _parts(inputs: CaseInputs, recomputed: float | None) -> list[tuple[float, Plan]]:
    """Return the plans whose step times add up to the row's, each with its weight.

    Raises SpecError for a row that cannot be predicted.
    """
    kinds: list[tuple[float, Checkpointing | None]] = [(1.0, None)]
    if inputs.checkpointing == "selective_block" and recomputed is not None:
        kinds = [(1 - recomputed, Checkpointing.NONE), (recomputed, Checkpointing.FULL)]
    return [(fraction, plan_case(inputs, checkpointing)) for fraction, checkpointing in kinds]


def _cluster(inputs: CaseInputs) -> Hardware:
    cluster = cluster_of(inputs)
    if cluster.num_nodes > 1 and cluster.server.inter_node is None:
        if not _network_is_assumed(inputs):
            raise SpecError("the source does not state the network between the nodes")
        network = loader.server(_USUAL_SERVER).inter_node
        server = msgspec.structs.replace(cluster.server, inter_node=network)
        cluster = msgspec.structs.replace(cluster, server=server)
    cuda = FRAMEWORKS[inputs.family].cuda
    return cluster if cuda is None else msgspec.structs.replace(cluster, gpu=cluster.gpu.with_cuda(cuda))


def _network_is_assumed(inputs: CaseInputs) -> bool:
    return inputs.interconnect is None and (inputs.num_nodes or 1) > 1 and inputs.gpu.startswith("H100")


def _assumptions(inputs: CaseInputs, parts: Sequence[tuple[float, Plan]]) -> list[str]:
    found = []
    if inputs.compiled == "yes":
        found.append("compiled: predicted for eager with norms of one kernel each")
    elif inputs.family in _WRITES_NORMS_IN_PYTHON:
        found.append(f"norms are elementary operators in fp32 ({_WRITES_NORMS_IN_PYTHON[inputs.family]})")
    if len(parts) > 1:
        blocks = f"{parts[1][0]:.0%} of {inputs.model}'s blocks on {inputs.gpu}"
        found.append(f"{blocks} are checkpointed, from the printed HFU over MFU")
    if _network_is_assumed(inputs):
        found.append(f"network between the nodes not stated: that of a {_USUAL_SERVER}, 8 x 400 Gb/s")
    if _runs_triton(inputs):
        found.append(
            "attention by FlashAttention in Triton: 1.4 times slower forward and 2 times slower backward than"
            " FlashAttention-2, as on an A100"
        )
    else:
        found.append("attention by FlashAttention-2: torch's own, or flash-attn 2")
    return found


def _runs_triton(inputs: CaseInputs) -> bool:
    """Return whether MPT's attention was ``triton``. ``flash`` is predicted as torch's FlashAttention."""
    uses_flash = is_large_mpt(inputs) and inputs.model in _FLASH_ATTENTION_2_MODELS
    return inputs.family == LLM_FOUNDRY and not uses_flash


def attention_kernel(inputs: CaseInputs) -> str:
    """Return the name of a case's attention kernel in attention.toml; torch did not take cuDNN's yet."""
    return TRITON if _runs_triton(inputs) else FLASH_ATTENTION_2


def _step(inputs: CaseInputs, plan: Plan, cluster: Hardware) -> tuple[float, float]:
    """Return the seconds of a step, and its exposed communication in seconds."""
    norms = inputs.family in _WRITES_NORMS_IN_PYTHON and inputs.compiled != "yes"
    kernels = replace(plan.kernels, composite_norms=norms)
    rates = datasheet(cluster, plan.setup)
    rates = replace(rates, attention_kernel=attention_kernel(inputs))
    time = schedule(SimulatedSteps(plan.model, plan.setup, kernels).step(), rates)
    if time.step_seconds is None or time.exposed_communication_seconds is None:
        raise SpecError(f"unknown: {', '.join(time.unknown)}")
    return time.step_seconds, time.exposed_communication_seconds


def _mfu(tokens_per_second: float, plan: Plan, cluster: Hardware) -> float:
    """Return the MFU of a throughput by the formula of most sources, in which attention is not causal."""
    shape = plan.model
    attention = 12 * shape.num_hidden_layers * shape.hidden_size * plan.setup.sequence_length
    peak = cluster.gpu.peak_flops_per_second("bf16")
    assert peak is not None
    return tokens_per_second * (6 * shape.num_parameters + attention) / peak
