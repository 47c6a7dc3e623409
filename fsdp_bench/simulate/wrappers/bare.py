"""A model without FSDP on one GPU: NO_SHARD under fsdp2 at world size 1.

Mixed precision is autocast around forward (train/wrapping/ddp.py): parameters, gradients and the residual stream stay
in fp32, matrix products run on copies. DistributedDataParallel (ddp.py) is this and its buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fsdp_bench.simulate.autograd import Engine, accumulator
from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.models.transformer import Module, SimulatedModel, Weight, fill
from fsdp_bench.simulate.operators.core import Operators, Parameter
from fsdp_bench.simulate.operators.optimizer import Shard
from fsdp_bench.simulate.operators.precision import Sizes, precision_of
from fsdp_bench.simulate.tape import Storage, Tensor
from fsdp_bench.simulate.wrappers.protocol import Wrapper
from fsdp_bench.simulate.wrappers.units import Unit
from fsdp_bench.spec.setup import TrainSetup


class _Gradient:
    """One parameter's gradient: the first is taken, further ones are added in place."""

    def __init__(self, op: Operators, weight: Weight, itemsize: int, when_ready: Callable[[Weight], None]) -> None:
        self.value: Tensor | None = None
        self._weight = weight
        self._when_ready = when_ready
        weight.seen = Parameter(
            None, weight.numel, itemsize, name=weight.name, in_features=weight.rest, block=weight.block
        )
        weight.seen.node = accumulator(self._accumulate) if weight.is_trained else None

    def _accumulate(self, gradient: Tensor) -> None:
        if self.value is None:
            self.value = gradient
        self._when_ready(self._weight)


class Bare(Wrapper):
    """The model as it is, with all parameters, gradients and optimizer states."""

    def __init__(
        self,
        op: Operators,
        engine: Engine,
        model: SimulatedModel,
        units: list[Unit],
        setup: TrainSetup,
        sizes: Sizes,
        on_host: bool,
    ) -> None:
        self.op = op
        self.model = model
        self.sizes = sizes
        self.weights = model.all_weights
        self.trained = [weight for weight in self.weights if weight.is_trained]
        self.itemsizes = {
            id(weight): Sizes.of(precision_of(weight.dtype, setup.precision)).store for weight in self.weights
        }
        self.gradients = [_Gradient(op, w, self.itemsizes[id(w)], self.ready) for w in self.weights]
        model.around = self.around

    def ready(self, weight: Weight) -> None:
        """Do what follows a parameter's gradient; here nothing."""

    def around(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        """torch.autocast around the model's forward."""
        if not self.sizes.casts:
            return forward(*inputs)
        op = self.op
        op.autocast = self.sizes.compute
        out = forward(*inputs)
        op.end_autocast()
        return out

    def shards(self, model: Module) -> list[Shard]:
        """Return what the optimizer updates: everything."""
        return [Shard(w.numel, self.sizes.store, w.block, shape=w.shape) for w in self.trained]

    def load(self) -> list[Storage]:
        """Allocate the parameters; the benchmark's are then filled, others are moved or initialized in place."""
        tape, held = self.op.tape, []
        for weight in self.by_block(self.weights):
            num_bytes = weight.numel * self.itemsizes[id(weight)]
            held.append(tape.storage(num_bytes, "to_empty", Category.PARAMETERS))
        for weight in self.by_block(self.weights):
            fill(tape, weight)
        return held

    def by_block(self, weights: Sequence[Weight]) -> Iterator[Weight]:
        """Yield weights, marking the block of each in the log."""
        for weight in weights:
            self.op.tape.mark_block(weight.block)
            yield weight
        self.op.tape.mark_block(-1)

    def zero_grad(self) -> None:
        """optimizer.zero_grad(set_to_none=True)."""
        for _weight, gradient in zip(self.by_block(self.weights), self.gradients, strict=True):
            gradient.value = None
