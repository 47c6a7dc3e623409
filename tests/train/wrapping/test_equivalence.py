"""Sharded training is training: every strategy and api gives the loss and parameters of one process.

The reference (training.train_alone) is written without fsdp_bench's training loop: the bare model, the global batch,
torch's optimizer. Expected values come from it alone.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.nn.functional as F

from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Api, BackwardPrefetch, Checkpointing, Loss, Offload, OptimizerKind, TrainSetup, Wrap
from fsdp_bench.train.models.transformer import batches
from tests.train.ranks import call_standing_ranks
from tests.train.training import (
    ADAMW,
    FOUR,
    GLOBAL_BATCH,
    LLAMA,
    SEQUENCE,
    SGD,
    STEPS,
    TWO,
    Parameters,
    S,
    plain_model,
    setup_of,
    train_alone,
    train_sharded,
)

TOLERANCE = 1e-5

CLIPPED: dict[str, Any] = {"max_grad_norm": 0.1}
NO_SYNC: dict[str, Any] = {"gradient_accumulation_steps": 2, "sync_every_micro_batch": False}
FULL: dict[str, Any] = {"checkpointing": Checkpointing.FULL}
ENDS: dict[str, Any] = {"wrap": Wrap.BLOCK_AND_ENDS}
LAST_BLOCK_STAYS: dict[str, Any] = {"reshard_last_block": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "full checkpointing": FULL,
    "selective checkpointing": {"checkpointing": Checkpointing.SELECTIVE},
    "every second product": {"checkpointing": Checkpointing.SELECTIVE, "checkpointing_policy": "every-second-product"},
    "named operators": {"checkpointing": Checkpointing.SELECTIVE, "checkpointing_policy": "aten.add,aten.mm,aten.mul"},
    "every second block": FULL | {"checkpointing_policy": "every-2-blocks"},
    "accumulation": {"gradient_accumulation_steps": 2},
    "chunked loss": {"loss": Loss.CHUNKED},
    "one unit": {"wrap": Wrap.NONE},
    "fused AdamW": {**ADAMW, "optimizer": OptimizerKind.ADAMW_FUSED},
    "AdamW in a loop": {**ADAMW, "optimizer": OptimizerKind.ADAMW_FOR_LOOP},
    "AdamW, clipped, accumulated, checkpointed, chunked": ADAMW | CLIPPED | NO_SYNC | FULL | {"loss": Loss.CHUNKED},
}
SHARDED_ONLY: dict[str, dict[str, Any]] = {
    "units by size": {"wrap": Wrap.SIZE, "min_num_params": 4000},
    "forward prefetch": {"forward_prefetch": True},
    "units of the ends": ENDS,
    "units of the ends, AdamW, clipped, no_sync, checkpointed": ENDS | ADAMW | CLIPPED | NO_SYNC | FULL,
    "prefetching forward, not backward": {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.NONE},
    "no prefetch": {"backward_prefetch": BackwardPrefetch.NONE},
    "optimizer in backward": {"optimizer_in_backward": True, "checkpointing": Checkpointing.FULL},
    "AdamW in backward": {**ADAMW, "optimizer_in_backward": True},
}
FSDP1_ONLY: dict[str, dict[str, Any]] = {
    "flat parameters": {"use_orig_params": False},
    "flat parameters, clipped, no_sync": {"use_orig_params": False} | CLIPPED | NO_SYNC,
    "BACKWARD_POST": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "no limiter": {"limit_all_gathers": False},
}
FSDP2_ONLY: dict[str, dict[str, Any]] = {
    "last block stays gathered": LAST_BLOCK_STAYS,
    "ends, last block stays gathered, forward prefetch": ENDS | LAST_BLOCK_STAYS | {"forward_prefetch": True},
    "offload": {"offload": Offload.PARAMS},
    "offload, AdamW, clipped, no_sync": {"offload": Offload.PARAMS} | ADAMW | CLIPPED | NO_SYNC,
}


class Case(NamedTuple):
    family: Family
    setup: TrainSetup
    is_quick: bool
    """Whether ``make test`` runs it: every strategy, variant and wrapper at least once; the others vary these."""


def every_strategy(world_size: int, pairs: list[tuple[Api, S]]) -> dict[str, Case]:
    """Both families and optimizers under every strategy, and what depends on how gradients are reduced."""
    cases = {}
    for api, strategy in pairs:
        for family, optimizer in product(Family, (SGD, ADAMW)):
            other = family is Family.GPT2 and optimizer is ADAMW and strategy in (S.FULL_SHARD, S.NO_SHARD)
            name = f"{family.value} {api.value} {strategy.value} {optimizer['optimizer'].value}"
            setup = setup_of(world_size, api=api, strategy=strategy, **optimizer)
            cases[name] = Case(family, setup, other or (family is Family.LLAMA and optimizer is SGD))
        for name, fields in (("no_sync", NO_SYNC), ("clipped", CLIPPED), ("full checkpointing", FULL)):
            setup = setup_of(world_size, api=api, strategy=strategy, **fields)
            clipped = fields is CLIPPED and api is Api.FSDP1 and strategy in (S.NO_SHARD, S.HYBRID_SHARD)
            cases[f"llama {api.value} {strategy.value} {name}"] = Case(
                Family.LLAMA, setup, fields is NO_SYNC or clipped
            )
    return cases


def variants() -> dict[str, Case]:
    """Each variant quick under one of both apis, what is combined under all wrappers."""
    cases = {}
    for api, extra in ((Api.FSDP1, FSDP1_ONLY), (Api.FSDP2, FSDP2_ONLY)):
        for number, (name, fields) in enumerate((VARIANTS | SHARDED_ONLY | extra).items()):
            is_quick = name in extra or "AdamW, clipped" in name or number % 2 == (api is Api.FSDP2)
            cases[f"llama {api.value} {name}"] = Case(Family.LLAMA, setup_of(2, api=api, **fields), is_quick)
        for name in ("full checkpointing", "selective checkpointing", "one unit"):
            cases[f"gpt2 {api.value} {name}"] = Case(Family.GPT2, setup_of(2, api=api, **VARIANTS[name]), False)
        by_size = setup_of(2, api=api, **SHARDED_ONLY["units by size"])
        cases[f"gpt2 {api.value} tied head, units by size"] = Case(Family.GPT2, by_size, api is Api.FSDP2)
    adafactor = {**ADAMW, "optimizer": OptimizerKind.ADAFACTOR}  # of whole matrices: a shard of one has no columns
    for name, api in (("FSDP1", Api.FSDP1), ("DDP", Api.FSDP2)):
        setup = setup_of(2, api=api, strategy=S.NO_SHARD, **adafactor)
        cases[f"llama {name} Adafactor unsharded"] = Case(Family.LLAMA, setup, True)
    for name, fields in VARIANTS.items():
        setup, is_quick = setup_of(2, api=Api.FSDP2, strategy=S.NO_SHARD, **fields), fields is FULL or "clipped" in name
        cases[f"llama DDP {name}"] = Case(Family.LLAMA, setup, is_quick)
    return cases


def on_four() -> dict[str, Case]:
    fields: dict[str, Any] = {"api": Api.FSDP2, "reshard_after_forward": 2}
    resharded = {
        "": {},
        ", AdamW, clipped, no_sync": ADAMW | CLIPPED | NO_SYNC,
        ", checkpointed, ends, last block stays gathered": FULL | ENDS | LAST_BLOCK_STAYS,
        ", by size": SHARDED_ONLY["units by size"],
    }
    return {
        f"{family.value} resharded to two of four ranks{name}": Case(
            family, setup_of(4, **fields, **more), "AdamW" in name or "checkpointed" in name
        )
        for name, more in resharded.items()
        for family in (Family if not name else [Family.LLAMA])
    } | {
        f"llama {api.value} {strategy.value} on four": Case(
            Family.LLAMA, setup_of(4, api=api, strategy=strategy), (api, strategy) == (Api.FSDP1, S.FULL_SHARD)
        )
        for api, strategy in TWO
    }


CASES = {2: every_strategy(2, TWO) | variants(), 4: every_strategy(4, FOUR) | on_four()}
NAMES = [
    pytest.param(world, name, id=name, marks=[pytest.mark.slow] * (not case.is_quick))
    for world, cases in CASES.items()
    for name, case in cases.items()
]


def without_the_bias_of_keys(parameters: Parameters) -> Parameters:
    """Leave out the part of gpt2's parameters whose gradient is rounding and nothing else; see the test below."""
    kept = dict(parameters)
    for name, value in parameters.items():
        if name.endswith("c_attn.bias"):
            query, _, values = value.chunk(3)
            kept[name] = torch.cat([query, values])
    return kept


