"""Dry runs against real ranks, in every phase to the byte; refusals where they would not be exact."""

import gc
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import (
    Api,
    Checkpointing,
    Loss,
    Offload,
    OptimizerKind,
    Precision,
    ShardingStrategy,
    TrainSetup,
    Wrap,
)
from fsdp_bench.spec.subprocesses.dry_run import DryRunAnswer, DryRunResult, DryRunSpec, UserModule
from fsdp_bench.sweep.dry_run import dry_runs, result_of
from fsdp_bench.train.dry_run.fake_world import fake_device
from fsdp_bench.train.dry_run.workarounds import applied
from fsdp_bench.train.measuring.fake_group import futures_of_all_reduces
from fsdp_bench.train.measuring.meters import CpuMeter
from fsdp_bench.train.models.transformer import batches
from fsdp_bench.train.step import train_step
from tests.on_stand_in.scripts.replaced_operators import softmax, storages
from tests.train.ranks import call_standing_ranks
from tests.train.training import ADAMW, LLAMA, SHAPES, Case, every_case, parametrized, training_of

S = ShardingStrategy
MIXED = Precision.parse("bf16-mixed")
FP16 = Precision.parse("fp16-mixed")
TRUE = Precision.parse("bf16-true")
MESH_BYTES = 4
"""A device mesh keeps one int32 a rank; a dry run makes it of real tensors, which it does not count."""

VARIANTS: dict[str, dict[str, Any]] = {
    "": {"precision": MIXED},
    "fp16, clipped": {"precision": FP16, "max_grad_norm": 1.0},
    "no_sync": {"gradient_accumulation_steps": 2, "sync_every_micro_batch": False},
    "checkpointed, bf16-true": {"precision": TRUE, "checkpointing": Checkpointing.FULL},
    "selective, chunked": {"checkpointing": Checkpointing.SELECTIVE, "loss": Loss.CHUNKED},
    "fused, prefetched": {"precision": MIXED, "optimizer": OptimizerKind.ADAMW_FUSED, "forward_prefetch": True},
    "flat, in a loop": {"use_orig_params": False, "optimizer": OptimizerKind.ADAMW_FOR_LOOP},
    "offload": {"offload": Offload.PARAMS},
    "by size": {"wrap": Wrap.SIZE, "min_num_params": 5000},
    "fp16 reduction": {"precision": Precision("fp32", "bf16", "fp16")},
}


