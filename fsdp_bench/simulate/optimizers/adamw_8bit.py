"""torchao.optim.AdamW8bit (torchao/optim/adam.py, subclass_8bit.py), whose step torch.compile compiles.

The step allocates what the compiled code does, as the memory history of torchao 0.18 with torch 2.13 shows on the
stand-in for NVIDIA's libraries. In the first step it is compiled for each shape of a parameter, and Inductor tunes the
kernels that are elementwise and not tiny (compiled/block.py).
"""

from __future__ import annotations

from fsdp_bench.simulate.compiled.block import tune
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import FP32
from fsdp_bench.simulate.optimizers.shards import Shard, counts, marked

_BLOCK_SIZE = 256
"""Values that share one scale (AdamW8bit's ``block_size``)."""
_FEWEST_VALUES = 4096
"""The fewest values of a shard that is quantized (_AdamBase._new_buffer)."""
_CODES = 256
"""Values that a byte stands for: the length of ``qmap``."""
_TUNED_FROM = 129
"""Elements from which the two configurations of triton_heuristics.pointwise differ, so that there is a choice."""
_ALIGNED_BYTES = 16
"""torch/_inductor/utils.py, ALIGNMENT: compiled code copies an input that is not, where its first one was."""


def is_quantized(numel: int) -> bool:
    """Whether the moments of a tensor take a byte a value; else they are like the parameter."""
    return numel >= _FEWEST_VALUES and numel % _BLOCK_SIZE == 0


def is_one_kernel(shard: Shard) -> bool:
    """Whether Inductor fuses the whole step, so that nothing is kept between kernels.

    It does where values that share a scale are a row of the tensor: with one dimension, and with rows of 256.
    """
    if not shard.is_matrix:
        return True
    columns = shard.shape[-1]
    return columns in (1, _BLOCK_SIZE, shard.numel)


def bytes_of_moment(numel: int, itemsize: int) -> list[int]:
    """Return the sizes of one moment's tensors: codes, scale and qmap, or one like the parameter."""
    if is_quantized(numel):
        return [numel, numel // _BLOCK_SIZE * FP32, _CODES * FP32]
    return [numel * itemsize]


def adamw_8bit_step(op: Operators, shards: list[Shard]) -> None:
    """single_param_adam, compiled: both moments in fp32 over their scales, before they are quantized."""
    for shard in marked(op.tape, "optimizer", filter(counts, shards)):
        graph = ("single_param_adam", shard.shape, shard.numel, shard.itemsize)
        kernels = [] if graph in op.compiled or not op.kernels.tunes else _tuned(shard)
        is_aligned = shard.offset * shard.itemsize % _ALIGNED_BYTES == 0
        copies = op.compiled.setdefault(graph, is_aligned) and not is_aligned
        gradient = op.temporary(shard.numel, shard.itemsize, "copy_if_misaligned") if copies else None
        if is_quantized(shard.numel) and not is_one_kernel(shard):
            _scales = [op.temporary(shard.numel // _BLOCK_SIZE, FP32, "amax") for _ in range(2)]
            scaled = [op.temporary(shard.numel, FP32, "scale_tensor") for _ in range(2)]
            gradient = None
            if kernels:
                tune(op, kernels.pop(0), saves_memory=True)
            scaled.clear()
            for changed in kernels:
                tune(op, changed, saves_memory=True)
            _scales.clear()
        elif kernels:
            tune(op, kernels[0], saves_memory=True)
        del gradient


def _tuned(shard: Shard) -> list[list[int]]:
    """Return the kernels that are tuned when they first run: bytes of the arguments that each of them changes.

    An argument that is read and written counts twice. Kernels that look for a maximum have one configuration.
    """
    if not is_quantized(shard.numel):
        return [6 * [shard.numel * shard.itemsize]] if shard.numel >= _TUNED_FROM else []
    if is_one_kernel(shard):
        return []
    codes, parameter, scales = shard.numel, shard.numel * shard.itemsize, shard.numel // _BLOCK_SIZE
    scale = [[scales * FP32]] if scales >= _TUNED_FROM else []
    if _BLOCK_SIZE % shard.shape[-1] == 0:  # whole rows share a scale
        return [*scale, [codes]]
    return [[codes, codes, parameter, parameter, codes, codes], *scale]
