"""A model, its wrapper and its optimizer on one tape: loading and one step, as train/step.py runs it."""

from itertools import groupby
from typing import Any

from fsdp_bench.simulate.autograd import Engine
from fsdp_bench.simulate.compiled.choose import compile_blocks
from fsdp_bench.simulate.events import IN_HOST_MEMORY, Category, Stream
from fsdp_bench.simulate.losses import cross_entropy, loss
from fsdp_bench.simulate.models.activation_checkpointing import reentrant
from fsdp_bench.simulate.models.build import build, checkpoint_blocks, checkpointed_blocks
from fsdp_bench.simulate.operators.clipping import (
    Scaler,
    clip_gradients,
    clip_sharded_fsdp1,
    reduce_norm_of_host_gradients,
)
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import FP32, INT64, Kernels, Sizes
from fsdp_bench.simulate.optimizers import dispatch as optimizer
from fsdp_bench.simulate.optimizers.dispatch import InBackward, offloaded_step, on_gpu
from fsdp_bench.simulate.optimizers.shards import counts
from fsdp_bench.simulate.optimizers.torch_optim import why_optimizer_is_not_predicted
from fsdp_bench.simulate.recorded.instructions import next_tokens
from fsdp_bench.simulate.recorded.model import RecordedTransformer
from fsdp_bench.simulate.repeat import Log, first_forward_alone
from fsdp_bench.simulate.tape import CUDA_BLOCK_BYTES, Storage, Tape, Tensor
from fsdp_bench.simulate.wrappers.ddp import Bare, Ddp
from fsdp_bench.simulate.wrappers.fsdp1 import Fsdp1
from fsdp_bench.simulate.wrappers.fsdp2 import Fsdp2
from fsdp_bench.simulate.wrappers.protocol import Wrapper
from fsdp_bench.simulate.wrappers.units import Unit, blocks_are_alike, choose_units
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import Api, Loss, Offload, OptimizerKind, Reentrant, ShardingStrategy, TrainSetup

BETWEEN_STEPS = "between steps"
"""The part of the log outside of the phases: what earlier steps leave."""

_MICRO_BATCHES = 3
"""Micro-batches that are simulated: the first, the last, and one between them, which all others equal."""


