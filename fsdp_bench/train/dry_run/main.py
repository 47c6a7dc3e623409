"""``python -m fsdp_bench.train.dry_run.main [PARENT]``: dry runs, one after another, in one process.

Standard input: one DryRunSpec a line, as JSON. Standard output: one DryRunAnswer a line, in the same order. If a
spec fails, the others still run.
"""

import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_bench.spec.codec import from_json, to_builtins
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.setup import Api, Loss, Offload, TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunAnswer, DryRunResult, DryRunSpec
from fsdp_bench.train.dry_run.fake_tracker import Owners, RecordedStep
from fsdp_bench.train.dry_run.fake_world import FakeWorld, fake_world
from fsdp_bench.train.models import torchtitan
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.models.huggingface import batch_of, unpacked_sequences
from fsdp_bench.train.models.lora import load
from fsdp_bench.train.models.loss import loss_function
from fsdp_bench.train.models.model_code import replace_loss
from fsdp_bench.train.models.quantized import as_on_cuda
from fsdp_bench.train.models.transformer import BLOCKS, build, initialize
from fsdp_bench.train.models.user_module import (
    allocate_parameters,
    block_class,
    load_user_module,
    logits_of,
    loss_of,
    module_step,
    named_class,
)
from fsdp_bench.train.processes.child import answered, answers_only
from fsdp_bench.train.processes.measurement import RankModel
from fsdp_bench.train.step import Training, train_step


def dry_run(spec: DryRunSpec, world: AbstractContextManager[FakeWorld] | None = None) -> DryRunResult:
    """Run some steps, in ``world`` if given; return the memory of the last and of the first forward.

    Raises FsdpBenchError, with the reason, for setups that a dry run does not support.
    """
    begin = time.perf_counter()
    setup = spec.setup
    _refuse(spec)
    with _packages(spec), world or fake_world(setup, spec.kernels, spec.rank, spec.before_sm80) as joined:
        subject, arguments = _subject(spec, joined)
        num_parameters = sum(parameter.numel() for parameter in subject.model.parameters())
        training = subject.wrapped(setup, joined.device, joined.tracker, joined.mesh)
        if training.scaler is not None:
            # With real tensors a larger scale overflows in the first steps, which the optimizer then skips.
            training.scaler._init_scale = 1.0
        load_bytes = joined.tracker.peak_bytes
        owners = Owners(joined.tracker, training, loss_makes_logits=spec.model is not None)
        returns_logits = spec.model is not None or spec.code == "torchtitan"
        _watch_logits(training, owners, (lambda output: output) if returns_logits else logits_of)

        def run_step() -> None:
            subject.step(training, next(subject.batches))

        # The first step creates Adam's states and, in FSDP2, counts DTensor's sharding propagation.
        first = joined.tracker.record(run_step)
        if setup.is_ddp or spec.model is None:
            # DDP rebuilds its buckets before the second step, and a user's module may do anything once.
            run_step()
        gc.collect()
        step = joined.tracker.record(run_step)
        if spec.trace is not None:
            _write_trace(Path(spec.trace), step)
        phases = dict(step.peaks)
        if setup.api is Api.FSDP1:  # its first forward pass allocates every unit once (init_flat_param_attributes)
            phases["forward"] = max(phases["forward"], first.peaks["forward"])
        worst = max(phases, key=lambda phase: phases[phase])
        return DryRunResult(
            peak_allocated_bytes=phases[worst],
            peak_phase=worst,
            phases=phases,
            load_bytes=load_bytes,
            resident=owners.resident(step),
            breakdown_bytes=owners.breakdown(step if step.peaks[worst] == phases[worst] else first),
            num_parameters=num_parameters,
            kernels=spec.kernels,
            torch=str(torch.__version__),
            seconds=time.perf_counter() - begin,
            rank=spec.rank,
            arguments=arguments,
        )


