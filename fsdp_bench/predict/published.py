"""Other people's measurements, predicted: catalog/published.csv row by row, each kind of peak beside its own kind.

The file is a copy, made in November 2026, of the project's collection of published measurements (cases.csv); every
row names its source. What a row does not say is blank there, and is either listed here among the assumptions or is
the reason why the row is not predicted.
A prediction is made from ``CaseInputs``, which has no measured column; where the framework's code is known to save
other tensors than our models, that is a named term beside the prediction (published_terms.py), never a part of it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files

import msgspec

from fsdp_bench.catalog import loader
from fsdp_bench.predict.allocator import AllocatorReading
from fsdp_bench.predict.allocator import replay as replay_allocator
from fsdp_bench.predict.estimate import estimate
from fsdp_bench.predict.events import Event, Kind
from fsdp_bench.predict.kernels import CUDA, kernels_on
from fsdp_bench.predict.memory import replay
from fsdp_bench.predict.published_terms import ADAMW_NOT_STATED, Term, terms_of
from fsdp_bench.predict.step import events_of_first_steps
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import (
    Api,
    Checkpointing,
    Loss,
    Offload,
    OptimizerKind,
    Precision,
    ShardingStrategy,
    TrainSetup,
)
from fsdp_bench.spec.units import GIB

PREDICTED_KINDS = {
    "max_active": "peak_active_bytes",
    "max_allocated": "peak_allocated_bytes",
    "max_reserved": "peak_reserved_bytes",
}
"""The published kinds of peak, and the field of AllocatorReading that each is held against, alone."""

LOSS_BACKWARD = "aten::_log_softmax_backward_data"
"""Where the sizes of named terms can be added up: everything that forward saved is alive then."""


class CaseInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a row says about a run, and nothing that was measured. None: the source does not say."""

    case: str
    family: str
    """Who published it, with which framework: torchtitan-pr165, litgpt-thunder, torchtune, ..."""
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
    """Nominal."""
    num_gpus: int | None
    num_nodes: int | None
    api: str
    sharding: str | None
    stored_dtype: str | None
    compute_dtype: str | None
    reduce_dtype: str | None
    offload: str | None
    checkpointing: str | None
    compiled: str | None
    optimizer: str | None
    micro_batch_size: int | None
    sequence_length: int | None
    gradient_accumulation_steps: int | None
    interconnect: str | None
    step: str | None
    """torchtune's cumulative ladder: the last thing that was switched on."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One published peak."""

    kind: str
    """max_allocated, max_active, max_reserved, or unknown."""
    num_bytes: int | None
    """None where the printed unit leaves it open."""


class PublishedCase(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    inputs: CaseInputs
    measured: tuple[Measured, ...]
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    """As printed."""


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peak of one case: published beside predicted, or why it is not predicted."""

    case: str
    source: str
    setup: str
    compiled: bool = False
    """Whether the published code was compiled; predictions are for eager."""
    kind: str | None = None
    """None where the source prints no memory."""
    measured_bytes: int | None = None
    predicted_bytes: int | None = None
    error: float | None = None
    """Predicted over measured, less one."""
    peak_at: str | None = None
    """Phase and operator of the predicted peak of live bytes."""
    terms: tuple[Term, ...] = ()
    """How the framework's code differs from what was predicted."""
    with_terms_bytes: int | None = None
    """The prediction and the sizes of its terms; None where they cannot be added up."""
    error_with_terms: float | None = None
    assumptions: tuple[str, ...] = ()
    reason: str | None = None
    """Why there is no prediction."""


@dataclass(frozen=True)
class Plan:
    """A case in the words of this package."""

    model: ModelShape
    setup: TrainSetup
    gpu: Gpu | None
    """None where the catalogue or the row leaves its size open: then a card without limit."""
    has_reducer: bool
    """False for a bare model on one GPU: DistributedDataParallel without its Reducer, that is without buckets."""
    packed: bool
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Unpredictable:
    """A case that is ruled out for an understood reason."""

    reason: str


@dataclass(frozen=True)
class Prediction:
    """The peaks of one plan."""

    reading: AllocatorReading
    peak_phase: str
    peak_operator: str


# -- reading ---------------------------------------------------------------------------------------------------------


def packaged_rows() -> list[dict[str, str]]:
    """Return the rows of catalog/published.csv as they stand there."""
    text = files("fsdp_bench.catalog").joinpath("published.csv").read_text(encoding="utf-8")
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
        )
        for row in (packaged_rows() if rows is None else rows)
    )


