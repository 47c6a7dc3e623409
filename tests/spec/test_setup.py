"""The vocabulary: what is read, what is refused, what is stored."""

from itertools import product
from typing import Any

import pytest

from fsdp_bench.spec.codec import to_builtins
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


@pytest.mark.parametrize(
    ("name", "triple"),
    [
        ("fp32", ("fp32", "fp32", "fp32")),
        *((name, ("fp32", "bf16", "fp32")) for name in ("bf16-mixed", " BF16", "bf16_mixed", " fp32 / BF16/fp32")),
        ("fp16", ("fp32", "fp16", "fp32")),  # as in accelerate and Lightning
        ("BF16-mixed-bf16-reduce", ("fp32", "bf16", "bf16")),
        ("fp16-mixed", ("fp32", "fp16", "fp32")),
        ("bf16-true", ("bf16", "bf16", "bf16")),
        ("bf16/fp32/fp16", ("bf16", "fp32", "fp16")),
    ],
)
def test_precisions_are_triples_with_names(name: str, triple: tuple[str, str, str]) -> None:
    precision = TrainSetup(precision=name).precision  # type: ignore[arg-type]
    assert (precision.store, precision.compute, precision.reduce) == triple
    assert precision == Precision.parse(name) == Precision(*triple)
    assert str(precision) == ("bf16-mixed" if triple == ("fp32", "bf16", "fp32") else str(precision))


def test_the_shard_group_divides_the_world_or_the_setup_is_impossible() -> None:
    for world_size, strategy in product(range(1, 130), S):
        setup = TrainSetup(strategy=strategy, world_size=world_size)
        assert impossible(setup, "cuda") is not None or world_size % setup.shard_group_size == 0


def test_fsdp1_in_a_world_of_one_is_no_shard_and_fsdp2_is_not() -> None:
    assert TrainSetup(api=Api.FSDP1).effective_strategy is S.NO_SHARD
    assert TrainSetup(api=Api.FSDP2).effective_strategy is S.FULL_SHARD
    assert TrainSetup(api=Api.FSDP1, world_size=2).effective_strategy is S.FULL_SHARD