def _subject(spec: DryRunSpec, world: FakeWorld) -> tuple[RankModel, dict[str, int]]:
    """Return a benchmark model or a user's own, and the sizes with which the user's function was called."""
    setup, arguments = spec.setup, {}
    loss: Callable[[Any, Any], torch.Tensor]
    dtype, home = DTYPES[setup.precision.store], world.build_device(setup)
    if spec.model is not None:
        with _disable_current_modes():
            bare = build(spec.model, dtype)
        fill = partial(initialize, seed=setup.seed) if world.device.type == "cpu" else _fill_without_generator
        block, loss = BLOCKS[spec.model.family], loss_function(setup.loss)
        return RankModel(bare, block, _zeros(setup), loss, train_step, fill), {}
    with torch.device(home):
        if spec.module is not None:
            user = load_user_module(spec.module, setup, dtype, home)
            model, kind, batch, loss, arguments = user.model, user.block, user.batch, loss_of, user.arguments
        elif spec.config is not None and spec.code == "torchtitan":
            model, _ = torchtitan.build(spec.config, setup.sequence_length)
            allocate_parameters(model.train(), dtype, home)
            kind = named_class(model, torchtitan.BLOCKS[str(spec.config["model_type"])])
            batch = torchtitan.batch_of(setup.micro_batch_size, setup.sequence_length, "cpu")
            loss = torchtitan.loss_of
        else:
            assert spec.config is not None
            model = load(spec.config, spec.lora, dtype, world.device)
            kind, batch = block_class(model), batch_of(model, setup.micro_batch_size, setup.sequence_length, "cpu")
            loss = loss_of if setup.loss is Loss.PLAIN else replace_loss(model, setup.loss)
    batches = repeat([batch] * setup.gradient_accumulation_steps)
    return RankModel(model, kind, batches, loss, module_step), arguments


def _zeros(setup: TrainSetup) -> Iterator[list[torch.Tensor]]:
    """Yield tokens without values for one step after another, each made when it is asked for."""
    size = (setup.micro_batch_size, setup.sequence_length + 1)
    while True:
        yield [torch.zeros(size, dtype=torch.int64) for _ in range(setup.gradient_accumulation_steps)]


@contextmanager
def _packages(spec: DryRunSpec) -> Iterator[None]:
    """Let packages do on tensors without data what they do on real ones."""
    if spec.model is not None:
        yield
    else:
        with unpacked_sequences(), as_on_cuda():
            yield


@torch.no_grad()
def _fill_without_generator(parameter: torch.Tensor, name: str) -> None:
    """Replace ``initialize`` on a device without random number generator: the same allocations, without values."""
    if name.endswith("bias") or parameter.ndim == 1:
        parameter.zero_()
    else:
        parameter.copy_(torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32).normal_())


def _refuse(spec: DryRunSpec) -> None:
    if spec.setup.compiles:
        raise SpecError(
            "compile: torch.compile falls back to eager code on tensors without data, so a dry run would show the "
            "memory of another program; measure it with a sweep"
        )
    if spec.setup.loss.is_fused:
        raise SpecError(f"loss {spec.setup.loss.value}: Triton's kernels need torch's CUDA build; rehearse it")
    if spec.setup.offload is Offload.OPTIMIZER:
        raise SpecError("offload optimizer: torchao's CPUOffloadOptimizer needs CUDA; rehearse it")
    if spec.setup.compiles_optimizer:
        raise SpecError(
            f"optimizer {spec.setup.optimizer.value}: torchao compiles its step, which falls back to eager code on"
            " tensors without data; rehearse it"
        )
    reason = impossible(spec.setup, spec.kernels)
    if reason is not None:
        raise SpecError(reason)


def _watch_logits(training: Training, owners: Owners, find: Callable[[Any], Any]) -> None:
    compute_loss = training.loss_function

    def watched(logits: Any, targets: Any) -> torch.Tensor:
        found = find(logits)
        if isinstance(found, torch.Tensor):
            owners.note_logits(found)
        return compute_loss(logits, targets)

    training.loss_function = watched


def _write_trace(path: Path, step: RecordedStep) -> None:
    """Write every change (live bytes, growth, number of the storage, operator) and the beginning of every phase."""
    live, marks = sum(step.start.values()), dict(step.marks)
    lines = [f"{live:>16} {'':>16} start"]
    for index, change in enumerate(step.changes):
        if index in marks:
            lines.append(f"== {marks[index]}")
        live += change.grown_bytes
        lines.append(f"{live:>16} {change.grown_bytes:>+16} #{change.number} {change.operator}")
    path.write_text("\n".join(lines) + "\n")


def answer(line: str) -> DryRunAnswer:
    """Read one spec and run it; return its result or its error as an answer."""

    def result() -> DryRunAnswer:
        try:
            spec = from_json(line.encode(), DryRunSpec)
        except msgspec.DecodeError as error:
            raise SpecError(str(error)) from None
        return DryRunAnswer(result=dry_run(spec))

    return answered(DryRunAnswer, result)


def main() -> None:
    """Answer standard input."""
    out = answers_only()
    importlib.import_module("torch._dynamo.config")  # FakeTensorMode imports it
    gc.freeze()  # what torch's import left need not be looked through in every collection
    for line in sys.stdin:
        out.write(msgspec.json.encode(to_builtins(answer(line))).decode() + "\n")
        out.flush()


if __name__ == "__main__":
    main()