class Simulation:
    """A model, its wrapper and its optimizer on one tape."""

    def __init__(self, model: Model, setup: TrainSetup, kernels: Kernels, num_blocks: int, rank: int = 0) -> None:
        if (reason := why_optimizer_is_not_predicted(setup)) is not None:
            raise SpecError(reason)
        self.setup = setup
        self.rank = rank
        self.tape = Tape(1 if kernels.observed else CUDA_BLOCK_BYTES, has_peers=setup.world_size > 1)
        self.op = Operators(self.tape, kernels)
        self.engine = Engine(self.tape, accumulates_in_place=not kernels.observed)
        self.model = build(self.op, model, setup, num_blocks)
        self.sizes = Sizes.of(setup.precision)
        self.on_host = not kernels.is_cuda
        units = choose_units(self.model, setup)
        checkpoints_some = setup.policy.is_of_blocks  # those are unlike the others
        self.blocks_are_alike = not checkpoints_some and blocks_are_alike(self.model, units, setup)
        self.is_compiled = compile_blocks(self.op, self.model, model, setup)
        """Whether blocks run compiled code."""
        if not self.is_compiled:
            checkpoint_blocks(self.op, self.engine, self.model, setup)
        self.wrapper = self._wrapped(units)
        if setup.reentrant is Reentrant.AROUND:
            for block in checkpointed_blocks(self.model, setup):
                block.put_around(reentrant(self.op, self.engine))
        if setup.optimizer_in_backward:
            self.wrapper.in_backward = InBackward(self.op, setup.optimizer)
        self.allocates_alike = isinstance(self.wrapper, Ddp) and not (self.sizes.casts_back or checkpoints_some)
        """Whether blocks differ only in where DistributedDataParallel's buckets end."""
        self.steps_on_host = setup.offload is Offload.PARAMS and not self.on_host
        """Whether the optimizer steps on the host (CPU offload of a GPU run)."""
        self.resident: list[Storage] = []
        self.states: list[Storage] | None = None
        """The optimizer's; None before its first step."""
        self.scaler: Scaler | None = None
        self.zero_scalar: Storage | None = None
        self.kept_logits: Tensor | None = None
        """Those of the last micro-batch, where the training loop computes metrics from them."""
        self.steps: list[range] = []
        """The events of each step."""

    def _wrapped(self, units: list[Unit]) -> Wrapper:
        """Wrap the model. Under fully_shard and DDP only rank 0 is simulated, which has the most."""
        given = self.op, self.engine, self.model, units, self.setup
        if self.setup.api is Api.FSDP1:
            return Fsdp1(*given, self.rank)
        if self.setup.is_ddp:
            return (Bare if self.setup.is_bare else Ddp)(*given)
        return Fsdp2(*given)

    def load(self) -> None:
        """Build and wrap the model."""
        tape = self.tape
        tape.mark("load")
        if self.op.kernels.mesh and (self.setup.uses_fully_shard or self.setup.strategy.is_hybrid):
            ranks = tape.storage(
                4 * self.setup.world_size, "DeviceMesh", Category.TEMPORARY
            )  # a dry run's is elsewhere
            self.resident.append(ranks)
        self.resident += self.wrapper.load()
        tape.mark(BETWEEN_STEPS)
        self.shards = self.wrapper.shards(self.model)
        self.op.computes_in_bf16 = self.setup.precision.compute == "bf16"
        self.op.scales_loss = self.setup.precision.needs_grad_scaler or self.setup.gradient_accumulation_steps > 1
        if self.setup.precision.needs_grad_scaler:
            # DTensors of one rank are as they are.
            has_dtensors = self.setup.uses_fully_shard and self.setup.shard_group_size > 1
            self.scaler = Scaler(self.op, self.setup.api is Api.FSDP1, has_dtensors, self.steps_on_host)

    def warm_up(self) -> None:
        """Restore the state after a first step: the wrapper is initialized, and the optimizer has its states.

        Where blocks or the optimizer are compiled that step is simulated, because Inductor tunes kernels in it; also
        where it leaves its logits to the next one.
        """
        tunes_optimizer = self.setup.optimizer is OptimizerKind.ADAMW_8BIT and self.op.kernels.tunes
        if self.is_compiled or tunes_optimizer or self.op.kernels.metrics_on_logits:
            self.step()
            self.steps.clear()
            self.wrapper.after_a_first_step()
            return
        if self.wrapper.first_step_differs:
            begin = len(self.tape.events)
            self.step()
            self.steps.clear()
            self.tape.events[begin:] = first_forward_alone(self.tape.events[begin:], BETWEEN_STEPS)
            self.wrapper.after_a_first_step()
            return
        self._begin_first_forward()
        self.op.make_workspace(in_backward=False)
        self.op.make_workspace(in_backward=True)
        if self.wrapper.in_backward is not None:
            stream = Stream.ALL_REDUCE if self.setup.strategy.is_hybrid else Stream.REDUCE_SCATTER
            self.wrapper.in_backward.warm_up(self.shards, stream)
        else:
            self.states = self._optimizer_states()
        if self.setup.max_grad_norm is not None:
            self._make_zero_scalar()
        self.wrapper.after_a_step()
        if self.scaler is not None:
            self.wrapper.when_nothing_loaded_is_left(self.scaler.make_scale)

    def _begin_first_forward(self) -> None:
        """Let the wrapper do what it does once, before the first operator of the first forward."""
        given, total = self._given(), self.tape.tensor(1, FP32, "aten::zeros")
        tokens = given[0] if given else self._tokens()
        inputs = self._inputs(tokens)
        self.tape.mark("forward")
        self.wrapper.lazy_init()
        self.tape.mark(BETWEEN_STEPS)
        del given, total, tokens, inputs

    def _given(self) -> list[Tensor]:
        """Return all micro-batches of a step, where they are made on the device itself."""
        return [self._tokens() for _ in range(self.setup.gradient_accumulation_steps)] if self.on_host else []

    def _tokens(self) -> Tensor:
        """Return one micro-batch: the inputs, and a token more. The host waits for its copy from pageable memory."""
        numel = self.setup.micro_batch_size * (self.setup.sequence_length + 1)
        tokens = self.tape.tensor(numel, INT64, "tokens")
        if not self.on_host:
            self.tape.synchronize(Stream.COMPUTE)
        return tokens

    def _inputs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets: views of one sequence, copies of several."""
        batch, length = self.setup.micro_batch_size, self.setup.sequence_length
        if batch == 1:
            return tokens.view(length), tokens.view(length)
        inputs = self.tape.tensor(batch * length, INT64, "aten::clone")
        return inputs, self.tape.tensor(batch * length, INT64, "aten::clone")

    def step(self) -> None:
        """train/step.py, train_step."""
        setup, tape, begin = self.setup, self.tape, len(self.tape.events)
        held = self._micro_batches(min(setup.gradient_accumulation_steps, _MICRO_BATCHES))
        tape.repeat(1)
        tape.mark("optimizer")
        self.optimizer_step()
        del held
        self.steps.append(range(begin, len(tape.events)))
        tape.mark(BETWEEN_STEPS)
        tape.synchronize_device()  # who trains looks at the loss; train/processes/measurement.py times the step

    def _micro_batches(self, count: int) -> object:
        """Run micro-batches; return what stays alive until the end of the step."""
        given, total = self._given(), self.tape.tensor(1, FP32, "aten::zeros")
        for index in range(count):
            self._begin_micro_batch(index, count)
            tokens = given[index] if given else self._tokens()
            micro_batch_loss = self.forward_backward(tokens)
            del tokens, micro_batch_loss
        return total, given

    def _begin_micro_batch(self, index: int, count: int) -> None:
        setup = self.setup
        self.wrapper.reduces_gradients = setup.sync_every_micro_batch or index == count - 1
        stands_for = setup.gradient_accumulation_steps - count
        self.tape.repeat(1 + stands_for if count == _MICRO_BATCHES and index == 1 else 1)

    def forward_backward(self, tokens: Tensor) -> Tensor:
        """train/step.py, _forward_backward."""
        setup, tape = self.setup, self.tape
        self.op.batch = setup.micro_batch_size
        inputs, targets = self._inputs(tokens)
        tape.mark("forward")
        given = (targets,) if setup.loss.includes_head else ()
        logits: Any = self.model(inputs, setup.sequence_length, *given)
        if self.op.kernels.metrics_on_logits:
            self.kept_logits = logits.detach()
        tape.mark("loss")
        out = self.op.divide(loss(self.op, setup.loss, logits, targets))
        del logits
        self._backward(out)
        self._log_metrics(targets)
        return out.detach()

    def _backward(self, loss: Tensor) -> None:
        self.tape.mark("backward")
        scaled = self.scaler.scale(loss) if self.scaler is not None else loss
        ones = self.op.temporary(1, scaled.itemsize, "aten::ones_like")  # held by torch.autograd.backward
        self.engine.run(scaled, ones)
        del ones

    def _log_metrics(self, targets: Tensor) -> None:
        """Compute what some training loops log, from logits that have no history: cross-entropies in fp32."""
        if self.kept_logits is None:
            return
        self.tape.mark("loss")
        self.tape.category = Category.LOGITS
        for _ in range(self.op.kernels.metrics_on_logits):
            cross_entropy(self.op, self.op.to(self.kept_logits, FP32), targets)
        self.tape.category = Category.ACTIVATIONS

    def optimizer_step(self) -> None:
        """train/step.py, optimizer_step."""
        if self.wrapper.in_backward is not None:
            self.wrapper.zero_grad()
            return
        if self.scaler is not None:
            self.scaler.unscale()
            self._over_gradients("aten::_amp_foreach_non_finite_check_and_unscale_", 2)
        if self.setup.max_grad_norm is not None:
            self._clip()
        if self.scaler is not None:
            self.tape.synchronize(Stream.COMPUTE)  # GradScaler.step asks whether there was an overflow
        if self.states is None and self.setup.optimizer is not OptimizerKind.ADAMW_8BIT:
            self.states = self._optimizer_states()
        if self.setup.offload is Offload.OPTIMIZER:
            offloaded_step(self.op, self.setup.optimizer, self.shards)
            self.wrapper.zero_grad()
            return
        optimizer.issue(self.tape, self.setup.optimizer, self.shards, self.steps_on_host)
        if self.states is None:
            self.states = optimizer.first_step(self.op, self.setup.optimizer, self.shards)
        elif not self.steps_on_host:
            optimizer.step(self.op, self.setup.optimizer, self.shards)
        if self.scaler is not None:
            self.scaler.update()
        self.wrapper.zero_grad()

    def _over_gradients(self, name: str, passes: int) -> None:
        """Issue an operator over all gradients, block by block; where they are in host memory, the host runs it."""
        for block, group in groupby(self.shards, key=lambda shard: shard.block):
            self.tape.mark("optimizer", block)
            shards = list(group)
            num_bytes = passes * sum(shard.numel * shard.itemsize for shard in shards)
            if self.steps_on_host:
                self.tape.host_work(f"{IN_HOST_MEMORY}{name}", num_bytes)
            else:
                self.tape.kernel(name, num_bytes, shards[0].itemsize)
        self.tape.mark("optimizer", -1)

    def _optimizer_states(self) -> list[Storage]:
        if self.steps_on_host:
            return []
        on_device = on_gpu(self.shards) if self.setup.offload is Offload.OPTIMIZER else self.shards
        return optimizer.states(self.op, self.setup.optimizer, on_device)

    def _make_zero_scalar(self) -> None:
        """FullyShardedDataParallel.clip_grad_norm_ makes it once, on the host; its way to the device is waited for."""
        if self.zero_scalar is None and self.setup.api is Api.FSDP1:
            self.zero_scalar = self.tape.storage(FP32, "_zero_scalar", Category.TEMPORARY)
            self.tape.synchronize(Stream.COMPUTE)

    def _clip(self) -> None:
        """train/step.py, clip_gradients, with as many gradients as the whole model has."""
        self._make_zero_scalar()
        self._over_gradients("aten::_foreach_norm", 1)
        self._over_gradients("aten::_foreach_mul_", 2)
        is_sharded_fsdp1 = (
            self.setup.api is Api.FSDP1 and self.setup.effective_strategy is not ShardingStrategy.NO_SHARD
        )
        numels: list[int] = []
        for block, group in groupby(filter(counts, self.shards), key=lambda shard: shard.block):
            numels += [shard.numel for shard in group] * self.model.times(block)
        if self.steps_on_host:
            if is_sharded_fsdp1:
                reduce_norm_of_host_gradients(self.op, bool(numels))
            return
        if is_sharded_fsdp1:
            self.tape.collective("all_reduce", "shard", FP32)
            clip_sharded_fsdp1(self.op, numels, self.sizes.store)
        else:
            is_distributed = self.setup.uses_fully_shard and self.setup.shard_group_size > 1
            if is_distributed:  # the norms of all gradients, one by one
                self.tape.collective("all_reduce", "shard", len(numels) * self.sizes.store)
            clip_gradients(self.op, numels, self.sizes.store, is_distributed)

    def log(self, extra_blocks: int, further_steps: int = 0, replaces: list[tuple[int, int]] | None = None) -> Log:
        """Return what was recorded until now; the frees at the end of the simulation are not part of it."""
        events, self.tape.events = self.tape.events, []
        return Log(events, self.steps, self.model.num_blocks, extra_blocks, self.rank, further_steps, replaces or ())


class RecordedSimulation(Simulation):
    """The same of a recorded model, as train/models/user_module.py runs it."""

    model: RecordedTransformer

    def load(self) -> None:
        """Build and wrap the model; its buffers are on the device, too."""
        super().load()
        for size, block in self.model.program.buffers:
            self.tape.mark_block(block)
            self.resident.append(self.tape.storage(size, "buffer", Category.PARAMETERS))
        self.tape.mark_block(-1)

    def _begin_first_forward(self) -> None:
        batch = self._batch()
        self.tape.mark("forward")
        self.wrapper.lazy_init()
        self.tape.mark(BETWEEN_STEPS)
        del batch

    def _batch(self) -> list[Storage]:
        """module_step: each tensor of a batch is moved to the device; the host waits for pageable memory."""
        batch = [self.tape.storage(n * itemsize, "batch") for n, itemsize, _ in self.model.program.batch]
        self.tape.synchronize(Stream.COMPUTE)
        return batch

    def _micro_batches(self, count: int) -> None:
        for index in range(count):
            self._begin_micro_batch(index, count)
            batch = self._batch()
            micro_batch_loss = self._forward_backward()
            del batch, micro_batch_loss

    def _cast_inputs(self) -> dict[int | str, Storage]:
        """Cast what the wrapper of the root casts: FSDP1's cast_root_forward_inputs, FSDP2's cast_forward_inputs.

        Without FSDP a model casts images itself, and under autocast each operator does.
        """
        precision = self.setup.precision
        if self.setup.is_ddp and precision.compute != precision.store:
            return {}
        itemsize = self.sizes.compute
        return {
            f"i:{index}": self.tape.storage(numel * itemsize, "aten::_to_copy", Category.ACTIVATIONS)
            for index, (numel, given, is_float) in enumerate(self.model.program.batch)
            if is_float and given != itemsize
        }

    def _forward_backward(self) -> Tensor:
        self.tape.mark("forward")
        self.wrapper.lazy_init()  # _root_pre_forward does both before it casts the inputs
        self.wrapper.forget_gradients()
        given, output = self.model.forward_to_loss(self._cast_inputs())
        out = self.op.divide(self._loss(given))
        output.clear()
        del given, output
        self._backward(out)
        return out.detach()

    def _loss(self, given: Tensor) -> Tensor:
        """Return the loss of what forward returned: the loss itself, or logits."""
        setup = self.setup
        if setup.loss is Loss.PLAIN or setup.loss.includes_head:
            return given
        return loss(self.op, setup.loss, given, next_tokens(self.op, setup.micro_batch_size, setup.sequence_length))


def simulation_of(model: Model, setup: TrainSetup, kernels: Kernels, num_blocks: int, rank: int = 0) -> Simulation:
    """Return the simulation of a benchmark model, or of a recorded one."""
    kind = RecordedSimulation if isinstance(model, RecordedModel) else Simulation
    return kind(model, setup, kernels, num_blocks, rank)
