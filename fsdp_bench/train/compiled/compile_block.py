"""Compiles one block of a benchmark model, as train/wrapping does, and returns what Inductor wrote for it."""

from __future__ import annotations

import re
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdp_bench.spec.checkpointing_policy import read_policy
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import Checkpointing
from fsdp_bench.train.compiled.triton_kernels import in_place_where_tuned
from fsdp_bench.train.compiled.wrapper_code import Function, UnknownCode, read_function
from fsdp_bench.train.models.transformer import BLOCKS, rotary_tables
from fsdp_bench.train.wrapping.activation_checkpointing import checkpoint_blocks

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""As predictions have it: cuDNN's attention is not among them."""


_IN_WRAPPER = re.compile(r"(?<=^l_self_)(dict_)?modules_+checkpoint_wrapped_module_")
"""How Dynamo names what is inside of checkpoint_wrapper."""


class Case(NamedTuple):
    """Which code of a block is compiled."""

    shape: ModelShape
    dtype: torch.dtype
    checkpointing: Checkpointing
    policy: str | None


class Compiled(NamedTuple):
    """What Inductor wrote."""

    inputs: tuple[str, ...]
    forward: Function
    backward: Function


def compile_block(case: Case, batch: int, length: int) -> Compiled:
    """Compile a block for one batch size and sequence length, on the current CUDA device.

    Raises:
        UnknownCode: if it is not compiled whole, or Inductor wrote what is not known here.
    """
    torch._dynamo.reset()
    shape = case.shape
    model = nn.Sequential(BLOCKS[shape.family](shape)).to(case.dtype).cuda()
    checkpoint_blocks(model, list(model), case.checkpointing, read_policy(case.policy))
    block = model[0]
    names: list[tuple[str, ...]] = []

    def backend(graph: Any, examples: Any) -> Any:
        names.append(tuple(node.name for node in graph.graph.nodes if node.op == "placeholder"))
        return compile_fx(graph, examples)

    block.compile(fullgraph=True, backend=backend)
    inputs = _inputs(shape, case.dtype, batch, length)

    def step() -> None:
        out = block(*inputs)
        out.backward(torch.zeros_like(out))

    with sdpa_kernel(_KERNELS), patch.object(AsyncCompile, "triton", _no_kernel):
        _, sources = run_and_get_code(step)
    if len(names) != 1 or len(sources) != 2:
        raise UnknownCode(f"{len(names)} graphs and {len(sources)} functions instead of one, and one each way")
    forward, backward = (read_function(source, in_place_where_tuned) for source in sources)
    return Compiled(tuple(_plain_name(name, block, BLOCKS[shape.family]) for name in names[0]), forward, backward)


def _no_kernel(*_args: Any, **_options: Any) -> Any:
    """Return what stands for a kernel of Triton, which need not be compiled: only the code around it is read."""
    return SimpleNamespace(run=lambda *_args, **_options: None)


def _inputs(shape: ModelShape, dtype: torch.dtype, batch: int, length: int) -> tuple[Tensor, ...]:
    x = torch.zeros(batch, length, shape.hidden_size, device="cuda", dtype=dtype, requires_grad=True)
    if shape.family is Family.GPT2:
        return (x,)
    return x, *rotary_tables(length, shape.head_dim, x.device, dtype)


def _plain_name(name: str, block: nn.Module, kind: type[nn.Module]) -> str:
    """Return the parameter, or ``i:0`` for the first input, that Dynamo has given a name such as l_x_bsd_."""
    known = {}
    for index, argument in enumerate(list(signature(kind.forward).parameters)[1:]):
        known[f"l_{argument.lower()}_"] = known[f"l_args_{index}_"] = f"i:{index}"
    for parameter, _ in block.named_parameters():
        *modules, own = parameter.split(".")
        plain = ".".join([*modules, own]).replace("_checkpoint_wrapped_module.", "")
        known["l_self_" + "".join(f"modules_{module}_" for module in modules) + f"parameters_{own}_"] = plain
    short = _IN_WRAPPER.sub("", name.lower())
    if short not in known:
        raise UnknownCode(f"an input {name}")
    return known[short]