def gradients_of_one_step(family: Family, dtype: torch.dtype) -> Parameters:
    model = plain_model(family).to(dtype)
    (tokens,) = next(batches(setup_of(1), 67, STEPS, 0, 1))
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_bias_of_gpt2s_keys_has_no_gradient_but_rounding() -> None:
    """A bias of the keys adds the same number to all scores of a query, and the softmax does not see it.

    So its gradient is zero in theory. AdamW divides a gradient by its own size and makes of this rounding steps of
    the learning rate, in directions that differ with the order of additions. Under AdamW it is not compared.
    """
    for dtype in (torch.float32, torch.float64):
        gradients = gradients_of_one_step(Family.GPT2, dtype)
        for name, value in gradients.items():
            if name.endswith("c_attn.bias"):
                query, key, values = value.chunk(3)
                assert key.abs().max() < 100 * torch.finfo(dtype).eps * values.abs().max()
                assert query.abs().max() > 1e4 * key.abs().max()


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_three_steps_are_those_of_one_process_with_the_global_batch(world: int, name: str) -> None:
    family, setup, _ = CASES[world][name]
    expected_losses, expected = train_alone(family, setup)
    if setup.optimizer is not OptimizerKind.SGD:
        expected = without_the_bias_of_keys(expected)
    for losses, parameters in call_standing_ranks(world, train_sharded, family, setup):
        assert losses == pytest.approx(expected_losses, abs=TOLERANCE)
        if setup.optimizer is not OptimizerKind.SGD:
            parameters = without_the_bias_of_keys(parameters)
        assert set(parameters) == set(expected)
        errors = {key: float((parameters[key] - expected[key]).abs().max()) for key in expected}
        print(f"largest error {max(errors.values()):.1e}")
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("family", list(Family))
def test_three_steps_move_every_parameter_far_beyond_the_tolerance(family: Family, optimizer: dict[str, Any]) -> None:
    """The comparison could not fail if nothing were trained."""
    setup = setup_of(2, **optimizer)
    _, start = train_alone(family, setup, steps=0)
    _, end = train_alone(family, setup)
    for key in start:
        assert (start[key] - end[key]).abs().max() > 40 * TOLERANCE, key


