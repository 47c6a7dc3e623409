"""FullyShardedDataParallel of torch 2.13 (_runtime_utils.py): how FlatParamHandles gather, prefetch and reduce."""

from collections.abc import Callable

from fsdp_bench.simulate.autograd import Engine
from fsdp_bench.simulate.events import Category, Stream
from fsdp_bench.simulate.models.transformer import Module, SimulatedModel
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.optimizers.shards import Shard
from fsdp_bench.simulate.tape import Storage
from fsdp_bench.simulate.wrappers.flat_param_handle import FlatParamHandle, Fsdp1State
from fsdp_bench.simulate.wrappers.units import Unit, flattened
from fsdp_bench.spec.setup import TrainSetup


class Fsdp1(Fsdp1State):
    """The units of one model and what they share."""

    def __init__(
        self, op: Operators, engine: Engine, model: SimulatedModel, units: list[Unit], setup: TrainSetup, rank: int = 0
    ) -> None:
        super().__init__(op, engine, setup, rank)
        self._waits_for_loaded: Callable[[], object] | None = None
        handles: dict[int, FlatParamHandle] = {}
        for unit, weights in flattened(model, units, setup):
            (module,) = unit.modules
            handles[id(module)] = FlatParamHandle(self, module, weights, unit.precision, module is model)
            module.put_around(handles[id(module)].around)
        # A root without parameters of its own has hooks, but no flat parameter.
        self.wrapping_order = [handle for handle in handles.values() if handle.weights]
        in_order = (handles[id(module)] for module in model.forward_order() if id(module) in handles)
        self.forward_order = [handle for handle in in_order if handle.weights]
        of_modules = (handles[id(module)] for module in model.all_modules() if id(module) in handles)
        self.handles = [handle for handle in of_modules if handle.weights]

    # -- what stays ----------------------------------------------------------------------------------------------

    def shards(self, model: Module) -> list[Shard]:
        """Return what the optimizer updates, in the order of model.parameters(); of some the rank has no element."""
        if not self.setup.use_orig_params:
            return [Shard(h.layout.shard_numel, self.sizes.store, h.block) for h in self.handles if h.is_trained]
        held = dict(shard for handle in self.handles for shard in handle.shards())
        return [held[id(weight)] for weight in model.all_weights if weight.is_trained]

    def load(self) -> list[Storage]:
        """Materialise, flatten and shard unit after unit; return what stays: a flat shard a unit."""
        held = []
        for handle in self.by_block(self.wrapping_order):
            held += handle.load()
        return held

    def host_tensors(self) -> list[tuple[int, int]]:
        """Return elements and block of each pinned tensor with offload: _local_shard, and _cpu_grad like it."""
        return [(handle.layout.shard_numel * handle.sizes.store, handle.block) for handle in self.handles]

    def lazy_init(self) -> None:
        """_share_state_and_init_handle_attrs, before the first forward: the root, then the units below."""
        if self.is_initialized:
            return
        for handle in self.by_block(self.handles):
            handle.init_attributes()
        self.is_initialized = True

    def when_nothing_loaded_is_left(self, call: Callable[[], object]) -> None:
        """Call once the last unit has let go of what it was loaded into: at once, or in the forward that is to come.

        That forward is then both the first one, whose peak is while a unit still has it, and a later one.
        """
        self._waits_for_loaded = call
        self.let_go_of_loaded()

    def let_go_of_loaded(self) -> None:
        """Make the call that waits for it, if this was the last unit."""
        if self._waits_for_loaded is not None and all(handle.loaded is None for handle in self.handles):
            call, self._waits_for_loaded = self._waits_for_loaded, None
            call()

    @property
    def first_step_differs(self) -> bool:
        """Whether the first forward does not prefetch, as it has yet to show in which order units run."""
        return self.setup.forward_prefetch

    def after_a_step(self) -> None:
        """Restore what a step leaves: events of its last frees, and with use_orig_params the flat gradients."""
        for _ in range(self.events_left):
            self.enqueue_free()
        for handle in self.by_block(self.handles):
            if handle.keeps_copies:
                copy, handle.loaded = handle._pre_unshard(), None
                if self.setup.use_orig_params:
                    handle.backward_copy = copy
                else:
                    handle.forward_copy = copy
        if self.setup.use_orig_params and not self.offload and self.in_backward is None:
            for handle in self.by_block(self.handles):
                if not handle.is_trained:
                    continue
                numel = handle.layout.shard_numel
                handle.grad = self.tape.tensor(numel, self.sizes.store, "flat_param.grad", Category.GRADIENTS)
                handle.grad_dtype = self.setup.precision.store
            self.zeroed = True

    def after_a_first_step(self) -> None:
        """Fill _FreeEventQueue as later steps do: with forward_prefetch a first step leaves one event fewer."""
        while self.num_free_events < self.events_left:
            self.enqueue_free()

    def zero_grad(self) -> None:
        """optimizer.zero_grad: with use_orig_params the flat gradient stays until the next forward."""
        self.zeroed = True
        if not self.setup.use_orig_params:
            for handle in self.by_block(self.handles):
                handle.grad = None

    events_left = 0
    """Events that a step leaves in _FreeEventQueue; set by step.py, which restores that state."""

    # -- order -------------------------------------------------------------------------------------------------

    def root_pre_forward(self) -> None:
        """_root_pre_forward."""
        self.lazy_init()
        for stream in (Stream.ALL_GATHER, Stream.ALL_GATHER_COPY_IN):  # _wait_for_computation_stream
            self.tape.wait_stream(stream, Stream.COMPUTE)
        self.forget_gradients()
        if self.setup.forward_prefetch:
            for handle in self.handles:
                handle.needs_pre_forward_unshard = True
                handle.prefetched = False

    def forget_gradients(self) -> None:
        """_reset_flat_param_grad_info_if_needed: let go of the last step's gradients.

        Where no parameter has a gradient: after zero_grad, and in each micro-batch of a unit that it has none of.
        """
        if self.zeroed or any(handle.holds_no_trained_piece for handle in self.handles):
            for handle in self.by_block(self.handles):
                if self.zeroed or (handle.holds_no_trained_piece and not handle.shows_gradients):
                    handle.grad = None
                if self.zeroed:
                    handle.shows_gradients = False
        self.zeroed = False

    is_initialized = False
    """Whether a forward has begun before."""

    knows_order = False
    """Whether an iteration has ended (_ExecOrderData.is_first_iter), so that the order of the units is known."""

    zeroed = False
    """Whether the optimizer's zero_grad ran since the gradients were made."""

    def prefetch_forward(self, current: FlatParamHandle) -> None:
        """_prefetch_handle in forward: the next unit in the order of the first iteration."""
        if self.setup.forward_prefetch and self.knows_order:
            index = self.forward_order.index(current) + 1
            if index < len(self.forward_order):
                target = self.forward_order[index]
                if target.needs_pre_forward_unshard and not target.prefetched:
                    target.unshard(in_forward=True)
                    target.prefetched = True

    def final_callback(self) -> None:
        """_post_backward_final_callback."""
        if self.reduces_gradients:
            for stream in (Stream.REDUCE_SCATTER, Stream.ALL_REDUCE):
                self.tape.wait_stream(Stream.COMPUTE, stream)
            if self.offload:
                self.tape.synchronize(Stream.COMPUTE)
        for handle in self.by_block(self.handles):
            handle.finalize()
        self.post_forward_order.clear()
        self.knows_order = True  # _ExecOrderData.next_iter
