"""FlatParamHandle, one unit of FullyShardedDataParallel, as torch 2.13 issues it: _flat_param.py, _runtime_utils.py.

A unit's parameters are views of one flat parameter, gathered by one all-gather; its gradients are concatenated to
one flat gradient, which is reduced by one reduce-scatter. Names are torch's.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

from fsdp_bench.simulate.autograd import Engine, Node, accumulator, operator_node
from fsdp_bench.simulate.events import IN_HOST_MEMORY, Category, Queue, Stream
from fsdp_bench.simulate.models.transformer import Module, Weight, fill, whole_weights
from fsdp_bench.simulate.operators.core import Operators, Parameter
from fsdp_bench.simulate.operators.kernels import Sizes, precision_of
from fsdp_bench.simulate.optimizers.shards import Shard
from fsdp_bench.simulate.tape import Storage, Tensor
from fsdp_bench.simulate.wrappers.protocol import Wrapper
from fsdp_bench.simulate.wrappers.units import FlatLayout
from fsdp_bench.spec.setup import BackwardPrefetch, Precision, ShardingStrategy, TrainSetup


class Fsdp1State(Wrapper):
    """_FSDPState: what the units of one model share. ``Fsdp1`` adds the units, and their order."""

    def __init__(self, op: Operators, engine: Engine, setup: TrainSetup, rank: int) -> None:
        super().__init__(op, engine, setup)
        self.rank = rank % self.group_size
        """Within its shard group."""
        self.is_sharded = setup.effective_strategy is not ShardingStrategy.NO_SHARD
        self.post_forward_order: list[FlatParamHandle] = []
        self.num_free_events = 0
        """Recorded frees that nobody has waited for."""

    @abstractmethod
    def let_go_of_loaded(self) -> None:
        """Make the call that waits for what loading made, if this was the last unit."""

    @abstractmethod
    def root_pre_forward(self) -> None:
        """_root_pre_forward."""

    @abstractmethod
    def prefetch_forward(self, current: "FlatParamHandle") -> None:
        """_prefetch_handle in forward."""

    def prefetch_backward(self, current: "FlatParamHandle") -> None:
        """_prefetch_handle in backward: the unit whose forward ended before this one's."""
        if current.post_forward_index > 0:
            target = self.post_forward_order[current.post_forward_index - 1]
            if target.needs_pre_backward_unshard and not target.prefetched:
                target.unshard(in_forward=False)
                target.prefetched = True

    def limit(self) -> None:
        """_unshard with limit_all_gathers: wait until all but one of the last frees have happened."""
        if self.setup.limit_all_gathers and self.num_free_events >= 2:
            self.num_free_events -= 1
            self.tape.host_wait(Queue.FREE)

    def enqueue_free(self) -> None:
        """_reshard with limit_all_gathers: an event after the last use of what was freed."""
        if self.setup.limit_all_gathers:
            self.tape.record_event(self.tape.stream, Queue.FREE)
            self.num_free_events += 1

    def copy(self, name: str, num_bytes: int, stream: Stream) -> None:
        """Copy between host and device, where these are two."""
        if not self.on_host:
            self.tape.copy(name, num_bytes, stream)

    def offload_gradient(self, gradient: Tensor, stream: Stream) -> None:
        """_offload_grad: without sharding the host waits for the copy (``non_blocking``)."""
        if self.offload:
            self.copy("to_host", gradient.numel * self.sizes.store, stream)
            if gradient.storage is not None:
                self.tape.record_stream(gradient.storage, Stream.REDUCE_SCATTER)
            if not self.is_sharded:
                self.tape.synchronize(stream)


