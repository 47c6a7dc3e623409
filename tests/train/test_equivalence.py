"""Sharded training is training: every strategy and api gives the loss and parameters of one process.

The reference is written without fsdp_bench's training loop: the bare model, the global batch, torch's optimizer.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import (
    Api,
    BackwardPrefetch,
    Checkpointing,
    Loss,
    Offload,
    OptimizerKind,
    Precision,
    ShardingStrategy,
    TrainSetup,
    Wrap,
)
from fsdp_bench.train.data import batches
from fsdp_bench.train.loss import loss_function
from fsdp_bench.train.meters import CpuMeter
from fsdp_bench.train.optimizer import build_optimizer
from fsdp_bench.train.step import Training, build_scaler, train_step
from fsdp_bench.train.transformer import BLOCKS, build, initialize
from fsdp_bench.train.wrap import ShardsNothingWarning, fsdp
from tests.train.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")

STEPS = 3
TOLERANCE = 1e-5
GLOBAL_BATCH = 4
S = ShardingStrategy

LLAMA = ModelShape(
    name="llama",
    family=Family.LLAMA,
    num_hidden_layers=2,
    hidden_size=36,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=50,
    vocab_size=67,  # odd sizes, so that shards are padded
    max_position_embeddings=32,
)
GPT2 = ModelShape(
    name="gpt2",
    family=Family.GPT2,
    num_hidden_layers=2,
    hidden_size=36,
    num_attention_heads=6,
    num_key_value_heads=6,
    intermediate_size=144,
    vocab_size=67,
    max_position_embeddings=32,
    tie_word_embeddings=True,
)
SHAPES = {Family.LLAMA: LLAMA, Family.GPT2: GPT2}

# AdamW divides a gradient by its own size, so that a gradient which is zero in theory (the bias of gpt2's keys, to
# which the softmax is blind) becomes a step of the learning rate in a direction that rounding decides. gpt2 is
# therefore compared under SGD. AdamW is compared on llama, where every gradient is far above the rounding.
ADAMW = {"optimizer": OptimizerKind.ADAMW_FOREACH, "learning_rate": 1e-3}
SGD = {"optimizer": OptimizerKind.SGD, "learning_rate": 0.1}


def setup_of(world_size: int, **fields: Any) -> TrainSetup:
    accumulate = fields.get("gradient_accumulation_steps", 1)
    fields = {"sequence_length": 12, "seed": 7, **ADAMW, **fields}
    return TrainSetup(world_size=world_size, micro_batch_size=GLOBAL_BATCH // world_size // accumulate, **fields)


TWO = [(api, strategy) for api in Api for strategy in (S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD)]
FOUR = [(api, strategy) for api in Api for strategy in (S.HYBRID_SHARD, S.HYBRID_SHARD_ZERO2)]
VARIANTS: dict[str, dict[str, Any]] = {
    "full checkpointing": {"checkpointing": Checkpointing.FULL},
    "selective checkpointing": {"checkpointing": Checkpointing.SELECTIVE},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation without synchronisation": {"gradient_accumulation_steps": 2, "sync_every_micro_batch": False},
    "clipping": {"max_grad_norm": 0.05, **SGD},
    "chunked loss": {"loss": Loss.CHUNKED},
    "prefetching forward, not backward": {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.NONE},
    "units by size": {"wrap": Wrap.SIZE, "min_num_params": 4000},
    "one unit": {"wrap": Wrap.NONE},
    "fused AdamW": {"optimizer": OptimizerKind.ADAMW_FUSED},
    "AdamW in a loop": {"optimizer": OptimizerKind.ADAMW_FOR_LOOP},
}
FSDP1_ONLY: dict[str, dict[str, Any]] = {
    "flat parameters": {"use_orig_params": False},
    "BACKWARD_POST": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "no limiter": {"limit_all_gathers": False},
}
FSDP2_ONLY: dict[str, dict[str, Any]] = {"offload": {"offload": Offload.PARAMS}}


def two_rank_cases() -> dict[str, tuple[Family, TrainSetup]]:
    cases = {}
    for api, strategy in TWO:
        name = f"{api.value} {strategy.value}"
        cases[f"llama {name}"] = (Family.LLAMA, setup_of(2, api=api, strategy=strategy))
        cases[f"gpt2 {name}"] = (Family.GPT2, setup_of(2, api=api, strategy=strategy, **SGD))
        accumulated = setup_of(2, api=api, strategy=strategy, **VARIANTS["accumulation without synchronisation"])
        cases[f"llama {name} no_sync"] = (Family.LLAMA, accumulated)
        cases[f"llama {name} clipped"] = (Family.LLAMA, setup_of(2, api=api, strategy=strategy, **VARIANTS["clipping"]))
    for api, extra in ((Api.FSDP1, FSDP1_ONLY), (Api.FSDP2, FSDP2_ONLY)):
        for name, fields in (VARIANTS | extra).items():
            cases[f"llama {api.value} {name}"] = (Family.LLAMA, setup_of(2, api=api, **fields))
    for api in Api:
        by_size = setup_of(2, api=api, **VARIANTS["units by size"] | SGD)
        cases[f"gpt2 {api.value} tied head, units by size"] = (Family.GPT2, by_size)
    return cases


def four_rank_cases() -> dict[str, tuple[Family, TrainSetup]]:
    cases = {}
    for api, strategy in FOUR:
        name = f"{api.value} {strategy.value}"
        cases[f"llama {name}"] = (Family.LLAMA, setup_of(4, api=api, strategy=strategy))
        cases[f"gpt2 {name}"] = (Family.GPT2, setup_of(4, api=api, strategy=strategy, **SGD))
    for api in Api:
        cases[f"llama {api.value} FULL_SHARD on four"] = (Family.LLAMA, setup_of(4, api=api))
    return cases


CASES = {2: two_rank_cases(), 4: four_rank_cases()}
WORLD_OF = {name: world for world, cases in CASES.items() for name in cases}

Trained = tuple[list[float], dict[str, torch.Tensor]]


def bare_name(name: str) -> str:
    """Undo the prefixes that wrappers add to a parameter's name."""
    for prefix in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(prefix, "")
    return name.removeprefix("module.")


