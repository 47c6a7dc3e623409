"""Sharded training is training: every strategy and api gives the loss and parameters of one process.

The reference (training.train_alone) is written without fsdp_bench's training loop: the bare model, the global batch,
torch's optimizer. Expected values come from it alone.
"""

from typing import Any

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
    GLOBAL_BATCH,
    LLAMA,
    SGD,
    STEPS,
    TWO,
    Case,
    Parameters,
    S,
    every_case,
    parametrized,
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
RESHARDED: dict[str, Any] = {"reshard_after_forward": 2}
BY_SIZE: dict[str, Any] = {"wrap": Wrap.SIZE, "min_num_params": 4000}
OFFLOAD: dict[str, Any] = {"offload": Offload.PARAMS}
SELECTIVE: dict[str, Any] = {"checkpointing": Checkpointing.SELECTIVE}
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "AdamW": ADAMW,
    "fused AdamW": {**ADAMW, "optimizer": OptimizerKind.ADAMW_FUSED},
    "AdamW in a loop": {**ADAMW, "optimizer": OptimizerKind.ADAMW_FOR_LOOP},
    # of whole matrices: a shard of one has no columns
    "Adafactor": {**ADAMW, "optimizer": OptimizerKind.ADAFACTOR, "strategy": S.NO_SHARD},
    "no_sync": NO_SYNC,
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipped": CLIPPED,
    "full checkpointing": FULL,
    "selective checkpointing": SELECTIVE,
    "every second product": SELECTIVE | {"checkpointing_policy": "every-second-product"},
    "named operators": SELECTIVE | {"checkpointing_policy": "aten.add,aten.mm,aten.mul"},
    "every second block": FULL | {"checkpointing_policy": "every-2-blocks"},
    "chunked loss": {"loss": Loss.CHUNKED},
    "AdamW, clipped, accumulated, checkpointed, chunked": ADAMW | CLIPPED | NO_SYNC | FULL | {"loss": Loss.CHUNKED},
    "one unit": {"wrap": Wrap.NONE},
    "units by size": BY_SIZE,
    "units of the ends": ENDS,
    "units of the ends, AdamW, clipped, no_sync, checkpointed": ENDS | ADAMW | CLIPPED | NO_SYNC | FULL,
    "forward prefetch": {"forward_prefetch": True},
    "prefetching forward, not backward": {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.NONE},
    "no prefetch": {"backward_prefetch": BackwardPrefetch.NONE},
    "BACKWARD_POST": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "no limiter": {"limit_all_gathers": False},
    "flat parameters": {"use_orig_params": False},
    "flat parameters, clipped, no_sync": {"use_orig_params": False} | CLIPPED | NO_SYNC,
    "optimizer in backward": FULL | {"optimizer_in_backward": True},
    "AdamW in backward": {**ADAMW, "optimizer_in_backward": True},
    "last block stays gathered": LAST_BLOCK_STAYS,
    "ends, last block stays gathered, forward prefetch": ENDS | LAST_BLOCK_STAYS | {"forward_prefetch": True},
    "offload": OFFLOAD,
    "offload, AdamW, clipped, no_sync": OFFLOAD | ADAMW | CLIPPED | NO_SYNC,
    "resharded": RESHARDED,
    "resharded, AdamW, clipped, no_sync": RESHARDED | ADAMW | CLIPPED | NO_SYNC,
    "resharded, checkpointed, ends, last block stays gathered": RESHARDED | FULL | ENDS | LAST_BLOCK_STAYS,
    "resharded, by size": RESHARDED | BY_SIZE,
}
OF_GPT2 = ("", "AdamW", "full checkpointing", "selective checkpointing", "one unit", "units by size", "resharded")
CASES = every_case(VARIANTS, everywhere=("", "no_sync"), of_gpt2=OF_GPT2, more=[(4, api, S.FULL_SHARD) for api in Api])


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


@parametrized(CASES)
def test_three_steps_are_those_of_one_process_with_the_global_batch(case: Case) -> None:
    family, setup, _ = case
    expected_losses, expected = train_alone(family, setup)
    if setup.optimizer is not OptimizerKind.SGD:
        expected = without_the_bias_of_keys(expected)
    for losses, parameters in call_standing_ranks(setup.world_size, train_sharded, family, setup):
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


def sequences(setup: TrainSetup) -> list[tuple[int, ...]]:
    """Return the sequences of rank 0 of two, over all steps."""
    steps = batches(setup, LLAMA.vocab_size, STEPS, 0, 2)
    return [tuple(row.tolist()) for step in steps for batch in step for row in batch]


def test_no_step_repeats_another_and_only_the_seed_decides_what_is_read() -> None:
    """That the ranks read the global batch together is part of the comparison above."""
    setup = setup_of(2)
    torch.manual_seed(1)
    once = sequences(setup)
    torch.manual_seed(2)
    assert sequences(setup) == once
    assert len(set(once)) == STEPS * GLOBAL_BATCH // 2
    assert not set(once) & set(sequences(msgspec.structs.replace(setup, seed=setup.seed + 1)))