RESHARDED: dict[str, Any] = {"api": Api.FSDP2, "world_size": 8, "reshard_after_forward": 4}
ENDS = {"wrap": Wrap.BLOCK_AND_ENDS}
DDP: dict[str, Any] = {"api": Api.FSDP2, "strategy": S.NO_SHARD, "world_size": 2}
HYBRID: dict[str, Any] = {"strategy": S.HYBRID_SHARD}
FSDP2: dict[str, Any] = {"api": Api.FSDP2, "world_size": 2}
IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True, "world_size": 2}
OFFLOADED: dict[str, Any] = FSDP2 | {"offload": "optimizer"}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"offload": Offload.PARAMS, "device": "cpu"}, "needs an accelerator"),
        ({"offload": Offload.PARAMS, "gradient_accumulation_steps": 8}, "--no-sync"),
        ({"offload": Offload.PARAMS, **DDP}, "no CPU offload"),
        (HYBRID | {"world_size": 8, "shard_size": 8}, "at least 2 groups"),
        (HYBRID | {"world_size": 32, "shard_size": 32}, "32 ranks leaves one group; use a shard size of 16 or less"),
        (HYBRID | {"world_size": 32, "shard_size": 1}, "shard size 1 shards nothing; use a shard size of 2 to 16"),
        (HYBRID | {"world_size": 2}, "2 groups of at least 2 ranks, not world size 2; use 4 or more ranks"),
        (HYBRID | {"world_size": 9}, "9 ranks cannot be cut into groups of 4; use a shard size of 3 or less"),
        (HYBRID | {"world_size": 7}, "7 ranks cannot be cut into equal groups; use another world size"),
        ({"api": Api.FSDP2, "limit_all_gathers": False}, "needs fsdp1"),
        ({"api": Api.FSDP2, "use_orig_params": False}, "needs fsdp1"),
        ({"precision": "fp16/fp16/fp16"}, "fp16-mixed"),
        (DDP | {"precision": "bf16/bf16/fp32"}, "use fsdp1"),
        (DDP | {"precision": "fp32/bf16/bf16", "device": "cpu"}, "needs NCCL"),
        (RESHARDED | {"api": Api.FSDP1}, "needs fsdp2"),
        (RESHARDED | {"strategy": S.SHARD_GRAD_OP}, "not SHARD_GRAD_OP's"),
        (RESHARDED | HYBRID, "not HYBRID_SHARD's"),
        (RESHARDED | {"reshard_after_forward": 3}, "3 is not allowed with world_size 8; one of 2, 4"),
        (RESHARDED | {"reshard_after_forward": 8}, "8 is not allowed with world_size 8; one of 2, 4"),
        (RESHARDED | {"world_size": 7}, "4 is not allowed with world_size 7; no number is"),
        (RESHARDED | {"wrap": Wrap.NONE}, "the root is the only unit"),
        ({"reshard_last_block": False}, "needs fsdp2"),
        ({"reshard_last_block": False, "api": Api.FSDP2, "strategy": S.SHARD_GRAD_OP}, "changes nothing"),
        ({"reshard_last_block": False, "api": Api.FSDP2, "wrap": Wrap.SIZE}, "wrap = block or block-and-ends"),
        ({"fp32_head": True, "precision": "bf16"}, "wrap = block-and-ends"),
        ({"fp32_head": True, **ENDS}, "with fp32 the head computes in fp32 as it is"),
        ({"fp32_head": True, "precision": "bf16", **DDP, **ENDS}, "has no units"),
        ({"checkpointing_policy": "aten.mm"}, "use selective or full"),
        ({"activation_offload": True, "device": "cpu"}, "on a CPU"),
        ({"activation_offload": True, "compile": True}, "use one"),
        (FSDP2 | {"optimizer": "adafactor"}, "use fsdp1, or NO_SHARD"),
        ({"optimizer": "adamw-8bit", "offload": "params"}, "use adamw-fused"),
        ({"optimizer": "muon", "world_size": 2}, "use fsdp2, or NO_SHARD"),
        (IN_BACKWARD | {"gradient_accumulation_steps": 2}, "accumulate 1"),
        (IN_BACKWARD | {"max_grad_norm": 1.0}, "leave out max_grad_norm"),
        (IN_BACKWARD | {"precision": "fp16-mixed"}, "bf16-mixed"),
        (IN_BACKWARD | {"offload": "params"}, "use one of them"),
        (IN_BACKWARD | {"use_orig_params": False}, "use_orig_params = true"),
        (IN_BACKWARD | DDP, "a strategy that shards, or fsdp1"),
        (OFFLOADED | {"device": "cpu"}, "offload params under fsdp2"),
        (OFFLOADED | {"api": "fsdp1"}, "use api fsdp2"),
        (OFFLOADED | DDP, "a strategy that shards"),
        (OFFLOADED | {"optimizer": "sgd"}, "use adamw-fused"),
        (OFFLOADED | {"max_grad_norm": 1.0}, "leave out max_grad_norm"),
        (OFFLOADED | {"precision": "fp16-mixed"}, "use bf16-mixed"),
        ({"checkpointing": "selective", "checkpointing_policy": "every-2-blocks"}, "use checkpointing full"),
        ({"checkpointing": "full", "checkpointing_policy": "every-second-product"}, "use selective"),
    ],
)
def test_an_impossible_setup_has_a_reason_and_a_way_out_in_one_line(fields: dict[str, Any], part: str) -> None:
    device = fields.get("device", "cuda")
    reason = impossible(TrainSetup(**{k: v for k, v in fields.items() if k != "device"}), device) or ""
    assert part in reason
    assert "\n" not in reason


def test_a_possible_setup_is_not_refused() -> None:
    assert impossible(TrainSetup(**RESHARDED, reshard_last_block=False, **ENDS), "cuda") is None
    assert impossible(TrainSetup(offload=Offload.PARAMS), "cuda") is None
    assert impossible(TrainSetup(**DDP, optimizer="adafactor"), "cuda") is None
    assert impossible(TrainSetup(offload=Offload.PARAMS, api=Api.FSDP2), "cpu") is None
    assert impossible(TrainSetup(strategy=S.HYBRID_SHARD, world_size=4), "cpu") is None
    for checkpointing, policy in (("selective", "aten.mm"), ("full", "every-2-blocks")):
        assert impossible(TrainSetup(checkpointing=checkpointing, checkpointing_policy=policy), "cuda") is None


def test_a_policy_has_one_way_of_writing() -> None:
    """So that setups that are the same are equal, and trials of them have one ID."""
    setup = TrainSetup(checkpointing="selective", checkpointing_policy=" aten.SILU, aten.mm,aten::mm")
    assert setup.checkpointing_policy == "aten.mm,aten.silu"
    assert setup == TrainSetup(checkpointing="selective", checkpointing_policy="aten.mm,aten.silu")
    blocks = TrainSetup(checkpointing="full", checkpointing_policy="Every-02-Blocks")
    assert blocks.checkpointing_policy == "every-2-blocks"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("every-second-prodct", "did you mean 'every-second-product'"),
        ("aten.mm,aten.slu", "'aten.slu' is not allowed.*did you mean 'aten.silu'"),
        ("every-1-blocks", "K of 2 or more"),
        ("", "is not allowed"),
    ],
)
def test_an_unknown_policy_names_the_nearest(text: str, hint: str) -> None:
    with pytest.raises(SpecError, match=f"checkpointing_policy: .*{hint}"):
        TrainSetup(checkpointing="selective", checkpointing_policy=text)
