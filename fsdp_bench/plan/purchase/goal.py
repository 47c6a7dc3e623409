"""Goal: what is asked for and what is left open; and all combinations of settings that a plan tries."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from fsdp_bench.plan.defaults import trained_code, trainer_defaults
from fsdp_bench.simulate.optimizers.torch_optim import why_optimizer_is_not_predicted
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.calibration_profile import Scaling
from fsdp_bench.spec.checkpointing_policy import EVERY_SECOND_PRODUCT
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.price import StatedPrice, Tariff, parse_price
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.recording.own_loss import why_not_replaced
from fsdp_bench.spec.setup import Api, Checkpointing, Loss, Offload, ShardingStrategy, TrainSetup
from fsdp_bench.spec.units import parse_bytes, parse_count

SECONDS_PER_DAY = 86_400

_TIME = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(h|hour|hours|d|day|days|w|week|weeks)\s*$", re.IGNORECASE)
_SECONDS = {"h": 3600, "d": SECONDS_PER_DAY, "w": 7 * SECONDS_PER_DAY}
_TOKENS = re.compile(r"[-\s]*tokens?\s*$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The tokens to train on, the deadline, the budget, and the prices that count."""

    tokens: int | None = None
    """Tokens to train on. None: only the speed is asked for."""
    deadline_seconds: float | None = None
    budget: float | None = None
    global_batch_tokens: int | None = None
    """Tokens of one optimizer step on all GPUs. None: one micro-batch on each, or as many as a script takes."""
    tariff: Tariff = Tariff.ON_DEMAND
    stated_price: StatedPrice | None = None
    """A price for all servers, instead of the catalogue's."""
    headroom_bytes: int | None = None
    """Memory kept free on each GPU, instead of what headroom.py derives and assumes."""

    def __post_init__(self) -> None:
        if self.tokens is None and (self.deadline_seconds is not None or self.budget is not None):
            raise SpecError("deadline and budget need --tokens: how many tokens to train on")


@dataclass(frozen=True)
class Goal(Terms):
    """The goal of a plan for a model."""

    model: Model
    other: Model | None = None
    """The same model in other code, whose time and price on the winner's servers are said beside."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields of TrainSetup that the user states, precision and sequence length among them."""
    open: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields of TrainSetup of which the user states several values."""
    calibration: Scaling | None = None
    """Changes of the datasheet's rates by a run or a host."""


def parse_duration(text: str) -> float:
    """Read ``30d``, ``12h`` or ``6 weeks``; return seconds. Raises SpecError for anything else."""
    match = _TIME.match(text)
    if match is None or float(match[1]) <= 0:
        raise SpecError(f"deadline: {shown(text)} is not allowed; write it like '30d', '12h' or '6 weeks'")
    return float(match[1]) * _SECONDS[match[2][0].lower()]


def parse_money(text: str) -> float:
    """Read ``200k``, ``1.5M`` or ``$90000``. Raises SpecError for anything else."""
    try:
        return float(parse_count(text.strip().lstrip("$").strip(), "budget"))
    except SpecError:
        raise SpecError(f"budget: {shown(text)} is not allowed; write it like '200k' or '90000'") from None


def parse_tokens(text: str, option: str) -> int:
    """Read ``1T``, ``300B`` or ``4M-tokens``. Raises SpecError for anything else."""
    try:
        return parse_count(_TOKENS.sub("", text), option)
    except SpecError:
        raise SpecError(f"{option}: {shown(text)} is not allowed; write it like '1T', '300B' or '4M'") from None


TERMS = ("tokens", "deadline", "budget", "global_batch", "price", "tariff", "headroom")
"""The arguments of ``read_terms``."""


def read_terms(
    tokens: str | int | None = None,
    deadline: str | None = None,
    budget: str | float | None = None,
    global_batch: str | int | None = None,
    price: str | None = None,
    tariff: Tariff | str | None = None,
    headroom: str | int | None = None,
) -> Terms:
    """Read the terms as a user writes them. Raises SpecError for bad values, and for a price beside a tariff."""
    if price is not None and tariff is not None:
        raise SpecError("price: is stated for all servers; --tariff chooses among the catalogue's prices; keep one")
    return Terms(
        tokens=None if tokens is None else parse_tokens(str(tokens), "tokens"),
        deadline_seconds=None if deadline is None else parse_duration(deadline),
        budget=None if budget is None else parse_money(str(budget)),
        global_batch_tokens=None if global_batch is None else parse_tokens(str(global_batch), "global-batch"),
        tariff=Tariff.ON_DEMAND if tariff is None else Tariff(tariff),
        stated_price=None if price is None else parse_price(price),
        headroom_bytes=None if headroom is None else parse_bytes(str(headroom), "headroom"),
    )


