"""Terms: tensors that the measured frameworks keep alive and our models do not, or the reverse, with their sizes.

A size is in bytes, of tensors alive when the backward of the loss begins, computed from shapes. Each term cites the
framework's source (repository paths as of the measurement's date). No size is fitted to a measurement or used in a
prediction. Symbols: T tokens of a micro-batch, D hidden, K key/value width, F feed-forward, V vocabulary, L layers,
E width of a head, p bytes of the compute dtype.
"""

from collections.abc import Callable

import msgspec

from fsdp_bench.simulate.compiled.choose import why_eager
from fsdp_bench.simulate.operators.kernels import CUDA, FP32, Sizes
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import Api, Checkpointing, ShardingStrategy, TrainSetup


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between the published run and the prediction."""

    name: str
    formula: str
    num_bytes: int | None
    """Additional bytes of the published run (negative: fewer). None if not known."""
    source: str
    only: str | None = None
    """The only kind of peak that the term applies to. None: all kinds."""


class _Symbols:
    """The symbols of the formulas."""

    def __init__(self, model: ModelShape, setup: TrainSetup) -> None:
        self.T = setup.micro_batch_size * setup.sequence_length
        self.D = model.hidden_size
        self.K = model.kv_size
        self.F = model.intermediate_size
        self.V = model.vocab_size
        self.L = model.num_hidden_layers
        self.E = model.head_dim
        self.p = Sizes.of(setup.precision).compute


def terms_of(family: str, model: ModelShape, setup: TrainSetup, packed: bool) -> tuple[Term, ...]:
    """Return the terms of one publisher's run of a setup."""
    s = _Symbols(model, setup)
    terms = list(_FAMILIES[family](s, model, setup, packed)) if family in _FAMILIES else [_unknown_code(family)]
    if setup.compile:
        terms.append(_FOR_EAGER if why_eager(model, setup, CUDA) else _OLDER_COMPILER)
    return tuple(terms)


_OLDER_COMPILER = Term(
    name="torch.compile: the benchmark model's blocks, as the torch of this package compiles them",
    formula="unknown",
    num_bytes=None,
    source="theirs were compiled by the torch of their time, whose partitioner and Inductor were others",
)
_FOR_EAGER = Term(
    name="torch.compile: the prediction is for eager",
    formula="unknown",
    num_bytes=None,
    source="torch/_inductor and torch/_functorch/partitioners.py choose what is saved and recomputed",
)


ADAMW_NOT_STATED = Term(
    name="AdamW's implementation not stated: fused has no temporary in its step",
    formula="at most -(bytes of the stored shard)",
    num_bytes=None,
    source="torch/optim/adamw.py: _multi_tensor_adamw's exp_avg_sq_sqrt against _fused_adamw",
)
"""The term for a peak in the optimizer's step."""


def _unknown_code(family: str) -> Term:
    return Term(name=f"code of {family} not read", formula="unknown", num_bytes=None, source="none")


# -- norms, keys and values ------------------------------------------------------------------------------------------


def _python_norms(s: _Symbols, count: int, source: str) -> Term:
    """Return the term of RMSNorm written in Python.

    It saves its fp32 copy of the input (4TD) and the normalised input in p bytes (pTD, for the weight's gradient);
    the fused kernel saves the input itself (pTD). The outputs are the same.
    """
    return Term(
        name="RMSNorm in Python keeps its input in fp32",
        formula=f"{count} x 4TD",
        num_bytes=count * FP32 * s.T * s.D,
        source=source,
    )


def _expanded_keys(s: _Symbols, source: str) -> Term:
    return Term(
        name="keys and values repeated for every query head",
        formula="2pT(D - K)L",
        num_bytes=2 * s.p * s.T * (s.D - s.K) * s.L,
        source=source,
    )


# -- torchtitan ------------------------------------------------------------------------------------------------------