def _count(text: str) -> int | None:
    return int(float(text)) if text else None


def _number(text: str, unit: float = 1.0) -> float | None:
    return float(text) * unit if text else None


def _inputs(row: Mapping[str, str]) -> CaseInputs:
    return CaseInputs(
        case=row["id"],
        family=row["family"],
        source=row["source"],
        model=row["model"],
        num_hidden_layers=_count(row["n_layers"]),
        hidden_size=_count(row["hidden"]),
        num_attention_heads=_count(row["n_heads"]),
        num_key_value_heads=_count(row["n_kv_heads"]),
        intermediate_size=_count(row["ffn_hidden"]),
        vocab_size=_count(row["vocab"]),
        num_parameters=_count(row["params"]),
        gpu=row["gpu"],
        gpu_memory_gb=_count(row["gpu_mem_nominal_gb"]),
        num_gpus=_count(row["n_gpus"]),
        num_nodes=_count(row["n_nodes"]),
        api=row["api"],
        sharding=row["sharding"] or None,
        stored_dtype=row["param_storage_dtype"] or None,
        compute_dtype=row["compute_allgather_dtype"] or None,
        reduce_dtype=row["reduce_dtype"] or None,
        offload=row["cpu_offload"] or None,
        checkpointing=row["act_ckpt"] or None,
        compiled=row["compile"] or None,
        optimizer=row["optimizer"] or None,
        micro_batch_size=_count(row["micro_batch_per_gpu"]),
        sequence_length=_count(row["seq_len"]),
        gradient_accumulation_steps=_count(row["grad_accum"]),
        interconnect=row["interconnect"] or None,
        step=_ladder_step(row["notes"]),
    )


def _measured(row: Mapping[str, str]) -> tuple[Measured, ...]:
    pairs = ((row["peak_mem_kind"], row["peak_mem_gib"]), (row["second_mem_kind"], row["second_mem_gib"]))
    return tuple(Measured(kind=kind, num_bytes=round(float(gib) * GIB) if gib else None) for kind, gib in pairs if kind)


_LADDER_NOTE = "cumulative step: "
LADDER = (
    "baseline unpacked",
    "+packed",
    "+compile",
    "+chunked CE",
    "+activation ckpt",
    "+opt in backward",
    "+activation offload",
    "+8-bit AdamW",
)
"""torchtune's README: each step keeps the ones before it."""


def _ladder_step(notes: str) -> str | None:
    return notes.removeprefix(_LADDER_NOTE) if notes.startswith(_LADDER_NOTE) else None


def _has_step(inputs: CaseInputs, step: str) -> bool:
    return inputs.step is not None and LADDER.index(inputs.step) >= LADDER.index(step)


# -- mapping ---------------------------------------------------------------------------------------------------------

_SINGLE_GPU = "single GPU"
_APIS = {"FSDP1": Api.FSDP1, "FSDP2": Api.FSDP2, "DDP": Api.FSDP2, _SINGLE_GPU: Api.FSDP2}
_OFFLOAD = {"no": Offload.NONE, "params": Offload.PARAMS, "FSDP CPU offload (params+opt)": Offload.PARAMS}
_CHECKPOINTING = {"none": Checkpointing.NONE, "full": Checkpointing.FULL, "selective_op": Checkpointing.SELECTIVE}
_GPUS = {
    ("H100", 96): "H100-SXM-96GB",
    ("A100-SXM4-40GB", 40): "A100-SXM-40GB",
    ("A100-SXM4-80GB", 80): "A100-SXM-80GB",
}
"""Names that the sources use where they mean one entry of the catalogue."""

_NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "num_parameters",
    "num_gpus",
    "num_nodes",
    "sharding",
    "stored_dtype",
    "offload",
    "checkpointing",
    "compiled",
    "optimizer",
    "micro_batch_size",
    "sequence_length",
)


@dataclass(frozen=True)
class _Framework:
    """What a framework's own code and defaults decide."""

    max_grad_norm: float | None
    facts: tuple[str, ...]


_FRAMEWORKS = {
    "torchtitan-pr165": _Framework(
        1.0,
        (
            "units: each block and the root; use_orig_params (torchtrain/parallelisms/parallelize_llama.py)",
            "gradients clipped to norm 1.0 (train.py, training.max_norm)",
        ),
    ),
    "litgpt-thunder": _Framework(
        None,
        (
            "units: Block and the root; no_sync but in the last micro-batch; gradients not clipped"
            " (extensions/thunder/pretrain.py)",
            "use_orig_params (lightning/fabric/strategies/fsdp.py)",
        ),
    ),
    "torchtune": _Framework(None, ("gradients not clipped (full_finetune_single_device, clip_grad_norm: null)",)),
}


def plan_case(inputs: CaseInputs) -> Plan | Unpredictable:
    """Put a case into this package's words; nothing is guessed in silence."""
    reason = _ruled_out(inputs)
    if reason is not None:
        return Unpredictable(reason)
    try:
        model = _model(inputs)
        if model is None:
            return Unpredictable(f"the dimensions do not give the stated {inputs.num_parameters} parameters")
        return _plan(inputs, model)
    except SpecError as error:
        return Unpredictable(str(error))


def _ruled_out(inputs: CaseInputs) -> str | None:
    if "llama" not in inputs.model.lower():
        return f"{inputs.model}: neither llama nor gpt2 as train/transformer.py builds them"
    if inputs.offload is not None and inputs.offload not in _OFFLOAD:
        return f"offload of {inputs.offload} is not modelled"
    if inputs.optimizer not in (None, "AdamW", "fused AdamW"):
        return f"optimizer {inputs.optimizer} is not modelled"
    if _has_step(inputs, "+opt in backward"):
        return "the optimizer's step inside backward is not modelled"
    if inputs.api not in _APIS:
        return f"{inputs.api} is not modelled"
    if inputs.checkpointing == "selective_block":
        return "some blocks are checkpointed; the source does not say which fraction"
    blank = [field for field in _NEEDED if getattr(inputs, field) is None]
    if inputs.api != _SINGLE_GPU:
        blank += [field for field in ("compute_dtype", "reduce_dtype") if getattr(inputs, field) is None]
    return f"the source does not state {', '.join(blank)}" if blank else None


def _model(inputs: CaseInputs) -> ModelShape | None:
    """Return the shape; the stated number of parameters tells whether the head is tied to the embedding."""
    for tied in (False, True):
        shape = ModelShape(
            name=inputs.model,
            family=Family.LLAMA,
            num_hidden_layers=inputs.num_hidden_layers or 0,
            hidden_size=inputs.hidden_size or 0,
            num_attention_heads=inputs.num_attention_heads or 0,
            num_key_value_heads=inputs.num_key_value_heads or 0,
            intermediate_size=inputs.intermediate_size or 0,
            vocab_size=inputs.vocab_size or 0,
            max_position_embeddings=inputs.sequence_length or 0,
            tie_word_embeddings=tied,
        )
        if shape.num_parameters == inputs.num_parameters:
            return shape
    return None