MOST_SEQUENCES = 64
"""The largest micro-batch that is tried."""
TOLERANCE = 0.1
"""The largest distance of the global batch from the one asked for, where it is no multiple of the micro-batches."""


class Setting(NamedTuple):
    """The fields of a setup that are the same on every number of GPUs, but for the micro-batch."""

    strategy: ShardingStrategy
    api: Api
    checkpointing: Checkpointing
    checkpointing_policy: str | None
    loss: Loss
    offload: Offload


def setting_of(setup: TrainSetup) -> Setting:
    """Return the setting of a setup."""
    return Setting(*(getattr(setup, name) for name in Setting._fields))


_STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.NO_SHARD,
)
_CHECKPOINTING = (
    (Checkpointing.NONE, None),
    (Checkpointing.SELECTIVE, EVERY_SECOND_PRODUCT),
    (Checkpointing.FULL, None),
)


def settings(goal: Goal) -> list[Setting]:
    """Return all settings that the user leaves open, the usual ones first."""

    def choices(field: str, usual: tuple[Any, ...]) -> tuple[Any, ...]:
        if field in goal.open:
            return goal.open[field]
        return (goal.fixed[field],) if field in goal.fixed else usual

    kinds: tuple[tuple[Checkpointing, str | None], ...] = _CHECKPOINTING
    if {"checkpointing", "checkpointing_policy"} & (goal.fixed.keys() | goal.open.keys()):
        policy = goal.fixed.get("checkpointing_policy")
        kinds = tuple((kind, policy) for kind in choices("checkpointing", (Checkpointing.FULL,)))
    losses = choices("loss", (Loss.PLAIN, Loss.CHUNKED))
    found = product(
        choices("strategy", _STRATEGIES),
        choices("api", (Api.FSDP2, Api.FSDP1)),
        kinds,
        [loss for loss in losses if _can_have(goal.model, loss)] or losses,
        choices("offload", (Offload.NONE,)),
    )
    return [Setting(strategy, api, *kind, loss, offload) for strategy, api, kind, loss, offload in found]


def _can_have(model: Model, loss: Loss) -> bool:
    """Whether a model can be trained with a kind of loss: a recorded one may compute its own."""
    return not isinstance(model, RecordedModel) or why_not_replaced(model.code, loss) is None


def micro_batches(goal: Goal) -> Iterator[int]:
    """Yield the micro-batches that are tried, smaller ones first."""
    if "micro_batch_size" in goal.fixed:
        yield goal.fixed["micro_batch_size"]
        return
    batch = 1
    while batch <= MOST_SEQUENCES:
        yield batch
        batch *= 2


def setup_of(goal: Goal, setting: Setting, batch: int, num_nodes: int, gpus_per_node: int) -> TrainSetup | None:
    """Return a setting on so many GPUs as a setup; None where it cannot run, or cannot make the global batch."""
    world = num_nodes * gpus_per_node
    length = goal.fixed["sequence_length"]
    steps = goal.fixed.get("gradient_accumulation_steps", 1)
    if goal.global_batch_tokens is not None:
        at_once = world * batch * length
        steps = max(round(goal.global_batch_tokens / at_once), 1)
        if abs(steps * at_once / goal.global_batch_tokens - 1) > TOLERANCE:
            return None
    if not _is_the_trainers(goal, setting, world):
        return None
    is_hybrid = setting.strategy.is_hybrid
    if is_hybrid and (num_nodes == 1 or gpus_per_node == 1):
        return None
    try:
        return TrainSetup(
            **{
                **goal.fixed,
                **setting._asdict(),
                "micro_batch_size": batch,
                "gradient_accumulation_steps": steps,
                "world_size": world,
                "shard_size": gpus_per_node if is_hybrid else None,
            }
        )
    except SpecError:
        return None


def _is_the_trainers(goal: Goal, setting: Setting, world_size: int) -> bool:
    """Whether a setting shards as transformers' Trainer does on so many GPUs, where the user leaves that open."""
    if "strategy" in goal.fixed or "strategy" in goal.open:
        return True
    stated = {**goal.fixed, "api": setting.api, "offload": setting.offload}
    own = trainer_defaults(trained_code(goal.model), stated, world_size)
    return own.get("strategy", setting.strategy) is setting.strategy


def can_run(goal: Goal, setup: TrainSetup) -> bool:
    """Return whether a setup can run on GPUs, and is predicted."""
    return why_impossible(goal.model, setup, "cuda") is None and why_optimizer_is_not_predicted(setup) is None