def _torchtitan(s: _Symbols, model: ModelShape, setup: TrainSetup, _packed: bool) -> list[Term]:
    terms = [
        Term(
            name="the fp32 logits are held through backward",
            formula="4TV",
            num_bytes=FP32 * s.T * s.V,
            source=(
                "torchtrain/models/llama/model.py, Transformer.forward: output(h).float();"
                " train.py: the local `pred` (`del pred` before backward came later)"
            ),
        )
    ]
    if not setup.compile:
        none = setup.checkpointing is Checkpointing.NONE
        norms = _python_norms(s, 2 * s.L + 1 if none else 1, "torchtrain/models/llama/model.py, RMSNorm.forward")
        terms.append(norms)
    if setup.api is Api.FSDP2 and setup.strategy is ShardingStrategy.FULL_SHARD:
        terms.append(
            Term(
                name="the last block stays gathered after forward",
                formula="p x its parameters",
                num_bytes=s.p * model.num_block_parameters,
                source="torchtrain/parallelisms/parallelize_llama.py: reshard_after_forward for all but the last",
            )
        )
    if setup.api is Api.FSDP2:
        terms.append(
            Term(
                name="reduce-scatter's input in the reduce-scatter stream's pool, as fully_shard did then",
                formula="unknown: fragmentation",
                num_bytes=None,
                source="torch/distributed/_composable/fsdp/_fsdp_collectives.py of early 2024, foreach_reduce_scatter",
                only="max_reserved",
            )
        )
    return terms


# -- litgpt ----------------------------------------------------------------------------------------------------------


def _litgpt(s: _Symbols, _model: ModelShape, _setup: TrainSetup, _packed: bool) -> list[Term]:
    return [
        _python_norms(s, 2 * s.L + 1, "litgpt/model.py, RMSNorm.forward"),
        _expanded_keys(s, "litgpt/model.py, CausalSelfAttention.forward: k.expand, reshape"),
        Term(
            name="attention's output copied into the order of tokens",
            formula="pTDL",
            num_bytes=s.p * s.T * s.D * s.L,
            source=(
                "litgpt/model.py: q is made by torch.cat in the order B, H, S, E; mha_fwd's empty_like(q)"
                " (aten/native/transformers/cuda/flash_attn/flash_api.cpp) keeps that, so y.reshape(B, T, C) copies"
            ),
        ),
        Term(
            name="logits cast to fp32 outside of the model, as ours are before the loss",
            formula="0",
            num_bytes=0,
            source="lightning/fabric/plugins/precision/half.py, HalfPrecision.convert_output",
        ),
    ]


# -- torchtune -------------------------------------------------------------------------------------------------------

_TORCHTUNE_POSITIONS = 131072
"""max_seq_len of every size (torchtune/models/llama3_2/_model_builders.py)."""


def _torchtune(s: _Symbols, _model: ModelShape, setup: TrainSetup, packed: bool) -> list[Term]:
    cache = Term(
        name="rotary cache of all positions, fp32",
        formula="4E x 131072",
        num_bytes=FP32 * s.E * _TORCHTUNE_POSITIONS,
        source="torchtune/models/llama3_1/_position_embeddings.py, build_rope_cache",
    )
    if setup.compile or setup.checkpointing is not Checkpointing.NONE:
        return [cache]
    terms = [
        _python_norms(s, 2 * s.L + 1, "torchtune/modules/rms_norm.py, RMSNorm.forward"),
        _expanded_keys(s, "torchtune/modules/attention.py, MultiHeadAttention.forward: k.expand, reshape"),
        cache,
    ]
    if packed:
        terms.append(
            Term(
                name="rotary factors gathered by position, for queries and for keys, saved",
                formula="2 x 4TEL",
                num_bytes=2 * FP32 * s.T * s.E * s.L,
                source="torchtune/models/llama3_1/_position_embeddings.py, forward: self.cache[input_pos]",
            )
        )
    return terms


_FAMILIES: dict[str, Callable[[_Symbols, ModelShape, TrainSetup, bool], list[Term]]] = {
    "torchtitan-pr165": _torchtitan,
    "litgpt-thunder": _litgpt,
    "torchtune": _torchtune,
}
