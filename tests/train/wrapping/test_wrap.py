"""fsdp(), called directly as users of such helpers know it, and beyond."""

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_bench import fsdp
from fsdp_bench.spec.errors import SpecError, WrapError
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Api, TrainSetup, Wrap
from fsdp_bench.train.models.optimizer import build_optimizer
from fsdp_bench.train.wrapping.readback import effective_setup
from fsdp_bench.train.wrapping.wrap import ShardsNothingWarning
from tests.train.ranks import call_standing_ranks
from tests.train.training import bare_name, whole_parameters, wrapped


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def users_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 4))


Facts = dict[str, Any]


def facts(model: nn.Module) -> Facts:
    """Train one step; return what the wrapped model says of itself."""
    optimizer = build_optimizer(model.parameters(), TrainSetup().optimizer, 1e-3)
    seen: list[torch.dtype] = []
    inner = next(module for module in model.modules() if isinstance(module, nn.Linear))
    inner.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    output = model(torch.randn(2, 8))
    output.float().square().mean().backward()
    gradient_dtypes = tuple({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
    optimizer.step()
    effective = effective_setup(model, optimizer, gradient_dtypes, TrainSetup())
    return {
        "type": type(model).__name__,
        "strategy": effective.strategy,
        "units": effective.num_units,
        "group": effective.shard_group_size,
        "compute": str(seen[0]),
        "output": str(output.dtype),
        "parameters": effective.parameter_dtypes,
        "states": effective.optimizer_state_dtypes,
        "reduce": str(getattr(getattr(model, "mixed_precision", None), "reduce_dtype", None)),  # FSDP1 tells it
    }


def call(*args: Any, **kwargs: Any) -> tuple[Facts, list[str]]:
    """Wrap, train one step; return the facts and the warnings of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fsdp(users_model(), *args, **kwargs)
    ours = [str(w.message) for w in caught if issubclass(w.category, ShardsNothingWarning)]
    return facts(model), ours


def refusal(function: Callable[[], object]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function()
        except (WrapError, SpecError) as error:
            return f"{type(error).__name__}: {error}"
    return "not refused"


def wrap_linear(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, nn.Linear)


FULL: dict[str, Any] = {"shard_strat": "FULL_SHARD"}
BLOCKS: dict[str, Any] = {"auto_wrap": True, "TransformerBlock": Block}
TWO: dict[str, Any] = {"api": "fsdp2"}
BY_SIZE: dict[str, Any] = {**FULL, "auto_wrap": True, "min_num_params": 2000}
BY_CALLABLE: dict[str, Any] = {**FULL, "auto_wrap_policy": wrap_linear}
DIRECT: dict[str, tuple[dict[str, Any], Facts]] = {
    "default": ({}, {"type": "FullyShardedDataParallel", "strategy": "NO_SHARD", "units": 1, "group": 1}),
    "bf16": (  # as in accelerate and Lightning: bf16-mixed
        {**FULL, "mp": "bf16"},
        {"strategy": "FULL_SHARD", "units": 1, "compute": "torch.bfloat16", "reduce": "torch.float32"},
    ),
    "full": ({**FULL, **BLOCKS}, {"units": 3}),
    "fsdp2": ({**FULL, **BLOCKS, **TWO}, {"units": 3}),
    "fsdp2 zero2": ({**BLOCKS, **TWO, "shard_strat": "zero2"}, {"strategy": "SHARD_GRAD_OP", "units": 3, "group": 2}),
    "fsdp2 no shard": (TWO, {"type": "DistributedDataParallel", "strategy": "NO_SHARD", "group": 1}),
    "by size": (BY_SIZE, {"units": 3}),  # a block has 2 x 16 x 64 + 80 = 2128 parameters
    "by size fsdp2": ({**BY_SIZE, **TWO}, {"units": 3}),
    "by size default": ({**FULL, "auto_wrap": True}, {"units": 1}),
    "by callable": (BY_CALLABLE, {"units": 7}),  # six linears and the root
    "by callable fsdp2": ({**BY_CALLABLE, **TWO}, {"units": 7}),
    "group": ({**FULL, **BLOCKS, "process_group": "all"}, {"units": 3, "group": 2}),
    "group fsdp2": ({**FULL, **BLOCKS, **TWO, "process_group": "all"}, {"units": 3, "group": 2}),
    "mesh": ({**FULL, **BLOCKS, "device_mesh": "all"}, {"units": 3, "group": 2}),
    "mesh fsdp2": ({**FULL, **BLOCKS, **TWO, "device_mesh": "all"}, {"units": 3, "group": 2}),
    "offload fsdp2": ({**FULL, **BLOCKS, **TWO, "cpu_offload": True}, {"strategy": "FULL_SHARD", "units": 3}),
}
NAMES = {"FULL_SHARD": "FULL_SHARD", "SHARD_GRAD": "SHARD_GRAD_OP", "NO_SHARD": "NO_SHARD"}
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
for api, mp, strategy in product(("fsdp1", "fsdp2"), DTYPES, NAMES):  # every documented word with every other
    is_ddp = (api, strategy) == ("fsdp2", "NO_SHARD")
    DIRECT[f"{api} {mp} {strategy}"] = (
        {**BLOCKS, "mp": mp, "shard_strat": strategy, "api": api},
        {
            "strategy": NAMES[strategy],
            "parameters": ("fp32",),  # they and the optimizer's states stay in fp32, whatever is computed in
            "states": ("fp32",),
            "compute": "torch.float32" if is_ddp else DTYPES[mp],  # of the weights, which DDP's autocast keeps
            "output": DTYPES[mp],
            "group": 1 if strategy == "NO_SHARD" else 2,
            "units": 1 if is_ddp else 3,
        },
    )
"""By name: arguments, where ``all`` is the group or mesh of all ranks; and what the wrapped model says of itself."""


def direct_calls() -> dict[str, tuple[Facts, list[str]]]:
    """Everything that two ranks can show."""
    of_all = {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (2,))}
    return {
        name: call(**{key: of_all[key] if value == "all" else value for key, value in arguments.items()})
        for name, (arguments, _) in DIRECT.items()
    }


@pytest.fixture(scope="module")
def direct() -> dict[str, tuple[Facts, list[str]]]:
    return call_standing_ranks(2, direct_calls)[0]


@pytest.mark.parametrize("name", DIRECT)
def test_the_call_gives_what_it_says(name: str, direct: dict[str, tuple[Facts, list[str]]]) -> None:
    (got, _), (_, expected) = direct[name], DIRECT[name]
    assert {key: got[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("default", "NO_SHARD keeps every parameter"),
        ("fsdp2 no shard", "NO_SHARD keeps every parameter"),
        ("bf16", "one unit gathers the whole model"),
        ("by size default", "one unit gathers the whole model"),
        *((name, "") for name in ("full", "fsdp2", "by size")),
    ],
)
def test_a_call_that_shards_nothing_warns_why_and_another_does_not(
    name: str, part: str, direct: dict[str, tuple[Facts, list[str]]]
) -> None:
    assert [part in message for message in direct[name][1]] == [True] * bool(part)


def refuse_with_optimizer() -> object:
    model = users_model()
    optimizer = torch.optim.SGD(model[1].parameters())  # over a part of it
    return fsdp(model, api="fsdp2", shard_strat="FULL_SHARD"), optimizer


def refuse_with_living_optimizer() -> None:
    model = users_model()
    optimizer = torch.optim.AdamW(model.parameters())
    refused_once = refusal(lambda: fsdp(model, **FULL))
    del optimizer
    fsdp(model, **FULL)
    raise WrapError(f"once: {refused_once}")


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return users_model()


def on_mesh_of_two_dimensions(**arguments: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp(users_model(), device_mesh=mesh, **arguments)


WITH_ENDS: dict[str, Any] = {"world_size": 2, "api": Api.FSDP2, "wrap": Wrap.BLOCK_AND_ENDS}
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "optimizer": (
        refuse_with_living_optimizer,
        "once: WrapError: a AdamW was made over this model's parameters before wrapping",
    ),
    "fsdp2 optimizer": (refuse_with_optimizer, "WrapError: a SGD was made over this model's parameters before"),
    "offload": (lambda: fsdp(users_model(), cpu_offload=True), "FSDP1's CPUOffload needs an accelerator"),
    "meta": (lambda: fsdp(on_meta()), "give initialize"),
    "block": (
        lambda: fsdp(users_model(), True, TransformerBlock=nn.Conv2d, **FULL),
        "its modules are Block, Linear, Sequential",
    ),
    "mesh": (lambda: on_mesh_of_two_dimensions(**FULL), "device_mesh has 2 dimensions; FULL_SHARD needs 1"),
    "mesh fsdp2": (lambda: on_mesh_of_two_dimensions(**FULL, **TWO), "has 2 dimensions; FULL_SHARD needs 1"),
    "mesh DDP": (lambda: on_mesh_of_two_dimensions(**TWO), "device_mesh has 2 dimensions; NO_SHARD needs 1"),
    "hybrid": (lambda: fsdp(users_model(), shard_strat="HYBRID_SHARD"), "use 4 or more ranks"),
    "strategy": (lambda: fsdp(users_model(), shard_strat="SHARD_GRADS"), "did you mean 'shard-grad'"),
    "mp": (lambda: fsdp(users_model(), mp="bf17"), "SpecError: precision: 'bf17'"),
    "nothing to checkpoint": (lambda: fsdp(users_model(), activation_checkpointing="full"), "give TransformerBlock"),
    "DDP bf16": (lambda: fsdp(users_model(), mp="bf16-mixed-bf16-reduce", **TWO), "compression hook needs NCCL"),
    "DDP offload": (lambda: fsdp(users_model(), cpu_offload=True, **TWO), "has no CPU offload; api fsdp1 has"),
    "unnamed ends": (
        lambda: fsdp(users_model(), setup=TrainSetup(**WITH_ENDS), TransformerBlock=Block),
        "give Sequential the properties modules_before_blocks and modules_after_blocks",
    ),
    "tied ends": (lambda: wrapped(Family.GPT2, TrainSetup(**WITH_ENDS)), "tie_word_embeddings"),
    "world": (lambda: fsdp(users_model(), setup=TrainSetup(world_size=8)), "the setup is for world_size 8; here are 2"),
}


def refusals() -> dict[str, str]:
    return {name: refusal(function) for name, (function, _) in REFUSED.items()}


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    return call_standing_ranks(2, refusals)[0]


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_call_is_refused_with_the_reason(name: str, refused: dict[str, str]) -> None:
    assert REFUSED[name][1] in refused[name]


def test_a_call_without_a_process_group_is_refused_with_the_reason() -> None:
    with pytest.raises(WrapError, match="init_process_group"):
        fsdp(users_model())


def hybrid_strategies() -> list[tuple[str, Facts]]:
    """Wrap by a mesh of the user's own, and by the size of the groups that shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return [
        (strategy, call(shard_strat=strategy, api=api.value, **how, **BLOCKS)[0])
        for api in Api
        for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        for how in ({"device_mesh": mesh}, {"shard_size": 2})
    ]


def test_hybrid_strategies_read_back_as_themselves_on_a_users_mesh_and_by_shard_size() -> None:
    for rank in call_standing_ranks(4, hybrid_strategies):
        for asked, got in rank:
            assert (got["strategy"], got["group"], got["units"]) == (asked, 2, 3)


PARTS_OF_THE_WORLD: dict[str, dict[str, Any]] = {
    "fsdp1": {"shard_strat": "FULL_SHARD"},
    "fsdp1 NO_SHARD": {},
    "fsdp2": {"shard_strat": "FULL_SHARD", "api": "fsdp2"},
    "DDP": {"api": "fsdp2"},
    "DDP fp16": {"api": "fsdp2", "mp": "fp16"},
}


def steps_in_parts_of_the_world() -> dict[str, float]:
    """On each half of four ranks, step by the gradient of ``rank * sum(output)``; return the last bias's step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    parts: dict[str, dict[str, Any]] = {"mesh": {"device_mesh": mesh}, "group": {"process_group": mesh.get_group()}}
    steps = {}
    for name, options in PARTS_OF_THE_WORLD.items():
        for key, part in parts.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ShardsNothingWarning)
                model = fsdp(users_model(), **part, **options)
            start = whole_parameters(model)["3.bias"]
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            (dist.get_rank() * model(torch.ones(1, 8)).float().sum()).backward()
            optimizer.step()
            steps[f"{name} {key}"] = float((start - whole_parameters(model)["3.bias"]).mean())
    return steps


def test_a_part_of_the_world_averages_gradients_over_itself_alone() -> None:
    """d(rank * sum)/d(bias) is the rank: ranks 0 and 1 average to 0.5, ranks 2 and 3 to 2.5; all four would to 1.5."""
    for rank, steps in enumerate(call_standing_ranks(4, steps_in_parts_of_the_world)):
        assert steps == {name: pytest.approx(0.5 if rank < 2 else 2.5) for name in steps}
        assert len(steps) == 2 * len(PARTS_OF_THE_WORLD)


def units_of_a_model() -> dict[str, Any]:
    """Wrap a llama of two blocks on four ranks; return what PyTorch has of each unit."""
    options: dict[str, Any] = {"api": "fsdp2", "world_size": 4, "wrap": "block-and-ends", "precision": "bf16-mixed"}
    two = wrapped(
        Family.LLAMA, TrainSetup(**options, reshard_after_forward=2, reshard_last_block=False, fp32_head=True)
    )
    states = {name: module._get_fsdp_state() for name, module in two.named_modules() if isinstance(module, FSDPModule)}
    groups = {name: state._fsdp_param_group for name, state in states.items() if state._fsdp_param_group is not None}
    to = {name: group.post_forward_mesh_info for name, group in groups.items()}
    one = wrapped(Family.LLAMA, TrainSetup(**{**options, "api": "fsdp1"}, fp32_head=True))
    inside = {bare_name(name): unit for name, unit in one.named_modules() if isinstance(unit, FullyShardedDataParallel)}
    return {
        "one unit": states["norm"] is states["lm_head"],
        "ranks": {name: info and info.shard_mesh_size for name, info in to.items()},
        "fsdp2 computes": {name: str(group.mp_policy.param_dtype) for name, group in groups.items()},
        "fsdp1 computes": {name: str(unit.mixed_precision.param_dtype) for name, unit in inside.items()},
    }


def test_the_ends_are_units_and_each_is_resharded_and_computes_as_the_setup_says() -> None:
    """As torchtitan does: the last block and fully_shard([norm, head]) are not resharded after forward."""
    found = call_standing_ranks(4, units_of_a_model)[0]
    assert found["one unit"]
    assert found["ranks"] == {"embedding": 2, "blocks.0": 2, "blocks.1": None, "norm": None, "lm_head": None}
    wide, narrow = "torch.float32", "torch.bfloat16"
    of_blocks = {"embedding": narrow, "blocks.0": narrow, "blocks.1": narrow}
    assert found["fsdp2 computes"] == of_blocks | {"norm": wide, "lm_head": wide}
    assert found["fsdp1 computes"] == of_blocks | {"": narrow, "lm_head": wide}
