"""Training for tests: on ranks through fsdp_bench, and in one process through nothing but PyTorch."""

import warnings
from collections.abc import Collection, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import Api, OptimizerKind, ShardingStrategy, TrainSetup
from fsdp_bench.train.measuring.meters import build_meter
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.models.loss import LossFunction, loss_function
from fsdp_bench.train.models.transformer import BLOCKS, batches, build, initialize
from fsdp_bench.train.step import Training, prepared, train_step
from fsdp_bench.train.wrapping.wrap import ShardsNothingWarning, fsdp

STEPS = 3
GLOBAL_BATCH = 8
SEQUENCE = 12
SEED = 7
CPU = torch.device("cpu")

S = ShardingStrategy
TWO = [(api, strategy) for api in Api for strategy in (S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD)]
FOUR = [(api, strategy) for api in Api for strategy in (S.HYBRID_SHARD, S.HYBRID_SHARD_ZERO2)]
"""Every strategy of every api: those that two ranks can run, and those that need four."""
Wrappers = Sequence[tuple[int, Api, ShardingStrategy]]
ALL: Wrappers = [*((2, *pair) for pair in TWO), *((4, *pair) for pair in FOUR)]

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
GPT2 = msgspec.structs.replace(
    LLAMA, name="gpt2", family=Family.GPT2, num_key_value_heads=6, intermediate_size=144, tie_word_embeddings=True
)
SHAPES = {Family.LLAMA: LLAMA, Family.GPT2: GPT2}

SGD: dict[str, Any] = {"optimizer": OptimizerKind.SGD, "learning_rate": 1.0}
"""Its step is the gradient, so that it shows a gradient of the wrong size; the rate moves every parameter."""
ADAMW: dict[str, Any] = {"optimizer": OptimizerKind.ADAMW_FOREACH, "learning_rate": 1e-3}
"""The usual optimizer. It divides a gradient by its own size, and so is blind to a wrong factor."""

Parameters = dict[str, torch.Tensor]
Trained = tuple[list[float], Parameters]
"""The mean loss over ranks of each step; the whole parameters at the end."""