def _plan(inputs: CaseInputs, model: ModelShape) -> Plan:
    is_bare = inputs.api == _SINGLE_GPU
    framework = _FRAMEWORKS.get(inputs.family, _Framework(None, ()))
    optimizer = OptimizerKind.ADAMW_FUSED if inputs.optimizer == "fused AdamW" else OptimizerKind.ADAMW_FOREACH
    assumptions = list(framework.facts)
    if inputs.optimizer == "AdamW":
        assumptions.append("AdamW's implementation not stated: foreach, PyTorch's choice on a GPU")
    stored = inputs.stored_dtype or ""
    if is_bare and None in (inputs.compute_dtype, inputs.reduce_dtype):
        assumptions.append(f"one GPU: computes in the stored {stored}")
    if inputs.gradient_accumulation_steps is None:
        assumptions.append("gradient accumulation not stated: none")
    gpu = _gpu(inputs)
    if gpu is None:
        assumptions.append(f"{inputs.gpu}: memory not stated; a card without limit")
    strategy, world = ShardingStrategy(inputs.sharding or ""), inputs.num_gpus or 0
    setup = TrainSetup(
        strategy=strategy,
        api=_APIS[inputs.api],
        precision=Precision(stored, inputs.compute_dtype or stored, inputs.reduce_dtype or stored),
        offload=_OFFLOAD[inputs.offload or ""],
        checkpointing=_CHECKPOINTING[inputs.checkpointing or ""],
        optimizer=optimizer,
        world_size=world,
        shard_size=world // (inputs.num_nodes or 1) if strategy.is_hybrid else None,
        micro_batch_size=inputs.micro_batch_size or 0,
        sequence_length=inputs.sequence_length or 0,
        gradient_accumulation_steps=inputs.gradient_accumulation_steps or 1,
        sync_every_micro_batch=False,
        max_grad_norm=framework.max_grad_norm,
        loss=Loss.CHUNKED if _has_step(inputs, "+chunked CE") else Loss.PLAIN,
        compile=inputs.compiled == "yes",
    )
    return Plan(model, setup, gpu, not is_bare, _has_step(inputs, "+packed"), tuple(assumptions))


def _gpu(inputs: CaseInputs) -> Gpu | None:
    name = _GPUS.get((inputs.gpu, inputs.gpu_memory_gb or 0))
    return loader.gpu(name) if name else None


# -- predicting ------------------------------------------------------------------------------------------------------


def predict_case(plan: Plan) -> Prediction:
    """Return the peaks of a plan, for eager."""
    if plan.has_reducer:
        whole = estimate(plan.model, plan.setup, plan.gpu, headroom_bytes=0)  # the runs had what the card had
        return Prediction(whole.allocator, whole.memory.peak_phase, whole.memory.peak_operator)
    kernels = kernels_on(CUDA, plan.gpu)
    events = without_reducer(events_of_first_steps(plan.model, plan.setup, kernels))
    live = replay(events)
    card = plan.gpu.usable_memory_bytes if plan.gpu else None
    reading = replay_allocator(events, card, streams_keep_pace=True)
    return Prediction(reading, live.peak_phase, events[live.phases[live.peak_phase].event].label)


_REDUCER_LABELS = ("initialize_buckets", "rebuild_buckets", "_broadcast_coalesced")
"""ddp.py: what DistributedDataParallel allocates beside the model."""


def without_reducer(events: Iterable[Event]) -> list[Event]:
    """Return the events of DistributedDataParallel without those of its Reducer: the bare model."""
    kept: list[Event] = []
    dropped: set[int] = set()
    for event in events:
        if event.kind == Kind.ALLOCATE and event.label in _REDUCER_LABELS:
            dropped.add(event.number)
        elif event.kind == Kind.FREE and event.number in dropped:
            dropped.discard(event.number)
        else:
            kept.append(event)
    return kept


# -- comparing -------------------------------------------------------------------------------------------------------


