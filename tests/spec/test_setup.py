"""The vocabulary: what is read, what is refused, what is stored."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.spec.codec import from_json, to_builtins, to_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.setup import Api, Offload, Precision, ShardingStrategy, TrainSetup, Wrap

S = ShardingStrategy


@pytest.mark.parametrize(
    ("word", "strategy"),
    [
        ("full_shard", S.FULL_SHARD),
        ("zero3", S.FULL_SHARD),
        ("ZeRO2", S.SHARD_GRAD_OP),
        ("SHARD_GRAD", S.SHARD_GRAD_OP),
        ("ddp", S.NO_SHARD),
        ("hsdp", S.HYBRID_SHARD),
        ("HYBRID_SHARD_ZERO2", S.HYBRID_SHARD_ZERO2),
        ("_hybrid_shard_zero2", S.HYBRID_SHARD_ZERO2),
        # accelerate's FSDP_SHARDING_STRATEGY: 1 to 5, torch's ShardingStrategy in the order of its definition.
        (1, S.FULL_SHARD),
        ("2", S.SHARD_GRAD_OP),
        (3, S.NO_SHARD),
        (4, S.HYBRID_SHARD),
        (5, S.HYBRID_SHARD_ZERO2),
    ],
)
def test_strategies_are_read_in_the_words_that_users_bring_and_stored_by_torchs_name(
    word: object, strategy: ShardingStrategy
) -> None:
    assert S(word) is strategy
    stored = to_builtins(TrainSetup(strategy=S(word), world_size=8))["strategy"]
    assert stored == strategy.value
    assert stored in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def test_an_unknown_strategy_names_what_is_allowed_and_the_nearest() -> None:
    with pytest.raises(SpecError) as caught:
        S("FULL_SHRD")
    assert str(caught.value) == (
        "strategy: 'FULL_SHRD' is not allowed; one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, "
        "_HYBRID_SHARD_ZERO2, fsdp, zero3, zero2, shard-grad, ddp, hsdp, hybrid-shard-zero2, 1, 2, 3, 4, 5"
        " (did you mean 'FULL_SHARD'?)"
    )


@pytest.mark.parametrize(
    ("name", "triple"),
    [
        ("fp32", ("fp32", "fp32", "fp32")),
        ("bf16-mixed", ("fp32", "bf16", "fp32")),
        ("bf16_mixed", ("fp32", "bf16", "fp32")),
        ("BF16-mixed-bf16-reduce", ("fp32", "bf16", "bf16")),
        ("fp16-mixed", ("fp32", "fp16", "fp32")),
        ("bf16-true", ("bf16", "bf16", "bf16")),
        ("bf16/fp32/fp16", ("bf16", "fp32", "fp16")),
    ],
)
def test_precisions_are_triples_with_names(name: str, triple: tuple[str, str, str]) -> None:
    precision = Precision.parse(name)
    assert (precision.store, precision.compute, precision.reduce) == triple


def test_a_named_triple_is_its_name() -> None:
    assert Precision.parse("fp32/bf16/fp32") == Precision.parse("bf16-mixed")
    assert str(Precision.parse("fp32/bf16/fp32")) == "bf16-mixed"


@pytest.mark.parametrize("word", ["bf17", "int8/bf16/fp32", "fp32/fp32"])
def test_an_unknown_precision_names_the_known_ones(word: str) -> None:
    with pytest.raises(SpecError, match=r"precision: .* not allowed; one of"):
        Precision.parse(word)


setups = st.builds(
    TrainSetup,
    strategy=st.sampled_from([S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD, S.HYBRID_SHARD]),
    api=st.sampled_from(list(Api)),
    precision=st.builds(Precision, *[st.sampled_from(["fp32", "bf16", "fp16"])] * 3),
    offload=st.sampled_from(list(Offload)),
    world_size=st.integers(1, 4096),
    micro_batch_size=st.integers(1, 64),
    sequence_length=st.integers(1, 10**6),
    max_grad_norm=st.none() | st.floats(0.1, 10),
)


@given(setups)
def test_a_setup_survives_json(setup: TrainSetup) -> None:
    assert from_json(to_json(setup), TrainSetup) == setup


@given(setups)
def test_a_setup_can_be_copied_and_pickled(setup: TrainSetup) -> None:
    assert copy.deepcopy(setup) == pickle.loads(pickle.dumps(setup)) == setup


@given(setups)
def test_the_shard_group_divides_the_world_or_the_setup_is_impossible(setup: TrainSetup) -> None:
    if impossible(setup, "cuda") is None:
        assert setup.world_size % setup.shard_group_size == 0


def test_fsdp1_in_a_world_of_one_is_no_shard_and_fsdp2_is_not() -> None:
    assert TrainSetup(api=Api.FSDP1).effective_strategy is S.NO_SHARD
    assert TrainSetup(api=Api.FSDP2).effective_strategy is S.FULL_SHARD
    assert TrainSetup(api=Api.FSDP1, world_size=2).effective_strategy is S.FULL_SHARD


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"world_size": 0}, "world_size: 0"),
        ({"micro_batch_size": -1}, "micro_batch_size: -1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm: 0.0"),
        ({"learning_rate": -1.0}, "learning_rate: -1.0"),
        ({"world_size": 8, "shard_size": 4}, "shard_size: only HYBRID_SHARD"),
        ({"world_size": 8, "shard_size": 3, "strategy": S.HYBRID_SHARD}, "shard_size: 3 is not allowed; a divisor"),
    ],
)
def test_values_out_of_range_name_the_field_the_value_and_what_is_allowed(fields: dict[str, object], part: str) -> None:
    with pytest.raises(SpecError, match=r"is not allowed|only HYBRID") as caught:
        TrainSetup(**fields)  # type: ignore[arg-type]
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("setup", "device", "part"),
    [
        (TrainSetup(offload=Offload.PARAMS), "cpu", "needs an accelerator"),
        (TrainSetup(offload=Offload.PARAMS, gradient_accumulation_steps=8), "cuda", "--no-sync"),
        (TrainSetup(offload=Offload.PARAMS, api=Api.FSDP2, strategy=S.NO_SHARD), "cuda", "no CPU offload"),
        (TrainSetup(strategy=S.HYBRID_SHARD, world_size=2), "cuda", "use 4 or more ranks"),
        (TrainSetup(strategy=S.HYBRID_SHARD, world_size=8, shard_size=8), "cuda", "at least 2 groups"),
        (TrainSetup(api=Api.FSDP2, limit_all_gathers=False), "cuda", "needs fsdp1"),
        (TrainSetup(api=Api.FSDP2, use_orig_params=False), "cuda", "needs fsdp1"),
        (TrainSetup(precision=Precision("fp16", "fp16", "fp16")), "cuda", "fp16-mixed"),
        (
            TrainSetup(api=Api.FSDP2, strategy=S.NO_SHARD, world_size=2, precision=Precision("bf16", "bf16", "fp32")),
            "cuda",
            "use fsdp1",
        ),
        (
            TrainSetup(api=Api.FSDP2, strategy=S.NO_SHARD, world_size=2, precision=Precision("fp32", "bf16", "bf16")),
            "cpu",
            "needs NCCL",
        ),
    ],
)
def test_an_impossible_setup_has_a_reason_and_a_way_out(setup: TrainSetup, device: str, part: str) -> None:
    assert part in (impossible(setup, device) or "")


RESHARDED: dict[str, Any] = {"api": Api.FSDP2, "world_size": 8, "reshard_after_forward": 4}
ENDS = {"wrap": Wrap.BLOCK_AND_ENDS}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (RESHARDED | {"api": Api.FSDP1}, "needs fsdp2"),
        (RESHARDED | {"strategy": S.SHARD_GRAD_OP}, "not SHARD_GRAD_OP's"),
        (RESHARDED | {"strategy": S.HYBRID_SHARD}, "not HYBRID_SHARD's"),
        (RESHARDED | {"reshard_after_forward": 3}, "3 is not allowed with world_size 8; one of 2, 4"),
        (RESHARDED | {"reshard_after_forward": 8}, "8 is not allowed with world_size 8; one of 2, 4"),
        (RESHARDED | {"world_size": 7}, "4 is not allowed with world_size 7; no number is"),
        (RESHARDED | {"wrap": Wrap.NONE}, "the root is the only unit"),
        ({"reshard_last_block": False}, "needs fsdp2"),
        ({"reshard_last_block": False, "api": Api.FSDP2, "strategy": S.SHARD_GRAD_OP}, "changes nothing"),
        ({"reshard_last_block": False, "api": Api.FSDP2, "wrap": Wrap.SIZE}, "wrap = block or block-and-ends"),
        ({"fp32_head": True, "precision": Precision.parse("bf16")}, "wrap = block-and-ends"),
        ({"fp32_head": True, **ENDS}, "with fp32 the head computes in fp32 as it is"),
        (
            {"fp32_head": True, "precision": Precision.parse("bf16"), "api": Api.FSDP2, "strategy": S.NO_SHARD, **ENDS},
            "has no units",
        ),
    ],
)
def test_resharding_and_the_heads_precision_are_refused_where_they_mean_nothing(
    fields: dict[str, Any], part: str
) -> None:
    reason = impossible(TrainSetup(**fields), "cuda") or ""
    assert part in reason
    assert "\n" not in reason


def test_a_possible_setup_is_not_refused() -> None:
    assert impossible(TrainSetup(**RESHARDED, reshard_last_block=False, **ENDS), "cuda") is None
    assert impossible(TrainSetup(offload=Offload.PARAMS), "cuda") is None
    assert impossible(TrainSetup(offload=Offload.PARAMS, api=Api.FSDP2), "cpu") is None
    assert impossible(TrainSetup(strategy=S.HYBRID_SHARD, world_size=4), "cpu") is None
