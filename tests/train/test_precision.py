"""Mixed precision: bf16 is fp32 up to its roundings, fp16 trains with the scaler. The reference is one fp32 process."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Api, Checkpointing, Precision, TrainSetup, Wrap
from fsdp_bench.train.models.loss import plain
from fsdp_bench.train.models.transformer import batches
from fsdp_bench.train.step import train_step
from tests.train.ranks import call_standing_ranks
from tests.train.training import (
    LLAMA,
    STEPS,
    TWO,
    Case,
    S,
    every_case,
    parametrized,
    plain_model,
    relative_error,
    setup_of,
    train_alone,
    train_sharded,
    training_of,
    whole_parameters,
)

BF16_UNIT_ROUNDOFF = 2.0**-8
"""bf16 has 8 significant bits: rounding to nearest changes a number by at most this part of it."""

ROUNDINGS_FORWARD = 2 * 13 + 3
"""Roundings in a row from the embedding to the logits, two blocks deep.

A llama block has 13: norm, projection, product with the cosine, rotated sum, attention, output projection, residual;
norm, gate, silu, product, down projection, residual. Around them are the embedding, the last norm and the head.
gpt2's blocks have fewer.
"""


def bf16_tolerance(more_roundings: int = 0) -> float:
    """Derive the error that three SGD steps may have in bf16-mixed, as a part of the whole update.

    1. An SGD step is the learning rate times the gradient. The parameters are kept in fp32 and so is the reduction,
       so the error of the update, as a part of it, is that of the gradients: |sum of errors| / |sum of gradients|.
    2. To a gradient lead at most 2 x ROUNDINGS_FORWARD = 58 roundings in a row, through forward and back again.
       Each changes its tensor by at most u = 2^-8 of its norm. The operators between them neither amplify nor damp
       a relative change of the norm, which is so near initialisation: the residual stream is the embedding and small
       additions, and norms keep relative changes.
    3. Roundings to nearest are wrong in either direction, without memory, so that the errors add up as a random walk
       does (Higham and Mary 2019, A New Approach to Probabilistic Rounding Error Analysis): sqrt(58) u = 3.0 %, and
       lambda times that with a probability that is overwhelming for lambda = 2 in a norm over thousands of values.

    That the bound is neither empty nor too wide is shown by the tests of faults below, which it must catch.
    """
    return 2 * (2 * ROUNDINGS_FORWARD + more_roundings) ** 0.5 * BF16_UNIT_ROUNDOFF


@cache
def bf16_loss_tolerance(family: Family) -> float:
    """Derive the absolute error of the mean loss: the cross-entropy of logits that are wrong by up to e is within 2e.

    (log-sum-exp moves by at most e, and so does the target's logit.) The logits are wrong by the roundings of forward
    as above: a random walk of ROUNDINGS_FORWARD steps of u times the largest logit. The largest logit is read from
    the plain fp32 model; two steps of training at most double it, which the factor 2 covers.
    """
    (tokens,) = next(batches(setup_of(1), LLAMA.vocab_size, STEPS, 0, 1))
    with torch.no_grad():
        largest = float(plain_model(family)(tokens[:, :-1]).abs().max())
    return 2 * 2 * ROUNDINGS_FORWARD**0.5 * BF16_UNIT_ROUNDOFF * largest


BF16: dict[str, Any] = {"precision": Precision.parse("bf16-mixed")}
BF16_CASES = every_case(
    {
        "": BF16,
        "head in fp32": BF16 | {"wrap": Wrap.BLOCK_AND_ENDS, "fp32_head": True},
        "full checkpointing": BF16 | {"checkpointing": Checkpointing.FULL},
        "selective checkpointing": BF16 | {"checkpointing": Checkpointing.SELECTIVE},
    },
    picks=2,
    of_gpt2=("",),
)


@parametrized(BF16_CASES)
def test_bf16_mixed_is_fp32_up_to_the_roundings_of_bf16(case: Case) -> None:
    family, setup, _ = case
    _, start = train_alone(family, setup, steps=0)
    expected_losses, expected = train_alone(family, setup)
    for losses, parameters in call_standing_ranks(setup.world_size, train_sharded, family, setup):
        error = relative_error(parameters, expected, start)
        off = max(abs(got - wanted) for got, wanted in zip(losses, expected_losses, strict=True))
        print(f"update {error:.4f} of {bf16_tolerance():.4f}, loss {off:.1e} of {bf16_loss_tolerance(family):.1e}")
        assert error < bf16_tolerance()
        assert off < bf16_loss_tolerance(family)
        assert error > 1e-4  # bf16 did run: fp32 is a hundred times nearer


def test_reduction_in_bf16_adds_its_own_roundings_and_no_more() -> None:
    """Two more in a row: the sum of two ranks' gradients, and the division by their number."""
    _, start = train_alone(Family.LLAMA, setup_of(2), steps=0)
    _, expected = train_alone(Family.LLAMA, setup_of(2))
    for api, strategy in TWO:
        if (api, strategy) != (Api.FSDP2, S.NO_SHARD):  # DDP's compression to bf16 needs NCCL, and is refused on a CPU
            setup = setup_of(2, api=api, strategy=strategy, precision=Precision.parse("bf16-mixed-bf16-reduce"))
            for _, parameters in call_standing_ranks(2, train_sharded, Family.LLAMA, setup):
                assert 1e-4 < relative_error(parameters, expected, start) < bf16_tolerance(more_roundings=2), setup


@pytest.mark.parametrize("fault", ["summed", "one rank's data"])
def test_the_bf16_tolerance_catches_real_faults(fault: str) -> None:
    """Gradients that are summed are wrong by their own size; those of half of the data by about as much."""
    _, start = train_alone(Family.LLAMA, setup_of(2), steps=0)
    _, expected = train_alone(Family.LLAMA, setup_of(2))
    for api, strategy in TWO:
        setup = setup_of(2, api=api, strategy=strategy, **BF16)
        _, parameters = call_standing_ranks(2, train_sharded, Family.LLAMA, setup, fault)[0]
        assert relative_error(parameters, expected, start) > 5 * bf16_tolerance(), setup


fp16_cases = parametrized(every_case({"fp16": {"precision": Precision.parse("fp16-mixed")}}, picks=5))
FIRST_SCALE = 2.0**16
"""torch.amp.GradScaler's initial scale, which an overflow halves."""


def overflow_then_train(family: Family, setup: TrainSetup) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Run one step in which the last rank's gradients alone overflow, and then one in which none does."""
    last = dist.get_world_size() - 1

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        overflows = dist.get_rank() == last and not scales
        return plain(logits, targets) * (float("inf") if overflows else 1.0)

    training = training_of(family, setup, loss)
    scales: list[float] = []
    parameters = [whole_parameters(training.model)]
    for micro_batches in batches(setup, LLAMA.vocab_size, 2, dist.get_rank(), dist.get_world_size()):
        train_step(training, micro_batches)
        scales.append(training.scaler.get_scale())
        parameters.append(whole_parameters(training.model))
    return scales, parameters


@fp16_cases
def test_fp16_trains_with_the_scaler(case: Case) -> None:
    """fp16's unit roundoff is 2^-11, an eighth of bf16's, so that bf16's tolerances hold with room to spare."""
    _, start = train_alone(Family.LLAMA, setup_of(2), steps=0)
    expected_losses, expected = train_alone(Family.LLAMA, setup_of(2))
    for losses, parameters in call_standing_ranks(case.setup.world_size, train_sharded, Family.LLAMA, case.setup):
        error = relative_error(parameters, expected, start)
        print(f"update {error:.5f} of {bf16_tolerance() / 8:.5f}")
        assert 0 < error < bf16_tolerance() / 8
        assert losses == pytest.approx(expected_losses, abs=bf16_loss_tolerance(Family.LLAMA) / 8)


@fp16_cases
def test_an_overflow_on_one_rank_makes_every_rank_skip_the_step(case: Case) -> None:
    after_both = []
    ranks = call_standing_ranks(case.setup.world_size, overflow_then_train, Family.LLAMA, case.setup)
    for scales, (start, skipped, trained) in ranks:
        assert scales == [FIRST_SCALE / 2, FIRST_SCALE / 2]
        assert all(torch.equal(start[key], skipped[key]) for key in start)
        assert not any(torch.equal(start[key], trained[key]) for key in start)
        after_both.append(trained)
    for other in after_both[1:]:
        assert all(torch.equal(after_both[0][key], other[key]) for key in other)