def compare_published(cases: Iterable[PublishedCase] | None = None) -> list[PublishedRow]:
    """Return a row for each published peak, and one for each case without any; the packaged cases by default."""
    return [row for case in (read_cases() if cases is None else cases) for row in compare_case(case)]


def compare_case(case: PublishedCase) -> list[PublishedRow]:
    """Set each published peak of one case beside the predicted peak of its kind."""
    inputs = case.inputs
    about = PublishedRow(
        case=inputs.case, source=inputs.source, setup=describe(inputs), compiled=inputs.compiled == "yes"
    )
    if not case.measured:
        return [msgspec.structs.replace(about, reason="the source prints no memory")]
    plan = plan_case(inputs)
    blank = [msgspec.structs.replace(about, kind=peak.kind, measured_bytes=peak.num_bytes) for peak in case.measured]
    if isinstance(plan, Unpredictable):
        return [msgspec.structs.replace(row, reason=plan.reason) for row in blank]
    prediction = predict_case(plan)
    terms = terms_of(inputs.family, plan.model, plan.setup, plan.packed)
    return [_compare_peak(row, plan, prediction, terms) for row in blank]


def _compare_peak(row: PublishedRow, plan: Plan, prediction: Prediction, terms: tuple[Term, ...]) -> PublishedRow:
    measured = row.measured_bytes
    if row.kind not in PREDICTED_KINDS or measured is None:
        reason = "the source does not say which peak it is, or in which unit: compared with nothing"
        return msgspec.structs.replace(row, reason=reason)
    terms = tuple(term for term in terms if term.only in (None, row.kind))
    overflow = prediction.reading.out_of_memory
    if overflow is not None:
        reason = f"predicted for eager not to fit on the card: {overflow.label} in {overflow.phase}"
        return msgspec.structs.replace(row, terms=terms, assumptions=plan.assumptions, reason=reason)
    if prediction.peak_phase == "optimizer":
        terms = (*terms, ADAMW_NOT_STATED)
    predicted: int = getattr(prediction.reading, PREDICTED_KINDS[row.kind])
    added = _added(row.kind, prediction, plan, terms)
    total = None if added is None else predicted + added
    return msgspec.structs.replace(
        row,
        predicted_bytes=predicted,
        error=predicted / measured - 1,
        peak_at=f"{prediction.peak_phase}: {prediction.peak_operator}",
        terms=terms,
        with_terms_bytes=total,
        error_with_terms=None if total is None else total / measured - 1,
        assumptions=plan.assumptions,
    )


def _added(kind: str, prediction: Prediction, plan: Plan, terms: tuple[Term, ...]) -> int | None:
    """Return what the terms add to the peak, where that can be told.

    They are sizes of what is alive when the loss's backward begins. So they add up for a peak of live bytes that lies
    there, and neither for reserved memory, nor for compiled code, nor when a term has no known size.
    """
    if kind == "max_reserved" or plan.setup.compile or prediction.peak_operator != LOSS_BACKWARD:
        return None
    sizes = [term.num_bytes for term in terms]
    return sum(size for size in sizes if size is not None) if sizes and None not in sizes else None


def describe(inputs: CaseInputs) -> str:
    """Return a case in one line; what the source does not say is ``?``."""
    dtypes = "/".join(dtype or "?" for dtype in (inputs.stored_dtype, inputs.compute_dtype, inputs.reduce_dtype))
    compiled = {"yes": ", compiled", "no": ""}.get(inputs.compiled or "", ", compiled?")
    batch, length = (value or "?" for value in (inputs.micro_batch_size, inputs.sequence_length))
    return (
        f"{inputs.model}, {inputs.num_gpus or '?'} x {inputs.gpu}, {inputs.api} {inputs.sharding or '?'}, {dtypes},"
        f" AC {inputs.checkpointing or '?'}{compiled}, {batch} x {length}"
    )