def _uncounted(collective: Any) -> Any:
    """Keep what gloo allocates for itself out of the count: it reduces and scatters on a copy of its input."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return collective(*args, **kwargs)

    return call


def phases_without_gloos_copies(family: Family, setup: TrainSetup) -> dict[str, int]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"):
            if hasattr(dist, name):
                patch.setattr(dist, name, _uncounted(getattr(dist, name)))
        return measured_phases(family, setup)


def measured_phases(family: Family, setup: TrainSetup) -> dict[str, int]:
    """Return, on a real rank, the phases' least peaks of three warm steps.

    gloo's threads and garbage hold tensors for a moment.
    """
    meter = CpuMeter(None, compiled=False)
    training = training_of(family, setup)
    training.meter = meter
    steps = []
    for tokens in batches(setup, SHAPES[family].vocab_size, 5, dist.get_rank(), setup.world_size):
        gc.collect()
        meter.phase("between steps")
        meter.peaks.clear()
        train_step(training, tokens)
        del tokens
        meter.phase("between steps")
        steps.append(dict(meter.peaks))
    meter.end_phases()
    phases = [phase for phase in steps[-1] if phase != "between steps"]
    return {phase: min(step[phase] for step in steps[2:]) for phase in phases}


WITH_ADAMW = {name: ADAMW | fields for name, fields in VARIANTS.items()}


@parametrized(every_case(WITH_ADAMW, everywhere=(), of_gpt2=("no_sync",)))
def test_phases_equal_those_of_real_ranks_and_the_breakdown_adds_up_to_the_peak(case: Case) -> None:
    family, setup, _ = case
    (result,) = _results(DryRunSpec(model=SHAPES[family], setup=setup, kernels="cpu"))
    has_mesh = setup.strategy.is_hybrid or (setup.api is Api.FSDP2 and setup.strategy is not S.NO_SHARD)
    mesh = MESH_BYTES * setup.world_size if has_mesh else 0
    measured = call_standing_ranks(setup.world_size, phases_without_gloos_copies, family, setup)[0]
    assert {phase: peak + mesh for phase, peak in result.phases.items()} == measured
    assert sum(result.breakdown_bytes.values()) == result.peak_allocated_bytes == max(result.phases.values())


def _answers(*specs: DryRunSpec) -> list[DryRunAnswer]:
    return [answer for _index, answer in sorted(dry_runs(specs), key=lambda pair: pair[0])]


def _results(*specs: DryRunSpec) -> list[DryRunResult]:
    return [result_of(answer) for answer in _answers(*specs)]


def test_a_gpus_rank_holds_its_shards_and_with_offload_nothing() -> None:
    setup = TrainSetup(world_size=8, sequence_length=16)
    offloaded = TrainSetup(world_size=8, sequence_length=16, offload=Offload.PARAMS)
    on_device, on_host = _results(
        DryRunSpec(model=LLAMA, setup=setup, kernels="cuda"), DryRunSpec(model=LLAMA, setup=offloaded, kernels="cuda")
    )
    # By hand: each unit's flat parameter is cut into eight fp32 shards; all are multiples of eight but the root's.
    block, root = LLAMA.num_block_parameters, LLAMA.num_root_parameters
    shard = 2 * -(-block // 8) + -(-root // 8)
    assert on_device.resident.optimizer_state_bytes == 2 * on_device.resident.parameters_bytes
    # FSDP1 also pads each parameter to 16 bytes: at most three elements for each of 9 + 9 + 3 parameters.
    assert 4 * shard <= on_device.resident.parameters_bytes <= 4 * (shard + 3 * 21)
    assert on_host.resident.parameters_bytes == 0
    assert on_host.resident.optimizer_state_bytes == 0


def test_an_impossible_dry_run_is_refused_and_the_next_spec_is_answered() -> None:
    good = TrainSetup(world_size=2, sequence_length=16)
    compiled, offloaded, answered = _answers(
        DryRunSpec(model=LLAMA, setup=TrainSetup(world_size=2, compile=True)),
        DryRunSpec(model=LLAMA, setup=TrainSetup(world_size=2, offload=Offload.PARAMS), kernels="cpu"),
        DryRunSpec(model=LLAMA, setup=good),
    )
    assert "torch.compile falls back to eager" in str(compiled.error)
    assert "needs an accelerator" in str(offloaded.error)
    assert compiled.users_mistake
    assert answered.result is not None


def test_a_users_mistake_is_one_line_and_a_death_does_not_take_the_next_spec_with_it(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(
        "import os\n"
        "def number():\n    return 3\n"
        "def broken():\n    raise ValueError('no weights here')\n"
        "def fatal():\n    os._exit(7)\n"
    )
    setup = TrainSetup(world_size=2, sequence_length=16, wrap=Wrap.NONE)
    functions = ("users", "users:nummer", "users:number", "users:broken", "users:fatal")
    modules = [UserModule(function=function, folder=str(tmp_path)) for function in functions]
    *mistakes, dead, alive = _answers(
        *(DryRunSpec(module=module, setup=setup) for module in modules), DryRunSpec(model=LLAMA, setup=setup)
    )
    expected = (
        "write it like 'package.module:name'",
        "users has no 'nummer' (did you mean 'number'",
        "not int",
        "ValueError: no weights here",
    )
    for mistake, part in zip(mistakes, expected, strict=True):
        assert part in str(mistake.error)
        assert mistake.users_mistake
    assert "ended with code 7" in str(dead.error)
    assert not dead.users_mistake
    assert alive.result is not None


def one_linear() -> tuple[torch.nn.Module, torch.Tensor]:
    return torch.nn.Linear(100, 100, bias=False), torch.zeros(10, 100)


def test_autocast_on_the_fake_accelerator_casts_the_weight_and_the_input() -> None:
    module = UserModule(function=f"{__name__}:one_linear", folder=str(Path(__file__).parents[3]))
    fields: dict[str, Any] = {"api": Api.FSDP2, "strategy": S.NO_SHARD, "wrap": Wrap.NONE, "precision": MIXED}
    setup = TrainSetup(world_size=2, optimizer=OptimizerKind.SGD, **fields)
    on_cuda, on_cpu = _results(
        DryRunSpec(module=module, setup=setup), DryRunSpec(module=module, setup=setup, kernels="cpu")
    )
    # By hand, elements: 100 x 100 parameters and DDP's bucket and 10 x 100 inputs in fp32; in bf16 the weight, the
    # input and the output. On a CPU moving the batch to the device copies nothing.
    expected = 4 * (10_000 + 10_000 + 1_000) + 2 * (10_000 + 1_000 + 1_000)
    assert on_cuda.phases["forward"] == on_cpu.phases["forward"] == expected


def test_autocast_on_the_fake_accelerator_computes_the_loss_of_16_bit_logits_in_fp32() -> None:
    """CUDA casts the nll_loss inside of cross_entropy; AutocastCPU would end autocast for what cross_entropy calls."""
    with warnings.catch_warnings(action="ignore"), fake_device("cuda") as device, torch.autocast(device.type):
        logits = torch.empty(4, 8, dtype=torch.bfloat16, device=device)
        targets = torch.zeros(4, dtype=torch.long, device=device)
        assert torch.nn.functional.cross_entropy(logits, targets).dtype == torch.float32
        assert torch.nn.functional.log_softmax(logits, -1).dtype == torch.float32
        assert torch.cat([logits, logits]).dtype == torch.bfloat16


def test_a_torch_whose_symbol_has_changed_is_refused_before_anything_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.nn.parallel.distributed as parallel

    untouched = torch.UntypedStorage.data_ptr
    monkeypatch.setattr(parallel, "_verify_param_shape_across_processes", lambda *_: None)
    with pytest.raises(MachineError, match=r"torch .*_verify_param_shape_across_processes has changed") as caught:
        applied(accelerator=False).__enter__()
    assert "\n" not in str(caught.value)
    monkeypatch.delattr(parallel, "_verify_param_shape_across_processes")
    with pytest.raises(MachineError, match="_verify_param_shape_across_processes is not there"):
        applied(accelerator=False).__enter__()
    assert torch.UntypedStorage.data_ptr is untouched


def test_every_workaround_is_taken_back() -> None:
    before = torch.UntypedStorage.data_ptr, torch.Tensor._make_subclass, torch.distributed.all_reduce
    with applied(accelerator=True), futures_of_all_reduces():
        during = torch.UntypedStorage.data_ptr, torch.Tensor._make_subclass, torch.distributed.all_reduce
        assert all(one is not other for one, other in zip(before, during, strict=True))
    assert (torch.UntypedStorage.data_ptr, torch.Tensor._make_subclass, torch.distributed.all_reduce) == before


def _alive_while_memory_is_replaced() -> list[int]:
    """Do with a parameter what FlatParamHandle does under NO_SHARD with offload and use_orig_params; count storages."""
    flat = torch.nn.Parameter(torch.zeros(8))
    views = [part.view(-1) for part in torch.split(flat, [4, 4])]
    made, alive = [weakref.ref(flat.untyped_storage())], []
    for _ in range(2):
        flat.data = torch.zeros(8)
        made.append(weakref.ref(flat.untyped_storage()))
        alive.append(sum(storage() is not None for storage in made))
        for view, part in zip(views, torch.split(flat, [4, 4]), strict=True):
            view.data = part
        del view, part
        alive.append(sum(storage() is not None for storage in made))
    return alive


def test_memory_that_views_are_given_takes_the_place_of_what_they_had() -> None:
    real = _alive_while_memory_is_replaced()
    with FakeTensorMode():
        without = _alive_while_memory_is_replaced()
    with applied(accelerator=True), FakeTensorMode():
        fake = _alive_while_memory_is_replaced()
    assert fake == real == [2, 1, 2, 1]
    assert without != real  # else torch needs no working around any more


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(("dtype", "copies"), [(torch.float16, 0), (torch.bfloat16, 1)])
def test_softmax_from_fp16_to_fp32_makes_no_copy_of_its_input(dtype: torch.dtype, copies: int, is_log: bool) -> None:
    """``half_to_float`` of aten's softmax (native/SoftMax.cpp) on CUDA; other dtypes are cast first."""
    with warnings.catch_warnings(action="ignore"), fake_device("cuda") as device:  # torch warns of replaced kernels
        made = storages(lambda device: softmax(device, dtype, torch.float32, None, is_log), device)
    product = 3 * 7 * 101
    assert made["forward"] == [3 * 7 * 20 * 2, 101 * 20 * 2, product * 2, *[product * 4] * (copies + 1)]


def _additions_of_a_mask(device: torch.device, is_selective: bool) -> set[str]:
    """Return the operators that add the mask, as torch's profiler sees them: a dispatch mode would change them."""
    query, key = (torch.zeros(1, heads, 8, 8, device=device, requires_grad=True) for heads in (4, 2))
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.bmm.default])
    how: dict[str, Any] = {"context_fn": contexts} if is_selective else {}
    attention = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    with torch.autograd.profiler.profile() as profile, sdpa_kernel(SDPBackend.MATH):
        checkpoint(attention, query, key, key, use_reentrant=False, **how)
    return {event.name for event in profile.function_events} & {"aten::add", "aten::add_"}


@pytest.mark.parametrize(("is_selective", "name"), [(False, "aten::add_"), (True, "aten::add")])
def test_masks_of_unfused_attention_are_added_as_pytorch_adds_them(is_selective: bool, name: str) -> None:
    with warnings.catch_warnings(action="ignore"), fake_device("cuda") as device:
        found = _additions_of_a_mask(device, is_selective)
    assert found == _additions_of_a_mask(torch.device("cpu"), is_selective) == {name}