def test_clipping_changes_what_is_compared() -> None:
    _, free = train_alone(Family.LLAMA, setup_of(2))
    _, clipped = train_alone(Family.LLAMA, setup_of(2, **CLIPPED))
    assert all((free[key] - clipped[key]).abs().max() > 10 * TOLERANCE for key in free)


@pytest.mark.parametrize("fault", ["summed", "one rank's data"])
def test_the_comparison_catches_real_faults(fault: str) -> None:
    """Gradients summed over ranks instead of averaged; or every rank trains on the first rank's sequences."""
    _, expected = train_alone(Family.LLAMA, setup_of(2))
    for api, strategy in TWO:
        setup = setup_of(2, api=api, strategy=strategy)
        _, parameters = call_standing_ranks(2, train_sharded, Family.LLAMA, setup, fault)[0]
        for key in expected:
            assert (parameters[key] - expected[key]).abs().max() > 10 * TOLERANCE, (setup, key)


def sequences(setup: TrainSetup, rank: int, world_size: int) -> list[list[tuple[int, ...]]]:
    """Return each step's sequences of a rank, over all its micro-batches."""
    steps = batches(setup, LLAMA.vocab_size, STEPS, rank, world_size)
    return [[tuple(row.tolist()) for batch in step for row in batch] for step in steps]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_read_different_sequences_whose_union_is_the_global_batch(world: int, accumulate: int) -> None:
    setup = setup_of(world, gradient_accumulation_steps=accumulate)
    ranks = [sequences(setup, rank, world) for rank in range(world)]
    alone = sequences(setup_of(1), 0, 1)
    for step in range(STEPS):
        rows = [row for rank in ranks for row in rank[step]]
        assert len(set(rows)) == len(rows) == GLOBAL_BATCH  # no sequence twice, none missing
        assert set(rows) == set(alone[step])
        assert {len(row) for row in rows} == {SEQUENCE + 1}
    assert len({row for step in alone for row in step}) == STEPS * GLOBAL_BATCH  # no step repeats another
    shapes = [[tuple(batch.shape) for batch in step] for step in batches(setup, LLAMA.vocab_size, STEPS, 0, world)]
    assert shapes == [[(GLOBAL_BATCH // world // accumulate, SEQUENCE + 1)] * accumulate] * STEPS


def test_only_the_seed_decides_what_is_read() -> None:
    setup = setup_of(2)
    torch.manual_seed(1)
    once = sequences(setup, 0, 2)
    torch.manual_seed(2)
    assert sequences(setup, 0, 2) == once
    other = sequences(msgspec.structs.replace(setup, seed=setup.seed + 1), 0, 2)
    assert not {row for step in once for row in step} & {row for step in other for row in step}