def whole_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {bare_name(name): p.detach().clone().float() for name, p in model.named_parameters()}
    return {
        bare_name(name): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone().float()
        for name, p in model.named_parameters()
    }


def train_sharded(family: Family, setup: TrainSetup, steps: int = STEPS) -> Trained:
    """Train on this rank as a worker does; return the mean loss over ranks of each step, and all parameters."""
    import warnings

    warnings.simplefilter("ignore", ShardsNothingWarning)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shape = SHAPES[family]
    model = fsdp(
        build(shape),
        setup=setup,
        TransformerBlock=BLOCKS[family],
        device=torch.device("cpu"),
        initialize=partial(initialize, seed=setup.seed),
    )
    meter = CpuMeter(None, compiled=True)
    training = Training(
        model=model,
        optimizer=build_optimizer(model.parameters(), setup.optimizer, setup.learning_rate),
        loss_function=loss_function(setup.loss),
        setup=setup,
        device=torch.device("cpu"),
        meter=meter,
        scaler=build_scaler(setup, torch.device("cpu")),
    )
    losses = []
    for micro_batches in batches(setup, shape.vocab_size, steps, rank, world):
        loss = train_step(training, micro_batches)
        torch.distributed.all_reduce(loss)
        losses.append(float(loss) / world)
    return losses, whole_parameters(model)


def train_cases(cases: dict[str, tuple[Family, TrainSetup]]) -> dict[str, Trained | str]:
    """Train every case on this rank; a case that raises gives its message, for its own test to show."""
    trained: dict[str, Trained | str] = {}
    for name, (family, setup) in cases.items():
        trained[name] = train_sharded(family, setup)
    return trained


