"""DistributedDataParallel, as torch 2.13 issues it: torch/nn/parallel/distributed.py, c10d/reducer.cpp.

Everything is on every rank. Gradients are copied into buckets, which stay, and from them after their all-reduce.
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

from fsdp_bench.simulate.autograd import Engine, accumulator
from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.models.transformer import Module, SimulatedModel, Weight, fill
from fsdp_bench.simulate.operators.core import Operators, Parameter
from fsdp_bench.simulate.operators.kernels import INT32, INT64, Sizes, precision_of
from fsdp_bench.simulate.optimizers.shards import Shard
from fsdp_bench.simulate.tape import Storage, Tensor
from fsdp_bench.simulate.wrappers.protocol import Wrapper
from fsdp_bench.simulate.wrappers.units import Unit
from fsdp_bench.spec.setup import TrainSetup

# -- A model without FSDP on one GPU: NO_SHARD under fsdp2 at world size 1 ---------------------------------------------
#
# Mixed precision is autocast around forward (wrap_ddp of train/wrapping/wrappers.py): parameters, gradients and the
# residual stream stay in fp32, matrix products run on copies. DistributedDataParallel is this and its buckets.


class Bare(Wrapper):
    """The model as it is, with all parameters, gradients and optimizer states."""

    def __init__(
        self, op: Operators, engine: Engine, model: SimulatedModel, units: list[Unit], setup: TrainSetup
    ) -> None:
        super().__init__(op, engine, setup)
        self.model = model
        self.weights = model.all_weights
        self.trained = [weight for weight in self.weights if weight.is_trained]
        self.itemsizes = {
            id(weight): Sizes.of(precision_of(weight.dtype, setup.precision)).store for weight in self.weights
        }
        self.gradients: dict[int, Tensor] = {}
        """By the id of the weight."""
        for weight in self.weights:
            weight.seen = Parameter(
                None,
                weight.numel,
                self.itemsizes[id(weight)],
                accumulator(partial(self._accumulate, weight)) if weight.is_trained else None,
                name=weight.name,
                in_features=weight.rest,
                block=weight.block,
            )
        model.around = self.around

    def _accumulate(self, weight: Weight, gradient: Tensor) -> None:
        """AccumulateGrad: the first gradient is taken, further ones are added in place."""
        self.gradients.setdefault(id(weight), gradient)
        self.ready(weight)

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

    def zero_grad(self) -> None:
        """optimizer.zero_grad(set_to_none=True)."""
        for weight in self.by_block(self.weights):
            self.gradients.pop(id(weight), None)


_BROADCAST_BYTES = 250 * 1024**2
"""torch/nn/parallel/distributed.py, broadcast_bucket_size."""


_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1024**2, 25 * 1024**2
"""torch.distributed._DEFAULT_FIRST_BUCKET_BYTES; DistributedDataParallel's bucket_cap_mb."""


