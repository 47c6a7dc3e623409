"""A recorded model's steps on the tape, as train/models/user_module.py runs them."""

from __future__ import annotations

from fsdp_bench.simulate.events import Category, Stream
from fsdp_bench.simulate.losses.cross_entropy import loss
from fsdp_bench.simulate.operators.kernels import Kernels
from fsdp_bench.simulate.recorded.instructions import next_tokens
from fsdp_bench.simulate.recorded.model import RecordedTransformer
from fsdp_bench.simulate.simulation import BETWEEN_STEPS, Simulation
from fsdp_bench.simulate.tape import Storage, Tensor
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import Loss, TrainSetup


def simulation_of(model: Model, setup: TrainSetup, kernels: Kernels, num_blocks: int, rank: int = 0) -> Simulation:
    """Return the simulation of a benchmark model, or of a recorded one."""
    kind = RecordedSimulation if isinstance(model, RecordedModel) else Simulation
    return kind(model, setup, kernels, num_blocks, rank)


class RecordedSimulation(Simulation):
    """A recorded model, its wrapper and its optimizer on one tape."""

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
            loss = self._forward_backward()
            del batch, loss

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
        """Run forward, which computes the loss, and backward."""
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