def setup_of(world_size: int, **fields: Any) -> TrainSetup:
    """Return a setup whose global batch is always the same."""
    accumulate = fields.get("gradient_accumulation_steps", 1)
    fields = {"sequence_length": SEQUENCE, "seed": SEED, **SGD, **fields}
    return TrainSetup(world_size=world_size, micro_batch_size=GLOBAL_BATCH // world_size // accumulate, **fields)


class Case(NamedTuple):
    """A model and its setup. ``make test`` runs the quick ones; the others vary these."""

    family: Family
    setup: TrainSetup
    is_quick: bool


Cases = dict[str, Case]


def every_case(
    variants: dict[str, dict[str, Any]],
    picks: int = 1,
    everywhere: Collection[str] = ("",),
    of_gpt2: Collection[str] = (),
    more: Wrappers = (),
) -> Cases:
    """Return each variant, which is fields of a setup, under every strategy of every api that can have it.

    Quick are those of ``everywhere``, and of the others so many picks that follow each other from variant to variant.
    """
    cases: Cases = {}
    for number, (name, fields) in enumerate(variants.items()):
        wrapped = ({"world_size": world, "api": api, "strategy": strategy} for world, api, strategy in (*ALL, *more))
        setups = dict.fromkeys(setup_of(**{**one, **fields}) for one in wrapped)
        possible = [setup for setup in setups if impossible(setup, "cpu") is None]
        step = max(len(possible) // picks, 1)
        for family in Family if name in of_gpt2 else [Family.LLAMA]:
            for index, setup in enumerate(possible):
                is_quick = index % step == number % step or (name in everywhere and family is Family.LLAMA)
                label = f"{family.value} {setup.api.value} {setup.strategy.value} on {setup.world_size} {name}"
                cases[label.strip()] = Case(family, setup, is_quick)
    return cases


def parametrized(cases: Cases) -> pytest.MarkDecorator:
    """Give a test each case as ``case``."""
    slow = pytest.mark.slow
    params = [pytest.param(case, id=name, marks=() if case.is_quick else slow) for name, case in cases.items()]
    return pytest.mark.parametrize("case", params)


def wrapped(family: Family, setup: TrainSetup) -> nn.Module:
    """Build and wrap as a worker does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardsNothingWarning)
        return fsdp(
            build(SHAPES[family], DTYPES[setup.precision.store]),
            setup=setup,
            TransformerBlock=BLOCKS[family],
            device=CPU,
            initialize=partial(initialize, seed=setup.seed),
        )


def training_of(family: Family, setup: TrainSetup, loss: LossFunction | None = None) -> Training:
    """Return everything that a worker trains with; nothing is metered."""
    meter = build_meter(CPU, None, compiled=True)
    return prepared(wrapped(family, setup), loss or loss_function(setup.loss), setup, CPU, meter)


def bare_name(name: str) -> str:
    """Undo the prefixes that wrappers add to a parameter's name."""
    for prefix in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(prefix, "")
    return name.removeprefix("module.")


def whole_parameters(model: nn.Module) -> Parameters:
    """Gather every parameter on every rank."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {bare_name(name): p.detach().clone().float() for name, p in model.named_parameters()}
    return {
        bare_name(name): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone().float()
        for name, p in model.named_parameters()
    }


def sum_instead_of_average(model: nn.Module) -> None:
    """Break a wrapped model: gradients are summed over ranks and never divided by their number."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            module._gradient_predivide_factor = module._gradient_postdivide_factor = 1.0
        elif isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        elif isinstance(module, DistributedDataParallel):

            def all_reduce(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
                work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
                return work.get_future().then(lambda done: done.value()[0])

            module.register_comm_hook(None, all_reduce)


def train_sharded(family: Family, setup: TrainSetup, fault: str = "") -> Trained:
    """Train on this rank as a worker does; ``fault`` is ``summed``, ``one rank's data`` or nothing."""
    training = training_of(family, setup)
    if fault == "summed":
        sum_instead_of_average(training.model)
    world = dist.get_world_size()
    rank = 0 if fault == "one rank's data" else dist.get_rank()
    losses = []
    for micro_batches in batches(setup, SHAPES[family].vocab_size, STEPS, rank, world):
        loss = train_step(training, micro_batches)
        dist.all_reduce(loss)
        losses.append(float(loss) / world)
    return losses, whole_parameters(training.model)


def plain_model(family: Family, seed: int = SEED) -> nn.Module:
    """Return the bare model on the CPU with its initial parameters."""
    model = build(SHAPES[family]).to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        initialize(parameter, name, seed)
    return model


def train_alone(family: Family, setup: TrainSetup, steps: int = STEPS) -> Trained:
    """Train in one process on the global batch, by plain PyTorch, in fp32."""
    return _train_alone(family, setup.optimizer, setup.learning_rate, setup.max_grad_norm, steps)


@cache
def _train_alone(family: Family, kind: OptimizerKind, rate: float, max_norm: float | None, steps: int) -> Trained:
    model = plain_model(family)
    if kind is OptimizerKind.SGD:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)
    elif kind is OptimizerKind.ADAFACTOR:
        optimizer = torch.optim.Adafactor(model.parameters(), lr=rate)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    losses = []
    for (tokens,) in batches(setup_of(1), SHAPES[family].vocab_size, STEPS, 0, 1):
        if len(losses) == steps:
            break
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def relative_error(parameters: Parameters, expected: Parameters, start: Parameters) -> float:
    """Return |update - expected update| / |expected update|, the norms over all parameters."""
    wrong = sum(float((parameters[key] - expected[key]).double().square().sum()) for key in expected)
    moved = sum(float((expected[key] - start[key]).double().square().sum()) for key in expected)
    return float((wrong / moved) ** 0.5)
