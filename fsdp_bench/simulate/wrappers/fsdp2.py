"""fully_shard, as torch 2.13 issues it: torch/distributed/fsdp/_fully_shard, symbol by symbol.

Each parameter is sharded alone along dimension 0, padded to the group's size; a unit's parameters are gathered by
one all-gather and its gradients reduced by one reduce-scatter. Names are torch's.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from fsdp_bench.simulate.autograd import Engine, accumulator, operator_node
from fsdp_bench.simulate.events import Category, Queue, Stream
from fsdp_bench.simulate.models.transformer import Loading, Module, SimulatedModel, Weight, fill, whole_weights
from fsdp_bench.simulate.operators.core import Operators, Parameter
from fsdp_bench.simulate.operators.kernel_workspaces import chunk_cat_arguments, split_arguments
from fsdp_bench.simulate.operators.kernels import Sizes, precision_of
from fsdp_bench.simulate.optimizers.dispatch import copy_gradients
from fsdp_bench.simulate.optimizers.shards import Shard
from fsdp_bench.simulate.tape import Storage, Tape, Tensor
from fsdp_bench.simulate.wrappers.protocol import Wrapper
from fsdp_bench.simulate.wrappers.units import Unit
from fsdp_bench.spec.calibration_profile import CASTING_CHUNK_CAT
from fsdp_bench.spec.setup import BackwardPrefetch, Offload, Precision, TrainSetup, Wrap


class FSDPParam:
    """_fsdp_param.py, FSDPParam: one parameter's shard, its gathered self, and its gradients."""

    __slots__ = (
        *("weight", "sizes", "padded_shard_numel", "shard_numel", "gathered_bytes", "padded_numel"),
        *("grad", "accumulated_grad", "all_gather_output", "unsharded", "sharded_post_forward"),
    )

    def __init__(self, tape: Tape, weight: Weight, precision: Precision, group_size: int) -> None:
        self.weight = weight
        self.sizes = sizes = Sizes.of(precision_of(weight.dtype, precision))
        rows = -(-weight.dim0 // group_size)
        self.padded_shard_numel = rows * weight.rest
        self.shard_numel = min(rows, weight.dim0) * weight.rest
        self.gathered_bytes = self.padded_shard_numel * group_size * sizes.compute
        self.padded_numel = self.padded_shard_numel * group_size
        self.grad: Tensor | None = None
        self.accumulated_grad: Tensor | None = None
        self.all_gather_output: Storage | None = None
        self.sharded_post_forward: Storage | None = None
        """_sharded_post_forward_param_data: the part that is kept by reshard_after_forward=N, in the compute dtype."""
        self.unsharded = Parameter(None, weight.numel, sizes.compute, name=weight.name, in_features=weight.rest)
        self.unsharded.node = accumulator(self._accumulate) if weight.is_trained else None
        weight.seen = self.unsharded

    def _accumulate(self, gradient: Tensor) -> None:
        if self.grad is None:
            self.grad = gradient  # AccumulateGrad steals it; a second one is added in place


class ParamGroup:
    """_fsdp_param_group.py, FSDPParamGroup: one unit."""

    def __init__(self, wrapper: "Fsdp2", unit: Unit, weights: list[Weight], post_forward_size: int | None) -> None:
        self.wrapper = wrapper
        self.tape = wrapper.tape
        self.precision = unit.precision
        self.sizes = Sizes.of(unit.precision)
        self.group_size = wrapper.group_size
        self.num_modules = len(unit.modules)
        self.modules_to_run = 0
        """Modules of the unit that have not run in this forward (FSDPState._modules_to_run_forward)."""
        self.params = [FSDPParam(self.tape, weight, self.precision, self.group_size) for weight in weights]
        self.block = weights[0].block if weights else -1
        self.gathered_bytes = sum([param.gathered_bytes for param in self.params])
        self.cast_numel = sum([param.padded_shard_numel for param in self.params if param.sizes.casts])
        self.reduced = [param for param in self.params if param.weight.is_trained]
        """post_backward, fsdp_params_with_grad: frozen parameters are gathered, and have nothing to reduce."""
        self.reduced_numel = sum([param.padded_shard_numel for param in self.reduced])
        self.post_forward_size = post_forward_size
        """Ranks that the parameters are sharded over between forward and backward; None if they stay gathered."""
        self.is_sharded_post_forward = False
        """ShardedState.SHARDED_POST_FORWARD: sharded over fewer ranks than the group's."""
        self.all_gather_result: Storage | None = None
        self.is_unsharded = False
        self.gradient: Storage | None = None
        """The sharded gradients of all parameters: views of one storage (the reduce-scatter's output)."""
        self.all_reduce_state: Storage | None = None
        self.post_forward_index = -1
        self.post_backward_ran = False
        self.in_pre_backward = False

    # -- parameters --------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """foreach_all_gather: copy the shards into one buffer, gather."""
        if self.all_gather_result is not None or self.is_unsharded:
            return
        tape, sizes = self.tape, self.sizes
        copy_in = Stream.ALL_GATHER_COPY_IN
        if self.is_sharded_post_forward:
            tape.wait_event(copy_in, Queue.RESHARD)
        if self.group_size == 1:
            self.all_gather_result = tape.storage(0, "empty", Category.UNSHARDED_PARAMETERS)
            return
        inputs: list[Storage] = []
        gathered = self.gathered_bytes
        own_bytes = gathered // self._gathering_ranks
        group = "post_forward" if self.is_sharded_post_forward else "shard"
        if self.wrapper.offload:
            if not self.is_sharded_post_forward:  # else it is on the device, in the compute dtype
                given = (self._all_gather_input(param, copy_in) for param in self.params)
                inputs += [one for one in given if one is not None]
        elif self.cast_numel:
            # _get_param_all_gather_inputs: one flat buffer in the compute dtype, also from that dtype
            source = sizes.compute if self.is_sharded_post_forward else sizes.store
            numel = self.cast_numel * self.group_size // self._gathering_ranks
            inputs.append(self._unsharded_storage(numel * sizes.compute, copy_in))
            tape.kernel("aten::_foreach_copy_", numel * (source + sizes.compute), source, copy_in)
        self.all_gather_result = self._unsharded_storage(gathered, copy_in)
        tape.kernel("fsdp::all_gather_copy_in", 2 * own_bytes, sizes.compute, copy_in)
        tape.wait_stream(Stream.ALL_GATHER, copy_in)
        tape.collective("all_gather", group, gathered, Stream.ALL_GATHER)
        tape.record_event(Stream.ALL_GATHER, Queue.ALL_GATHER)
        del inputs

    @property
    def _gathering_ranks(self) -> int:
        """Return the size of _all_gather_process_group."""
        if self.is_sharded_post_forward:
            assert self.post_forward_size is not None
            return self.post_forward_size
        return self.group_size

    def _all_gather_input(self, param: FSDPParam, stream: Stream) -> Storage | None:
        """FSDPParam.all_gather_inputs: a shard on the device, in the compute dtype; None where it is so already."""
        numel, sizes, moved = param.padded_shard_numel, param.sizes, None
        if self.wrapper.moves_to_device:
            moved = self._unsharded_storage(numel * sizes.store, stream)
            self.tape.copy("to_device", numel * sizes.store, stream)
        if sizes.casts:
            moved = self._unsharded_storage(numel * sizes.compute, stream)
            self.tape.cast(numel, sizes.store, sizes.compute, stream)
        return moved

    def _unsharded_storage(self, num_bytes: int, stream: Stream) -> Storage:
        return self.tape.storage(num_bytes, "foreach_all_gather", Category.UNSHARDED_PARAMETERS, stream)

    def wait_for_unshard(self, in_forward: bool) -> None:
        """Copy out into one storage a parameter. In forward the buffer lives until the next copy-out."""
        if self.all_gather_result is None:
            return
        previous = self.wrapper.all_gather_state if in_forward else None  # torch's local holds it to the end
        tape = self.tape
        if in_forward:
            if previous is not None:
                tape.wait_event(Stream.ALL_GATHER_COPY_IN, Queue.COPY_OUT)
            self.wrapper.all_gather_state = None
        if self.group_size > 1:
            tape.wait_event(Stream.COMPUTE, Queue.ALL_GATHER)
        for param in self.params:
            moved = self._input_alone(param) if self.group_size == 1 else None
            param.all_gather_output = self.tape.storage(
                param.gathered_bytes, "alloc_all_gather_outputs", Category.UNSHARDED_PARAMETERS
            )
        if self.group_size > 1:
            self._copy_out()
        self._to_unsharded()
        tape.record_event(Stream.COMPUTE, Queue.COPY_OUT)
        if in_forward and self.group_size > 1:
            self.wrapper.all_gather_state = self.all_gather_result
        else:
            tape.wait_event(Stream.ALL_GATHER_COPY_IN, Queue.COPY_OUT)
        self.all_gather_result = None
        del previous, moved

    def _copy_out(self) -> None:
        """split_with_sizes_copy: of each rank's shard every parameter's part."""
        op, ranks = self.wrapper.op, self._gathering_ranks
        parts = [param.gathered_bytes // ranks for param in self.params]
        _arguments = op.scratch([split_arguments(parts, ranks, op.kernels)], "pack_vecs")
        self.tape.kernel("fsdp::split_with_sizes_copy", 2 * self.gathered_bytes, self.sizes.compute)

    def _input_alone(self, param: FSDPParam) -> Storage | None:
        """Copy the input of a parameter's all-gather, in a world of one; return what was made for that."""
        moved, itemsize = self._all_gather_input(param, Stream.COMPUTE), param.sizes.compute
        self.tape.kernel("aten::copy_", 2 * param.padded_shard_numel * itemsize, itemsize)
        return moved

    def _to_unsharded(self) -> None:
        """FSDPParam.to_unsharded: what was kept after forward is free once it is copied out."""
        self.is_unsharded = True
        self.is_sharded_post_forward = False
        for param in self.params:
            param.sharded_post_forward = None

    def reshard(self) -> None:
        """_to_sharded: free the gathered parameters."""
        if self.is_unsharded:
            for param in self.params:
                param.all_gather_output = None
            self.is_unsharded = False

    def reshard_after_forward(self) -> None:
        """Free the gathered parameters, but for the part of fewer ranks (FSDPParam.to_sharded_post_forward)."""
        if self.post_forward_size is None:
            return
        if self.post_forward_size == self.group_size:
            self.reshard()
            return
        tape, itemsize = self.tape, self.sizes.compute
        for param in self.params:
            num_bytes = param.gathered_bytes // self.post_forward_size
            param.sharded_post_forward = tape.storage(num_bytes, "aten::clone", Category.UNSHARDED_PARAMETERS)
            tape.kernel("aten::clone", 2 * num_bytes, itemsize)
            param.all_gather_output = None
        self.is_unsharded, self.is_sharded_post_forward = False, True
        tape.record_event(Stream.COMPUTE, Queue.RESHARD)

    # -- hooks -------------------------------------------------------------------------------------------------

    def around(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        """FSDPState._pre_forward, the module, FSDPState._post_forward."""
        wrapper, recomputes = self.wrapper, self.wrapper.engine.is_running
        if not self.params:  # a root whose parameters are all in units below
            out = forward(*inputs)
            if out.node is not None:
                out.node.before(wrapper.queue_final_callback)
            wrapper.forget_all_gather()
            return out
        wrapper.hook("_pre_forward")
        if self.in_pre_backward:  # recomputed by checkpointing around this unit
            self.unshard()
            self.wait_for_unshard(in_forward=False)
            return forward(*inputs)
        is_first = self.modules_to_run == 0  # _register_group_forward_hooks
        if is_first:
            self.modules_to_run = self.num_modules
        if self.precision != wrapper.setup.precision:
            inputs = wrapper.cast_forward_inputs(inputs, self.sizes.compute)
        self.unshard()
        self.wait_for_unshard(in_forward=True)
        if is_first:
            inputs = self._register_post_backward(inputs)
            for group in wrapper.forward_prefetch.get(self, ()):
                group.unshard()
        out = forward(*inputs)
        self.modules_to_run -= 1
        if self.modules_to_run == 0:
            self._post_forward(out, recomputes)
        return out

    def _post_forward(self, out: Any, recomputes: bool) -> None:
        """FSDPState._post_forward, after the unit's last module."""
        wrapper = self.wrapper
        wrapper.hook("_post_forward")
        if not recomputes:
            self.reshard_after_forward()
            self.post_forward_index = len(wrapper.post_forward_order)
            wrapper.post_forward_order.append(self)
        if out.node is not None:
            out.node.before(self.pre_backward)
        if self is wrapper.root or recomputes:  # a recomputed unit is its own iter_forward_root
            wrapper.forget_all_gather()

    def _register_post_backward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """RegisterPostBackwardFunction on the inputs that need gradients."""
        if not self.tape.grad_enabled:
            return inputs
        tensors = [t for t in inputs if isinstance(t, Tensor) and t.node is not None]
        if not tensors:
            return inputs

        def backward(_saved: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
            self.post_backward()
            return list(gradients)

        node = operator_node(self.tape, backward, tensors, [], len(tensors))
        outputs = {id(t): Tensor(t.storage, t.numel, t.itemsize, node, index, True) for index, t in enumerate(tensors)}
        return tuple(outputs.get(id(t), t) for t in inputs)

    def pre_backward(self) -> None:
        """Gather, and then the unit that ran before this one in forward (BACKWARD_PRE)."""
        wrapper = self.wrapper
        wrapper.hook("_pre_backward")
        wrapper.queue_final_callback()
        if self.in_pre_backward:  # of several outputs each has the hook; the first that is reached acts
            return
        self.in_pre_backward = True
        self.unshard()
        self.wait_for_unshard(in_forward=False)
        if wrapper.setup.backward_prefetch is BackwardPrefetch.NONE and self is not wrapper.root:
            return
        if self.post_forward_index > 0:
            wrapper.post_forward_order[self.post_forward_index - 1].unshard()

    def post_backward(self) -> None:
        """Free the parameters, reduce the gradients."""
        self.wrapper.hook("_post_backward")
        self.post_backward_ran = True
        self.in_pre_backward = False
        for param in self.params:
            if param.accumulated_grad is not None and param.grad is not None:
                num_bytes = param.grad.numel * (2 * self.sizes.reduce + self.sizes.compute)
                self.tape.kernel("aten::add_", num_bytes, self.sizes.reduce)
                param.grad = None  # unsharded_accumulated_grad += grad
        if not self.wrapper.reduces_gradients:
            self.reshard()
            self._to_accumulated_grads()
            return
        gradients: list[Tensor] = []
        dtype = self.precision.compute
        for param in self.params:
            if param.accumulated_grad is not None:
                gradients.append(param.accumulated_grad)
                dtype = self.precision.reduce
                param.accumulated_grad = None
            elif param.grad is not None:
                gradients.append(param.grad)
                param.grad = None
        self.reshard()
        if self.wrapper.reduce_scatter_states:
            self.tape.wait_event(Stream.COMPUTE, Queue.REDUCE_SCATTER)
        self.wrapper.reduce_scatter_states.clear()
        self.all_reduce_state = None
        self._reduce(gradients, dtype)

    def _to_accumulated_grads(self) -> None:
        """to_accumulated_grad_if_needed: keep unreduced gradients in the reduction dtype."""
        sizes = self.sizes
        if not sizes.reduces_in_other_dtype:
            return
        for param in self.params:
            gradient, param.grad = param.grad, None
            if gradient is not None:
                param.accumulated_grad = self.tape.tensor(
                    gradient.numel, sizes.reduce, "to_accumulated_grad_if_needed", Category.GRADIENTS
                )
                self.tape.cast(gradient.numel, sizes.compute, sizes.reduce)
            del gradient

    def _copy_in(self, gradients: list[Tensor], dtype: str) -> None:
        """chunk_cat: of every gradient each rank's part; one kernel, but for casts that it does not know."""
        sizes, to, itemsize = self.sizes, self.wrapper.setup.precision.reduce, gradients[0].itemsize
        if dtype == to or (dtype, to) == ("bf16", "fp32"):
            inside = [chunk_cat_arguments([param.padded_shard_numel * sizes.reduce for param in self.reduced])]
        else:  # aten/native/TensorShape.cpp, _pad_chunk
            inside = [p.padded_numel * itemsize for p in self.reduced if p.weight.dim0 % self.group_size]
        _inside = self.wrapper.op.scratch(inside, "chunk_cat")
        written = sum([param.padded_numel for param in self.reduced]) * sizes.reduce
        name = "fsdp::chunk_cat" if dtype == to else CASTING_CHUNK_CAT
        self.tape.kernel(name, itemsize * sum([gradient.numel for gradient in gradients]) + written, itemsize)

    def _reduce(self, gradients: list[Tensor], dtype: str) -> None:
        """foreach_reduce: copy into one buffer, reduce-scatter, all-reduce between groups, cast, accumulate."""
        if not gradients:
            return
        tape, sizes, wrapper = self.tape, self.sizes, self.wrapper
        last = gradients[-1] if self.group_size > 1 else None  # the variable of a loop in foreach_reduce
        numel = sum([param.padded_numel for param in self.reduced])
        reduce_input = tape.storage(numel * sizes.reduce, "foreach_reduce", Category.REDUCTION_BUFFERS)
        self._copy_in(gradients, dtype)
        gradients.clear()
        stream = Stream.REDUCE_SCATTER
        tape.wait_stream(stream, Stream.COMPUTE)
        stays = self.gradient is None and not wrapper.moves_to_device
        kept = Category.GRADIENTS if stays else Category.REDUCTION_BUFFERS
        first = Category.REDUCTION_BUFFERS if sizes.casts_back else kept
        output = tape.storage(self.reduced_numel * sizes.reduce, "reduce_scatter output", first, stream)
        if self.group_size > 1:
            wrapper.divide(numel, stream)
            tape.collective("reduce_scatter", "shard", numel * sizes.reduce, stream)
        else:
            tape.kernel("aten::copy_", 2 * numel * sizes.reduce, sizes.reduce, stream)
        tape.record_event(stream, Queue.REDUCE_SCATTER)
        after = stream
        if wrapper.all_reduces:
            after = Stream.ALL_REDUCE
            tape.wait_stream(after, stream)
            tape.collective("all_reduce", "replicate", self.reduced_numel * sizes.reduce, after)
        if wrapper.copies_messages and self.group_size > 1:
            tape.storage(numel * sizes.reduce, "gloo's copy", Category.REDUCTION_BUFFERS, stream)
        if wrapper.all_reduces:
            self.all_reduce_state = output
        if sizes.casts_back:
            output = tape.storage(self.reduced_numel * sizes.store, "_to_dtype_if_needed", kept, after)
            tape.cast(self.reduced_numel, sizes.reduce, sizes.store, after)
        self._accumulate(output, after)
        wrapper.reduce_scatter_states.append(reduce_input)
        del last

    def _accumulate(self, reduced: Storage, stream: Stream) -> None:
        """The rest of foreach_reduce: the sharded gradients, and the hooks in ``_post_accumulate_grad_hooks``."""
        wrapper, num_bytes = self.wrapper, self.reduced_numel * self.sizes.store
        if wrapper.moves_to_device:  # the shard goes to the host, where it is added
            self.tape.copy("to_host", num_bytes, stream)
        elif wrapper.in_backward is not None:  # which frees the gradients
            wrapper.in_backward.step(self.shards(), stream)
        elif self.gradient is None:
            self.gradient = reduced
        else:
            self.tape.kernel("aten::add_", 3 * num_bytes, self.sizes.store, stream)
        if wrapper.setup.offload is Offload.OPTIMIZER:
            copy_gradients(self.tape, [shard for _, shard in self.shards()], stream)

    def shards(self) -> Iterator[tuple[int, Shard]]:
        """Yield each parameter's shard with a key of its own."""
        offset = 0
        for param in self.reduced:
            weight = param.weight
            yield id(weight), Shard(param.shard_numel, self.sizes.store, weight.block, True, weight.shape, offset)
            offset += param.padded_shard_numel


def _children_first(module: Module) -> Iterator[Weight]:
    """_get_managed_modules: the weights of a module, those of its children before its own."""
    for child in module.children:
        yield from _children_first(child)
    yield from module.weights


class Fsdp2(Wrapper):
    """The units of one model and what they share (FSDPCommContext, FSDPStateContext)."""

    def __init__(
        self, op: Operators, engine: Engine, model: SimulatedModel, units: list[Unit], setup: TrainSetup
    ) -> None:
        super().__init__(op, engine, setup)
        self.moves_to_device = self.offload and not self.on_host
        self.all_reduces = setup.strategy.is_hybrid
        self.all_gather_state: Storage | None = None
        self.reduce_scatter_states: list[Storage] = []
        self.post_forward_order: list[ParamGroup] = []
        self.forward_prefetch: dict[ParamGroup, tuple[ParamGroup, ...]] = {}
        taken: set[int] = set()
        groups: dict[int, ParamGroup] = {}
        for unit in [*units, Unit((model,), setup.precision, stays_gathered=True)]:
            managed = [weight for module in unit.modules for weight in _children_first(module)]
            weights = [weight for weight in dict.fromkeys(managed) if id(weight) not in taken]
            taken.update(map(id, weights))
            group = ParamGroup(self, unit, weights, self._post_forward_size(unit))
            for module in unit.modules:
                groups[id(module)] = group
                module.put_around(group.around)
        self.loading = model.loading
        self.wrapping_order = list(dict.fromkeys(groups.values()))
        self.weights = model.all_weights
        """In the order of nn.Module.parameters, in which they are filled."""
        self.root = groups[id(model)]
        found = [groups[id(module)] for module in model.all_modules() if id(module) in groups]
        self.groups = list(dict.fromkeys(found))
        """In the order of FSDPStateContext.all_states."""
        if setup.forward_prefetch:
            below = self.groups[1:]
            if setup.wrap is Wrap.BLOCK_AND_ENDS:  # train/wrapping/wrappers.py knows in which order these run
                below = [groups[id(unit.modules[0])] for unit in units]
            self.forward_prefetch = {unit: (after,) for unit, after in pairwise(below)}

    def _post_forward_size(self, unit: Unit) -> int | None:
        """_get_post_forward_mesh_info: over how many ranks a unit is sharded after forward; None if it is not."""
        if unit.stays_gathered or not self.setup.strategy.reshards_after_forward:
            return None
        return self.setup.reshard_after_forward or self.group_size

    def shards(self, model: Module) -> list[Shard]:
        """Return what the optimizer updates, in the order of model.parameters(): unpadded shards."""
        held = dict(shard for group in self.groups for shard in group.shards())
        return [held[id(w)] for w in model.all_weights if w.is_trained and held[id(w)].numel]

    def load(self) -> list[Storage]:
        """Return the shards, on the device but with offload."""
        return self._move() if self.loading is Loading.MOVED else self._fill()

    def _move(self) -> list[Storage]:
        """fully_shard on a model in host memory: a unit's parameters whole, their shards; then the whole ones go.

        _move_states_to_device in _fsdp_init.py; FSDPParam._init_sharded_param, which with offload moves each back.
        """
        tape, held = self.tape, list[Storage]()
        for group in self.by_block(self.wrapping_order):
            whole = [storage for p in group.params for storage in whole_weights(tape, [p.weight], p.sizes.store)]
            for param in group.params:
                num_bytes = param.padded_shard_numel * param.sizes.store
                shard = tape.storage(num_bytes, "aten::new_zeros", Category.PARAMETERS)
                held += [] if self.moves_to_device else [shard]
                del shard
            del whole
        return held

    def _fill(self) -> list[Storage]:
        """Allocate every shard, and fill those of the benchmark's models (train/wrapping/wrappers.py)."""
        tape = self.tape
        held = []
        for group in self.by_block(self.groups):
            for param in group.params:
                if not self.moves_to_device:
                    num_bytes = param.padded_shard_numel * param.sizes.store
                    held.append(tape.storage(num_bytes, "to_empty", Category.PARAMETERS))
        if self.loading is Loading.IN_PLACE:
            tape.mark_block(-1)
            return held
        _whole = _shard = None
        param_of = {id(param.weight): param for group in self.groups for param in group.params}
        for weight in self.by_block(self.weights):
            param = param_of[id(weight)]
            _whole = tape.storage(weight.numel * param.sizes.store, "aten::empty", Category.TEMPORARY)
            fill(tape, weight)
            _shard = tape.storage(param.shard_numel * param.sizes.store, "distribute_tensor", Category.TEMPORARY)
        return held

    def host_tensors(self) -> list[tuple[int, int]]:
        """Return elements and block of each pinned tensor with offload: padded shards, and gradients like them."""
        return [(p.padded_shard_numel * p.sizes.store, p.weight.block) for group in self.groups for p in group.params]

    def zero_grad(self) -> None:
        """optimizer.zero_grad(set_to_none=True)."""
        for group in self.by_block(self.groups):
            group.gradient = None

    def divide(self, numel: int, stream: Stream) -> None:
        """_get_gradient_divide_factors: NCCL averages fp32 and bf16 itself; fp16 and gloo are divided before."""
        if self.copies_messages or self.setup.precision.reduce == "fp16":
            self.tape.kernel("aten::div_", 2 * numel * self.sizes.reduce, self.sizes.reduce, stream)

    def forget_all_gather(self) -> None:
        """FSDPState._post_forward of the root: free the last all-gather's output."""
        if self.all_gather_state is not None:
            self.tape.wait_event(Stream.ALL_GATHER_COPY_IN, Queue.COPY_OUT)
            self.all_gather_state = None

    def final_callback(self) -> None:
        """_root_post_backward_final_callback."""
        for group in self.by_block(self.groups):
            if group.params and not group.post_backward_ran:
                group.post_backward()
            group.post_backward_ran = group.in_pre_backward = False
            group.all_reduce_state = None
            if group.all_gather_result is not None:
                if self.group_size > 1:
                    self.tape.wait_event(Stream.COMPUTE, Queue.ALL_GATHER)
                group.all_gather_result = None
        for stream in (Stream.REDUCE_SCATTER, Stream.ALL_REDUCE):
            self.tape.wait_stream(Stream.COMPUTE, stream)
        if self.moves_to_device and self.reduces_gradients:
            self.tape.synchronize(Stream.COMPUTE)
        self.post_forward_order.clear()
        if self.reduce_scatter_states:
            self.tape.wait_event(Stream.COMPUTE, Queue.REDUCE_SCATTER)
        self.reduce_scatter_states.clear()