def train_alone(family: Family, setup: TrainSetup, steps: int = STEPS) -> Trained:
    """Train in one process on the global batch, by plain PyTorch."""
    shape = SHAPES[family]
    model = build(shape)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        initialize(parameter, name, setup.seed)
    if setup.optimizer is OptimizerKind.SGD:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate)
    alone = msgspec.structs.replace(
        setup, world_size=1, strategy=S.NO_SHARD, micro_batch_size=GLOBAL_BATCH, gradient_accumulation_steps=1
    )
    losses = []
    for (tokens,) in batches(alone, shape.vocab_size, steps, 0, 1):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if setup.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), setup.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Every case, trained once: all of a world's cases on one set of ranks."""
    results: dict[str, Trained] = {}
    for world, cases in CASES.items():
        results |= run_ranks(world, tmp_path_factory.mktemp("ranks"), train_cases, cases)[0]
    return results


@pytest.mark.parametrize("name", list(WORLD_OF))
def test_three_steps_are_those_of_one_process_with_the_global_batch(name: str, trained: dict[str, Trained]) -> None:
    losses, parameters = trained[name]
    expected_losses, expected = train_alone(*CASES[WORLD_OF[name]][name])
    assert losses == pytest.approx(expected_losses, abs=TOLERANCE)
    assert set(parameters) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(parameters[key], value, atol=TOLERANCE, rtol=0, msg=lambda m, key=key: f"{key}: {m}")


def test_three_steps_move_the_parameters_far_beyond_the_tolerance() -> None:
    """The comparison above could not fail if nothing were trained."""
    setup = setup_of(2)
    _, start = train_alone(Family.LLAMA, setup, steps=0)
    _, end = train_alone(Family.LLAMA, setup)
    assert all((start[key] - end[key]).abs().max() > 100 * TOLERANCE for key in start)


BF16 = Precision.parse("bf16-mixed")
BF16_CASES = {
    world: {
        f"{api.value} {strategy.value}": (
            Family.LLAMA,
            setup_of(world, api=api, strategy=strategy, precision=BF16, **SGD),
        )
        for api, strategy in pairs
    }
    for world, pairs in ((2, TWO), (4, FOUR))
}


def bf16_tolerance() -> float:
    """Derive the relative error that three SGD steps may have in bf16-mixed.

    SGD's update is the learning rate times the gradient, so the relative error of the whole update is that of the
    gradient. A rounding to bf16 (8 significant bits) is wrong by at most u = 2^-8, and on average by nothing. Forward
    and backward pass through at most 2 x (9 per block x 2 blocks + 4 around them) = 44 rounded operators in a row,
    from the embedding to the logits and back. Independent roundings add up as a random walk: sqrt(44) u = 2.6 %.
    The vector norm averages over parameters; a factor 2 covers what is not independent (the parameters themselves
    are rounded once a step, identically everywhere).
    """
    return 2 * 44**0.5 * 2**-8


def relative_error(parameters: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], start: Any) -> float:
    """Return |update - expected update| / |expected update| over all parameters."""
    wrong = sum(float((parameters[key] - expected[key]).double().square().sum()) for key in expected)
    moved = sum(float((expected[key] - start[key]).double().square().sum()) for key in expected)
    return float((wrong / moved) ** 0.5)