class FlatParamHandle:
    """One unit: its flat parameter's shard, its gathered self, its gradient."""

    def __init__(
        self, wrapper: Fsdp1State, unit: Module, weights: list[Weight], precision: Precision, is_root: bool
    ) -> None:
        self.wrapper = wrapper
        self.tape = wrapper.tape
        self.casts_inputs = precision != wrapper.setup.precision
        # _validate_tensors_to_flatten: all parameters of a unit have one dtype (units.py, _dtypes_mixed)
        self.precision = precision_of(weights[0].dtype, precision) if weights else precision
        self.sizes = Sizes.of(self.precision)
        self.keeps_copies = wrapper.offload and not wrapper.is_sharded and not self.sizes.casts
        self.is_root = is_root
        self.weights = weights
        """In the order of nn.Module.parameters, which is that of the flat parameter."""
        self.unit = unit
        self.block = weights[0].block if weights else -1
        self.is_trained = any(weight.is_trained for weight in weights)
        """FlatParameter.requires_grad: a unit of frozen parameters alone is gathered, and has nothing to reduce."""
        self.layout = FlatLayout(weights, wrapper.setup, self.precision)
        self.padded_numel = self.layout.shard_numel * wrapper.group_size
        self.full_param: Storage | None = None
        """The padded unsharded flat parameter; under NO_SHARD its copy in the compute dtype."""
        self.grad: Tensor | None = None
        """flat_param.grad: unsharded in backward, the shard between steps."""
        self.grad_dtype = ""
        self.forward_copy: Storage | None = None
        self.backward_copy: Storage | None = None
        """NO_SHARD with offload: see _use_whole."""
        self.loaded: Storage | None = None
        """NO_SHARD with offload, without use_orig_params: after the move to the host, the module's views keep the
        device copy alive until the first forward."""
        self.moved_shard: Storage | None = None
        """With offload, the copy on the device of which the original parameters are views."""
        self.saved_grad_shard: Tensor | None = None
        self.shows_gradients = False
        self.is_shown_unsharded = False
        """Whether flat_param is not its _local_shard, or skipped its sharded views (_catch_all_reshard)."""
        self.prefetched = False
        self.needs_pre_forward_unshard = False
        self.needs_pre_backward_unshard = False
        self.ran_pre_backward = False
        self.post_forward_index = -1
        self.hooked_leaves: list[Node] = []
        """AccumulateGrad of inputs that no operator made (_register_post_backward_reshard_only_hook)."""
        self.flat = Parameter(None, self.layout.numel, self.sizes.compute, name="flat_param")
        self.flat.node = accumulator(self._accumulate, Stream.ALL_GATHER)
        self.seen = [Parameter(None, w.numel, self.sizes.compute, name=w.name, in_features=w.rest) for w in weights]
        for weight, seen in zip(weights, self.seen, strict=True):
            weight.seen = seen

    @cached_property
    def holds_no_trained_piece(self) -> bool:
        """Whether the shard has nothing to train, and so no gradient (_use_sharded_grad_views)."""
        if not self.wrapper.setup.use_orig_params:
            return False
        rank, trained = self.wrapper.rank, ((i, w) for i, w in enumerate(self.weights) if w.is_trained)
        return not any(self.layout.in_shard(index, weight, rank) > 0 for index, weight in trained)

    def shards(self) -> Iterator[tuple[int, Shard]]:
        """Yield what the rank holds of each trained weight with a key of its own; a piece of a shard has one dimension.

        The optimizer skips frozen ones: they have no gradient.
        """
        wrapper = self.wrapper
        for index, weight in enumerate(self.weights):
            if not weight.is_trained:
                continue
            numel = self.layout.in_shard(index, weight, wrapper.rank)
            shape = () if wrapper.is_sharded else weight.shape
            offset = max(self.layout.offsets[index] - wrapper.rank * self.layout.shard_numel, 0)
            yield id(weight), Shard(numel, self.sizes.store, weight.block, True, shape, offset)

    def _step_in_backward(self, stream: Stream) -> None:
        """_post_backward_use_sharded_grad_views: after the steps no parameter has a gradient, nor the flat one."""
        if self.wrapper.in_backward is not None:
            self.wrapper.in_backward.step(self.shards(), stream)
            self.grad = self.saved_grad_shard = None

    def load(self) -> list[Storage]:
        """FlatParamHandle.__init__ and shard: the unit whole, its concatenation, its shard."""
        tape, itemsize, category = self.tape, self.sizes.store, Category.PARAMETERS
        whole: list[Storage] = []
        for own in self._breadth_first():
            whole += whole_weights(tape, own, itemsize)
            for weight in own:
                fill(tape, weight)
        paddings = [tape.storage(numel * itemsize, "_construct_padding_tensor") for numel in self.layout.paddings]
        flat = tape.storage(self.layout.numel * itemsize, "aten::cat", category)
        del paddings
        if not self.wrapper.is_sharded:
            whole.clear()
            if self.wrapper.offload and not self.wrapper.setup.use_orig_params:
                self.loaded = flat
            return [] if self.wrapper.offload else [flat]
        shard = self._shard_of_flat()
        del flat
        whole.clear()
        return [] if self.wrapper.offload else [shard]

    def _shard_of_flat(self) -> Storage:
        """FlatParamHandle._get_shard: a copy of the rank's part, which the last ranks pad to the others' size."""
        tape, itemsize, category = self.tape, self.sizes.store, Category.PARAMETERS
        numel = self.layout.unpadded_shard_numel(self.wrapper.rank)
        clone = tape.storage(numel * itemsize, "aten::clone", category)
        if numel == self.layout.shard_numel:
            return clone
        return tape.storage(self.layout.shard_numel * itemsize, "aten::constant_pad_nd", category)

    def _breadth_first(self) -> Iterator[list[Weight]]:
        """Yield each module's own weights in the order of _get_modules_to_materialize."""
        own = set(map(id, self.weights))
        modules = [self.unit]
        for module in modules:
            yield [weight for weight in module.weights if id(weight) in own]
            modules += module.children

    def init_attributes(self) -> None:
        """FlatParamHandle.init_flat_param_attributes: what casts and gathers will fill is allocated once, and let go.

        Also the whole unit in the dtype that is stored, for gathers in full precision, which training has none of.
        """
        tape, sizes, category = self.tape, self.sizes, Category.UNSHARDED_PARAMETERS
        if sizes.casts:
            tape.storage(self.layout.shard_numel * sizes.compute, "_mp_shard", category)
        if self.wrapper.is_sharded:
            tape.storage(self.padded_numel * sizes.compute, "_full_param_padded", category)
            if sizes.casts:
                tape.storage(self.padded_numel * sizes.store, "_full_prec_full_param_padded", category)

    # -- parameters --------------------------------------------------------------------------------------------

    def unshard(self, in_forward: bool) -> None:
        """_unshard: the shard in the compute dtype, the rate limiter, the all-gather, and in forward the views.

        Views are nodes of the graph. A forward prefetch makes them before the running unit's operators, so that in
        backward, where younger nodes go first, this unit's flat gradient is concatenated only after the whole
        backward of the unit before it: forward_prefetch holds one unit's gradients more.
        """
        self._gather()
        if in_forward:
            self._use_unsharded_views()

    def _gather(self) -> None:
        wrapper, sizes, tape = self.wrapper, self.sizes, self.tape
        self.is_shown_unsharded = True
        if self.full_param is not None and not (wrapper.offload and wrapper.is_sharded):
            wrapper.limit()  # which _unshard asks before it asks whether there is anything to gather
            return
        shard = self._pre_unshard()
        if shard is not None:
            tape.wait_stream(Stream.ALL_GATHER, Stream.ALL_GATHER_COPY_IN)
        if not wrapper.is_sharded:
            self._use_whole(shard)
            return
        wrapper.limit()
        if self.full_param is not None:  # a root that stayed gathered; its shard was moved all the same
            return
        category = Category.UNSHARDED_PARAMETERS
        self.full_param = tape.storage(
            self.padded_numel * sizes.compute, "_full_param_padded", category, Stream.ALL_GATHER
        )
        tape.collective("all_gather", "shard", self.padded_numel * sizes.compute, Stream.ALL_GATHER)
        del shard

    def _use_whole(self, moved: Storage | None) -> None:
        """Without sharding: what was moved or cast is what computes.

        With offload and without a cast nothing frees the copies but what takes their place: forward's stays until the
        next forward's. With use_orig_params the views of forward's are given backward's memory (_use_unsharded_views),
        which then stays until the next forward; forward's is gone once no product holds a t() of it.
        """
        uses_orig_params = self.wrapper.setup.use_orig_params
        if not self.keeps_copies:
            self.full_param = moved
        elif self.wrapper.engine.is_running:
            self.backward_copy = moved
            if uses_orig_params:
                self.forward_copy = None
        else:
            self.forward_copy = moved
            self.backward_copy = None
        if self.keeps_copies and uses_orig_params:
            for seen in self.seen:
                seen.storage = moved

    def _pre_unshard(self) -> Storage | None:
        """FlatParamHandle.pre_unshard: the shard on the device, in the compute dtype; None where it is there already.

        With offload and without a cast, use_orig_params keeps the moved shard: the original parameters are views of it
        until they are resharded (flat_param_to, _use_sharded_views).
        """
        wrapper, sizes, tape = self.wrapper, self.sizes, self.tape
        numel, category = self.layout.shard_numel, Category.UNSHARDED_PARAMETERS
        stream = Stream.ALL_GATHER_COPY_IN
        if wrapper.engine.is_running:
            self._write_back_gradients()
        if sizes.casts:  # _use_low_precision_shard
            shard = tape.storage(numel * sizes.compute, "_mp_shard", category, stream)
            if wrapper.offload:
                tape.storage(numel * sizes.store, "_local_shard.to", category, stream)
                wrapper.copy("to_device", numel * sizes.store, stream)
            tape.cast(numel, sizes.store, sizes.compute, stream)
            if wrapper.is_sharded:
                self.tape.record_stream(shard, Stream.ALL_GATHER)
            return shard
        if not wrapper.offload:
            return None
        shard = tape.storage(numel * sizes.store, "flat_param_to", category, stream)
        wrapper.copy("to_device", numel * sizes.store, stream)
        if wrapper.is_sharded:
            self.tape.record_stream(shard, Stream.ALL_GATHER)
            if wrapper.setup.use_orig_params:
                self.moved_shard = shard
        return shard

    def _write_back_gradients(self) -> None:
        """_writeback_orig_params with offload, before the flat parameter has this step's gradient.

        Since they were sharded after forward the original parameters show parts of _cpu_grad. So their gradients seem
        to have been changed, and the host copies them into zeros, to no purpose.
        """
        wrapper, setup = self.wrapper, self.wrapper.setup
        was_sharded = wrapper.is_sharded and setup.strategy.reshards_after_forward
        is_shown = setup.use_orig_params and was_sharded and not self.holds_no_trained_piece and self.grad is None
        if wrapper.offload and not wrapper.on_host and is_shown:
            trained = sum(shard.numel for _, shard in self.shards())
            self.tape.host_work(f"{IN_HOST_MEMORY}aten::zeros_like", self.layout.shard_numel * self.sizes.store)
            self.tape.host_work(f"{IN_HOST_MEMORY}aten::copy_", 2 * trained * self.sizes.store)

    def reshard(self, free: bool, in_forward: bool = False) -> None:
        """_reshard."""
        wrapper = self.wrapper
        if not wrapper.is_sharded:
            if self.full_param is not None:  # _free_low_precision_sharded_param
                self.tape.record_stream(self.full_param, self.tape.stream)
            self.full_param = None
            if wrapper.engine.is_running and not wrapper.setup.use_orig_params:
                self.backward_copy = None
        elif free and self.full_param is not None:
            self.tape.record_stream(self.full_param, self.tape.stream)
            self.full_param = None
            wrapper.enqueue_free()
        stays = not wrapper.setup.strategy.reshards_after_forward
        skips_sharded_views = in_forward and self.tape.grad_enabled and stays  # use_sharded_views
        if not skips_sharded_views:
            self.moved_shard = None
        self.is_shown_unsharded = skips_sharded_views and wrapper.is_sharded and wrapper.setup.use_orig_params
        self.prefetched = False

    # -- hooks -------------------------------------------------------------------------------------------------

    def around(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        """_root_pre_forward, _pre_forward, the module, _post_forward."""
        wrapper = self.wrapper
        if self.is_root:
            wrapper.root_pre_forward()
        if not self.weights:  # a root whose parameters are all in units below has no handle
            out = forward(*inputs)
            if out.node is not None:
                out.node.before(wrapper.queue_final_callback)
            return out
        wrapper.hook("_pre_forward")
        if not self.prefetched:
            self.unshard(in_forward=True)
        self.needs_pre_forward_unshard = False
        self.tape.wait_stream(Stream.COMPUTE, Stream.ALL_GATHER)
        wrapper.prefetch_forward(self)
        inputs = self._cast_forward_inputs(inputs)
        self._register_post_backward_reshard_only_hook(inputs)
        out = forward(*inputs)
        wrapper.hook("_post_forward")
        if self.post_forward_index <= 0:  # record_post_forward: the first unit's index is falsy
            self.post_forward_index = len(wrapper.post_forward_order)
            wrapper.post_forward_order.append(self)
        self.reshard(wrapper.setup.strategy.reshards_after_forward and not self.is_root, in_forward=True)
        if out.node is not None:
            self.needs_pre_backward_unshard = True
            self.ran_pre_backward = False
            out.node.before(self.pre_backward)
        return out

    def _register_post_backward_reshard_only_hook(self, inputs: tuple[Any, ...]) -> None:
        """Reshard a frozen unit once all its inputs have gradients.

        Without inputs that need a gradient the hook never runs. It holds the gradients until it has all of them
        (register_multi_grad_hook): a decoder's blocks theirs until that of the encoder's output is known.

        The hook of an input holds its node. Where no operator made the input, as in the second forward of reentrant
        checkpointing around the unit, that is AccumulateGrad, which holds the input: a cycle, so that the input lives,
        with its gradient, until the hook is removed (_finalize_params).
        """
        if self.is_trained or not self.tape.grad_enabled:
            return
        places = [(t.node, t.output) for t in inputs if isinstance(t, Tensor) and t.node is not None]
        self.hooked_leaves += [node for node, _ in places if node.accumulate is not None]
        held: list[Tensor | None] = []

        def hook(node: Node, output: int) -> None:
            held.append(node.buffer[output])
            if len(held) == len(places):
                self.wrapper.hook("_post_backward_hook_reshard_only")
                self._post_backward_reshard()
                held.clear()

        for node, output in places:
            node.before(partial(hook, node, output))

    def _cast_forward_inputs(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """_pre_forward with cast_forward_inputs: activations to the unit's dtype, where it is not the model's."""
        if not self.casts_inputs:
            return inputs
        category, self.tape.category = self.tape.category, Category.ACTIVATIONS
        cast = self.wrapper.cast_forward_inputs(inputs, self.sizes.compute)
        self.tape.category = category
        return cast

    def _use_unsharded_views(self) -> None:
        """Views of the flat parameter, tracked by autograd: their gradients are concatenated (SplitWithSizes).

        _unshard makes them with its stream as the current one, and with them the flat parameter's accumulator. So
        the concatenation and all of _post_backward_hook run there: flat gradients are of that stream's pool, and what
        gathers waits for the products that compute them.
        """
        if self.loaded is not None:
            self.loaded = None
            self.wrapper.let_go_of_loaded()
        if not self.tape.grad_enabled or not self.is_trained:
            return
        numel, itemsize, paddings = self.layout.numel, self.sizes.compute, self.layout.paddings
        tape = self.tape

        def backward(_saved: list[Tensor], _gradients: list[Tensor]) -> list[Tensor]:
            zeros = [tape.tensor(padding, itemsize, "aten::zeros", Category.GRADIENTS) for padding in paddings]
            flat = tape.tensor(numel, itemsize, "aten::cat", Category.GRADIENTS)
            tape.kernel("aten::cat", 2 * numel * itemsize, itemsize, tape.stream)
            del zeros
            return [flat]

        node = operator_node(tape, backward, [self.flat], [], len(self.seen))
        node.stream = Stream.ALL_GATHER
        for index, seen in enumerate(self.seen):
            seen.node, seen.output = node, index

    def _accumulate(self, gradient: Tensor) -> None:
        if self.grad is None:
            self.grad, self.grad_dtype = gradient, self.precision.compute
        else:
            num_bytes = 3 * gradient.numel * gradient.itemsize
            self.tape.kernel("aten::add_", num_bytes, gradient.itemsize, self.tape.stream)
        # Otherwise it is added in place. The engine holds it until the post-backward hook has run (call_function).
        self.post_backward()

    def pre_backward(self) -> None:
        """_pre_backward_hook."""
        wrapper = self.wrapper
        if self.ran_pre_backward:
            return
        wrapper.hook("_pre_backward_hook")
        if self.is_root:
            wrapper.queue_final_callback()
        if self.needs_pre_backward_unshard:
            if not self.prefetched:
                self.unshard(in_forward=False)
            self.tape.wait_stream(Stream.COMPUTE, Stream.ALL_GATHER)
        self.needs_pre_backward_unshard = False
        if wrapper.setup.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            wrapper.prefetch_backward(self)
        self._prepare_gradient()
        self.ran_pre_backward = True

    def _prepare_gradient(self) -> None:
        """prepare_gradient_for_backward: put a gradient of the last step or micro-batch aside."""
        if self.wrapper.is_sharded and self.grad is not None and self.grad.numel == self.layout.shard_numel:
            self.saved_grad_shard, self.grad = self.grad, None

    def post_backward(self) -> None:
        """_post_backward_hook, after the flat gradient was accumulated."""
        wrapper = self.wrapper
        wrapper.hook("_post_backward_hook")
        self._post_backward_reshard()
        if not wrapper.reduces_gradients:
            self._use_unsharded_grad_views()
            return
        computed, precision = self.grad, self.precision
        self.tape.wait_stream(Stream.REDUCE_SCATTER, self.tape.stream)
        if computed is not None and computed.storage is not None:
            self.tape.record_stream(computed.storage, Stream.REDUCE_SCATTER)
        if self.grad_dtype != precision.reduce:
            stays = not wrapper.is_sharded and not self.sizes.casts_back
            category = Category.GRADIENTS if stays else Category.REDUCTION_BUFFERS
            self.grad = self._reduction(self.layout.numel, self.sizes.reduce, "grad.to(reduce_dtype)", category)
            self.tape.cast(self.layout.numel, self.sizes.compute, self.sizes.reduce, Stream.REDUCE_SCATTER)
        if wrapper.is_sharded:
            self._reduce_sharded()
        else:
            self._divide(self.layout.numel)
            wrapper.tape.collective("all_reduce", "world", self.layout.numel * self.sizes.reduce, Stream.REDUCE_SCATTER)
            self._divide_after(self.layout.numel)
            if self.sizes.casts_back:
                numel, label = self.layout.numel, "_cast_grad_to_param_dtype"
                self.grad = self._reduction(numel, self.sizes.store, label, Category.GRADIENTS)
                self.tape.cast(numel, self.sizes.reduce, self.sizes.store, Stream.REDUCE_SCATTER)
            self.grad_dtype = precision.store
            assert self.grad is not None
            wrapper.offload_gradient(self.grad, Stream.REDUCE_SCATTER)
            self._step_in_backward(Stream.REDUCE_SCATTER)
        del computed

    def _post_backward_reshard(self) -> None:
        wrapper = self.wrapper
        self._reshard_in_backward()
        if wrapper.setup.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            wrapper.prefetch_backward(self)

    def _reshard_in_backward(self) -> None:
        """_should_free_in_backward, _reshard."""
        wrapper = self.wrapper
        frees = wrapper.reduces_gradients or wrapper.setup.strategy.reshards_after_forward
        self.reshard(free=frees and wrapper.is_sharded)

    def _run(self, name: str, num_bytes: int, itemsize: int, stream: Stream = Stream.REDUCE_SCATTER) -> None:
        """Issue an operator that reads elements of such a size."""
        self.tape.kernel(name, num_bytes, itemsize, stream)

    def _divide(self, numel: int) -> None:
        """_div_if_needed: gradients are divided in two parts, before and after they are added up."""
        if self.wrapper.setup.world_size > 1:
            self._run("aten::div_", 2 * numel * self.sizes.reduce, self.sizes.reduce)

    def _divide_after(self, numel: int, stream: Stream = Stream.REDUCE_SCATTER) -> None:
        """The second part, which is one for two ranks (DefaultState._get_gradient_predivide_factor)."""
        if self.wrapper.setup.world_size > 2:
            self._run("aten::div_", 2 * numel * self.sizes.reduce, self.sizes.reduce, stream)

    def _use_unsharded_grad_views(self) -> None:
        """Under no_sync each parameter shows its part of the unsharded gradient.

        A parameter whose shape or dtype is another gets a gradient like itself first, which is dropped at once; in host
        memory where parameters are offloaded.
        """
        if not self.wrapper.setup.use_orig_params or self.shows_gradients:
            return
        self.shows_gradients = True
        if self.wrapper.offload:
            return
        for index, weight in enumerate(self.weights):
            held = self.layout.in_shard(index, weight, self.wrapper.rank)
            same_shape = held == weight.numel and (weight.ndim == 1 or not self.wrapper.is_sharded)
            if held and not (same_shape and not self.sizes.casts):
                self.tape.storage(held * self.sizes.store, "aten::empty_like", Category.GRADIENTS)

    def _reduction(
        self,
        numel: int,
        itemsize: int,
        label: str,
        category: Category = Category.REDUCTION_BUFFERS,
        stream: Stream = Stream.REDUCE_SCATTER,
    ) -> Tensor:
        return Tensor(self.tape.storage(numel * itemsize, label, category, stream), numel, itemsize)

    def _reduce_sharded(self) -> None:
        """_reduce_grad: pad, reduce-scatter, cast to the stored dtype, accumulate."""
        unsharded, self.grad = self.grad, None
        padded = None
        if self.padded_numel != self.layout.numel:
            padded = self._reduction(self.padded_numel, self.sizes.reduce, "aten::constant_pad_nd")
            self._run("aten::constant_pad_nd", 2 * self.padded_numel * self.sizes.reduce, self.sizes.reduce)
        self._divide(self.padded_numel)
        kept = Category.GRADIENTS if self.saved_grad_shard is None else Category.REDUCTION_BUFFERS
        first = Category.REDUCTION_BUFFERS if self.sizes.casts_back else kept
        shard = self._reduction(self.layout.shard_numel, self.sizes.reduce, "reduce_scatter output", first)
        stream, numel = Stream.REDUCE_SCATTER, self.layout.shard_numel
        self.tape.collective("reduce_scatter", "shard", self.padded_numel * self.sizes.reduce, stream)
        if self.wrapper.setup.strategy.is_hybrid:
            stream = Stream.ALL_REDUCE
            self.tape.wait_stream(stream, Stream.REDUCE_SCATTER)
            if shard.storage is not None:
                self.tape.record_stream(shard.storage, stream)
            self.tape.collective("all_reduce", "replicate", numel * self.sizes.reduce, stream)
        self._divide_after(numel, stream)
        if self.wrapper.copies_messages:
            self._reduction(self.padded_numel, self.sizes.reduce, "gloo's copy")
        low_precision = None
        if self.sizes.casts_back:
            low_precision = shard
            shard = self._reduction(numel, self.sizes.store, "_cast_grad_to_param_dtype", kept, stream)
            self.tape.cast(numel, self.sizes.reduce, self.sizes.store, stream)
        del low_precision
        if self.saved_grad_shard is None:
            self.saved_grad_shard = shard
        else:
            self._run("aten::add_", 3 * numel * self.sizes.store, self.sizes.store, stream)
        self.wrapper.offload_gradient(shard, stream)
        self._step_in_backward(stream)
        del shard, padded, unsharded

    def finalize(self) -> None:
        """_catch_all_reshard, _finalize_params: the optimizer's gradient; only frozen units are resharded here."""
        if not self.is_trained and self.is_shown_unsharded:
            self._reshard_in_backward()
        self.hooked_leaves.clear()
        self.ran_pre_backward = False
        self.needs_pre_backward_unshard = False
        self.prefetched = False
        self.post_forward_index = -1
        if not self.wrapper.reduces_gradients:
            return
        if self.wrapper.is_sharded:
            self.grad, self.saved_grad_shard = self.saved_grad_shard, None
        if self.wrapper.offload:
            self.grad = None  # flat_param.grad is _cpu_grad from here on