class Ddp(Bare):
    """One replica."""

    def __init__(
        self, op: Operators, engine: Engine, model: SimulatedModel, units: list[Unit], setup: TrainSetup
    ) -> None:
        super().__init__(op, engine, model, units, setup)
        self.world_size = setup.world_size
        self.num_parameters = sum(weight.numel for weight in self.trained)
        self._waiting_numel = 0
        self._seen_numel = 0
        self._bucket_limit = _FIRST_BUCKET_BYTES
        self._buckets: list[Storage] = []
        self._has_reduced = False
        """Whether the first reduction was, and the buckets are not yet rebuilt."""
        self._was_rebuilt = False
        self._is_whole = model.extra_blocks == 0
        self._arrivals: list[tuple[int, int]] = []
        """Block and elements of each gradient, in the order in which the first step's came."""
        self.numels_in_order: list[int] = []
        """The elements of all gradients in that order, where an earlier simulation has shown it."""

    def ready(self, weight: Weight) -> None:
        """Reducer::mark_variable_ready: a full bucket is reduced; in another dtype by a hook, on a copy of it.

        The first step has one bucket of all (DistributedDataParallel's constructor, where no graph is static); later
        ones follow the order in which gradients came in it (rebuild_buckets). Where one block stands for others, which
        is for memory alone, all are reduced at the end.
        """
        if not self.reduces_gradients:
            return
        if not self._was_rebuilt:
            self._arrivals.append((weight.block, weight.numel))
        numel = weight.numel
        self._run("aten::mul_out", 2 * numel)  # mark_variable_ready_dense: divides into the bucket
        self._waiting_numel += numel
        self._seen_numel += numel
        is_last = self._seen_numel == self.num_parameters
        is_full = self._was_rebuilt and self._waiting_numel * self.sizes.store >= self._bucket_limit and self._is_whole
        if is_last or is_full:
            num_bytes = self._waiting_numel * self.sizes.reduce
            if self.sizes.casts_back:
                self.op.tape.storage(num_bytes, "_compress_hook", Category.REDUCTION_BUFFERS)
                sizes = self.sizes
                self.op.tape.cast(self._waiting_numel, sizes.store, sizes.reduce)
            self.op.tape.start_collective("all_reduce", "world", num_bytes)
            self._waiting_numel, self._bucket_limit = 0, _BUCKET_BYTES
        if is_last:
            self.op.tape.wait_for_collectives()
            self._run("aten::copy_", 2 * self._seen_numel)  # finalize_bucket_dense
            self._seen_numel, self._bucket_limit = 0, _FIRST_BUCKET_BYTES
            self._has_reduced = not self._was_rebuilt

    def _run(self, name: str, numel: int) -> None:
        """Issue an operator that reads and writes so many stored elements in all."""
        self.op.tape.kernel(name, numel * self.sizes.store, self.sizes.store)

    def around(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        """_pre_forward, and what is around the model's forward without it."""
        if self._has_reduced and self.reduces_gradients:
            self._rebuild_buckets()
        return super().around(forward, *inputs)

    def load(self) -> list[Storage]:
        """Allocate the parameters, fill them, copy them from rank 0 (_sync_module_states), make one bucket of all."""
        tape, itemsize = self.op.tape, self.sizes.store
        held = super().load()
        self._verify_parameters()
        whole = sum(w.numel * self.itemsizes[id(w)] * self.model.times(w.block) for w in self.weights)
        total = sum(weight.numel * self.model.times(weight.block) for weight in self.trained) * itemsize
        tape.storage(min(whole, _BROADCAST_BYTES), "_broadcast_coalesced", Category.TEMPORARY)
        self._buckets = [tape.storage(total, "initialize_buckets", Category.REDUCTION_BUFFERS)]
        return held

    def _verify_parameters(self) -> None:
        """verify_params_across_processes (c10d/reducer.cpp): each rank's number of parameters, all sizes and strides.

        Their size depends on the model's depth, but is small.
        """
        tape = self.op.tape
        num_dims = sum(weight.ndim * self.model.times(weight.block) for weight in self.trained)
        each = max(INT64, tape.rounding)
        _counts = tape.storage((1 + self.world_size) * each, "verify_params_across_processes", Category.TEMPORARY)
        on_device = 1 if self.op.kernels.is_cuda else 2  # the copy to compare with is on the host
        _metadata = [
            tape.storage(2 * num_dims * INT64, "verify_params_across_processes", Category.TEMPORARY)
            for _ in range(on_device)
        ]

    def _rebuild_buckets(self) -> None:
        """Reducer::rebuild_buckets: in the order of the first step; a bucket ends with the gradient that fills it."""
        self._has_reduced, self._was_rebuilt = False, True
        tape, sizes, limit = self.op.tape, [0], _FIRST_BUCKET_BYTES
        numels = self.numels_in_order or self.numels_of_all_blocks()
        for numel in numels:
            sizes[-1] += numel * self.sizes.store
            if sizes[-1] >= limit:
                sizes.append(0)
                limit = _BUCKET_BYTES
        if not sizes[-1]:
            sizes.pop()
        # rank 0's indices and lengths go to all
        self.op.scratch([INT32 * (len(numels) + 1), INT32 * len(sizes)], "sync_bucket_indices")
        self._buckets.clear()
        self._buckets = [tape.storage(size, "rebuild_buckets", Category.REDUCTION_BUFFERS) for size in sizes]

    def numels_of_all_blocks(self) -> list[int]:
        """Return the elements of the gradients that came, with all blocks of the model; each block's come together."""
        numels: list[int] = []
        for block, group in groupby(self._arrivals, key=lambda arrival: arrival[0]):
            numels += [numel for _, numel in group] * self.model.times(block)
        return numels

    def after_a_step(self) -> None:
        """Restore the state after the first steps: buckets are final. ``numels_in_order`` must be known."""
        self._rebuild_buckets()