@pytest.fixture(scope="module")
def trained_bf16(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    results: dict[str, Trained] = {}
    for world, cases in BF16_CASES.items():
        results |= run_ranks(world, tmp_path_factory.mktemp("ranks"), train_cases, cases)[0]
    return results


@pytest.mark.parametrize("name", [name for cases in BF16_CASES.values() for name in cases])
def test_bf16_mixed_is_fp32_up_to_the_roundings_of_bf16(name: str, trained_bf16: dict[str, Trained]) -> None:
    losses, parameters = trained_bf16[name]
    setup = setup_of(2, **SGD)
    _, start = train_alone(Family.LLAMA, setup, steps=0)
    expected_losses, expected = train_alone(Family.LLAMA, setup)
    error = relative_error(parameters, expected, start)
    print(f"{name}: relative error of the update {error:.4f}, tolerance {bf16_tolerance():.4f}")
    assert 0 < error < bf16_tolerance()
    # The logits are rounded to bf16 and start near log(V): one rounding of a number below 1 for each target.
    assert losses == pytest.approx(expected_losses, rel=bf16_tolerance())


def test_the_bf16_tolerance_catches_gradients_that_are_summed_instead_of_averaged_or_of_one_rank_only() -> None:
    setup = setup_of(2, **SGD)
    _, start = train_alone(Family.LLAMA, setup, steps=0)
    _, expected = train_alone(Family.LLAMA, setup)
    _, summed = train_alone(Family.LLAMA, msgspec.structs.replace(setup, learning_rate=2 * setup.learning_rate))
    _, other_data = train_alone(Family.LLAMA, msgspec.structs.replace(setup, seed=8))
    assert relative_error(summed, expected, start) > 10 * bf16_tolerance()
    assert relative_error(other_data, expected, start) > 10 * bf16_tolerance()


def test_ranks_see_different_sequences_whose_union_is_the_global_batch_and_only_the_seed_decides() -> None:
    setup = setup_of(2)
    ranks = [list(batches(setup, 67, STEPS, rank, 2)) for rank in range(2)]
    alone = list(batches(msgspec.structs.replace(setup, world_size=1, micro_batch_size=GLOBAL_BATCH), 67, STEPS, 0, 1))
    for step in range(STEPS):
        rows = [tuple(row.tolist()) for rank in ranks for batch in rank[step] for row in batch]
        assert len(set(rows)) == GLOBAL_BATCH
        assert set(rows) == {tuple(row.tolist()) for row in alone[step][0]}
    again = list(batches(setup, 67, STEPS, 0, 2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(ranks[0], again, strict=True))
    other = next(batches(msgspec.structs.replace(setup, seed=8), 67, STEPS, 0, 2))
    assert not torch.equal(other[0], again[0][0])


FP16_CASES = {
    f"{api.value} {strategy.value}": (
        Family.LLAMA,
        setup_of(2, api=api, strategy=strategy, precision=Precision.parse("fp16-mixed"), **SGD),
    )
    for api, strategy in TWO
}


def train_with_one_overflow(cases: dict[str, tuple[Family, TrainSetup]]) -> dict[str, tuple[bool, Trained]]:
    """Train each case for one step in which only the last rank's gradients overflow; then report the parameters."""
    results = {}
    for name, (family, setup) in cases.items():
        results[name] = (torch.distributed.get_rank() == 1, _step_that_overflows(family, setup))
    return results


def _step_that_overflows(family: Family, setup: TrainSetup) -> Trained:
    import warnings

    warnings.simplefilter("ignore", ShardsNothingWarning)
    rank = torch.distributed.get_rank()
    device = torch.device("cpu")
    model = fsdp(
        build(SHAPES[family]),
        setup=setup,
        TransformerBlock=BLOCKS[family],
        device=device,
        initialize=partial(initialize, seed=setup.seed),
    )
    plain = loss_function(setup.loss)

    def overflowing(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return plain(logits, targets) * (float("inf") if rank == 1 else 1.0)

    training = Training(
        model=model,
        optimizer=build_optimizer(model.parameters(), setup.optimizer, setup.learning_rate),
        loss_function=overflowing,
        setup=setup,
        device=device,
        meter=CpuMeter(None, compiled=True),
        scaler=build_scaler(setup, device),
    )
    for micro_batches in batches(setup, SHAPES[family].vocab_size, 1, rank, 2):
        train_step(training, micro_batches)
    assert training.scaler is not None
    return [training.scaler.get_scale()], whole_parameters(model)


def test_fp16_trains_with_the_scaler(tmp_path: Path) -> None:
    for name, (losses, _) in run_ranks(2, tmp_path, train_cases, FP16_CASES)[0].items():
        expected, _ = train_alone(Family.LLAMA, setup_of(2, **SGD))
        assert losses == pytest.approx(expected, rel=1e-2), name


def test_an_overflow_on_one_rank_makes_every_rank_skip_the_step(tmp_path: Path) -> None:
    _, start = train_alone(Family.LLAMA, setup_of(2, **SGD), steps=0)
    for rank in run_ranks(2, tmp_path, train_with_one_overflow, FP16_CASES):
        for name, (_, (scale, parameters)) in rank.items():
            assert scale == [2.0**15], f"{name}: the scale was not halved"
            for key, value in parameters.items():
                assert torch.equal(value, start[key]), f"{name}: {key} moved"
