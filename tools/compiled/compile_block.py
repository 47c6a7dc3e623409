"""Compiles one block as train/wrapping does, and returns what Inductor wrote for it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config, memory
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from fsdp_bench.spec.checkpointing_policy import read_policy
from fsdp_bench.spec.recording.compiled import CompiledKind, Order
from fsdp_bench.spec.setup import Float8
from fsdp_bench.train.wrapping.activation_checkpointing import checkpoint_blocks
from fsdp_bench.train.wrapping.wrap import convert_to_float8
from tools.compiled.wrapper_code import Compiled, TritonKernel, UnknownCode, read_function

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""Not cuDNN's attention, which saves tensors of the same sizes for the backward pass as FlashAttention."""


class Subject(NamedTuple):
    """A block on the current CUDA device, and what runs it forward and backward in its model."""

    model: nn.Module
    block: nn.Module
    step: Callable[[], None]


def compile_block(subject: Subject, kind: CompiledKind) -> Compiled:
    """Compile a block for the sizes of its inputs.

    Raises UnknownCode if it is not compiled whole, or Inductor wrote what is not known here.
    """
    torch._dynamo.reset()
    gc.collect()  # models that were compiled before
    block = subject.block
    convert_to_float8([block], kind.float8)
    parameters = {id(parameter): name for name, parameter in block.named_parameters()}
    if kind.is_fsdp1:
        parameters = _views_of_flat_parameter(block)
    replaced = checkpoint_blocks(subject.model, [block], kind.checkpointing, read_policy(kind.policy))
    compiled: Any = replaced.get(block, block)
    names: list[tuple[str, ...]] = []
    given: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        run: Any = compile_fx(graph, examples)

        def run_named(*args: Any) -> Any:
            names.append(tuple(_name(arg, parameters, given) for arg in args))
            return run(*args)

        return run_named

    compiled.compile(fullgraph=True, backend=backend)
    run_compiled = compiled._compiled_call_impl

    def note_inputs(*args: Any, **kwargs: Any) -> Any:
        given[:] = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return run_compiled(*args, **kwargs)

    compiled._compiled_call_impl = note_inputs
    order = nullcontext() if kind.float8 is Float8.NONE else forced_order(kind.order)
    with sdpa_kernel(_KERNELS), patch.object(AsyncCompile, "triton", _no_kernel), order:
        try:
            _, sources = run_and_get_code(subject.step)
        except TorchDynamoException as error:
            raise UnknownCode(f"torch.compile: {str(error).strip().splitlines()[0]}") from error
        except torch.OutOfMemoryError as error:
            raise UnknownCode("the GPU's memory ran out") from error
    if len(names) != 1 or len(sources) != 2:
        raise UnknownCode(f"{len(names)} graphs and {len(sources)} functions instead of one, and one each way")
    forward, backward = (read_function(source, read_kernel) for source in sources)
    return Compiled(names[0], forward, backward)


def _views_of_flat_parameter(block: nn.Module) -> dict[int, str]:
    """Put views of one flat parameter in the place of a block's parameters, as FSDP1 does; return their names.

    They are no parameters to the compiler, and cost memory where they are saved for backward
    (static_lifetime_input_nodes in torch/_functorch/partitioners.py): it then saves their copies in float8.
    """
    given = dict(block.named_parameters())
    sizes = [parameter.numel() for parameter in given.values()]
    dtype = next(iter(given.values())).dtype
    flat = nn.Parameter(torch.zeros(sum(sizes), device="cuda", dtype=dtype))
    names: dict[int, str] = {}
    for (name, parameter), part in zip(given.items(), flat.split(sizes), strict=True):
        path, _, attribute = name.rpartition(".")
        delattr(block.get_submodule(path), attribute)
        view = part.view(parameter.shape)
        setattr(block.get_submodule(path), attribute, view)
        names[id(view)] = name
    for module in block.modules():  # _annotate_modules_for_dynamo in torch/distributed/fsdp/_dynamo_utils.py
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = True  # type: ignore[assignment]
    return names


def _no_kernel(*_args: Any, **_options: Any) -> Any:
    """Return what stands for a kernel of Triton, which need not be compiled: only the code around it is read."""
    return SimpleNamespace(run=lambda *_args, **_options: None)


def _name(arg: Any, parameters: dict[int, str], given: list[Any]) -> str:
    """Return the parameter, or ``i:0`` for the first tensor that the block is given."""
    if id(arg) in parameters:
        return parameters[id(arg)]
    for index, one in enumerate(given):
        if one is arg:
            return f"i:{index}"
    raise UnknownCode(f"an input that is neither a parameter nor given to the block: {type(arg).__name__}")


_METHODS = {Order.BREADTH_FIRST: memory.topological_sort_bfs, Order.DEPTH_FIRST: memory.topological_sort_dfs}


@contextmanager
def forced_order(order: Order) -> Iterator[None]:
    """Let Inductor write backward in an order, forward as it is, and neither with reuse."""

    def reorder(nodes: list[Any], *planned: Any) -> list[Any]:
        memory.prepare_planning_info(nodes, *planned)  # notes what the methods sort by
        method = _METHODS.get(order) if V.graph.is_backward else None
        return nodes if method is None else method(nodes)

    with patch.object(memory, "reorder_for_peak_memory", reorder), config.patch(allow_buffer_reuse=False):
        yield


def read_kernel(name: str, source: str) -> TritonKernel:
    """Return what is to be known of a kernel.

    Those with several configurations are tuned: CachingAutotuner.run in torch/_inductor/runtime/triton_heuristics.py.

    ``source`` is the module in which Inductor wrote it.
    """
    kernel = getattr(PyCodeCache.load(source), name)
    arguments = enumerate(kernel.fn.arg_names)
    changed = tuple(index for index, argument in arguments if argument in kernel.mutated_arg_names)
    return TritonKernel(changed, is_tuned=len(kernel.configs) > 1)
