"""The optimizer of a setup: what it keeps, what a step allocates for a moment, and how many bytes it moves."""

from collections.abc import Callable, Iterable
from itertools import groupby
from math import prod

from fsdp_bench.simulate.compiled.block import tune
from fsdp_bench.simulate.events import Category, Stream
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import FP32, Kernels
from fsdp_bench.simulate.optimizers.shards import STEP_BYTES, Shard, counts, marked
from fsdp_bench.simulate.optimizers.torch_optim import (
    MUON_PASSES,
    adafactor_step,
    for_loop_step,
    foreach_step,
    issue_newton_schulz,
    muon_step,
    takes_muon,
)
from fsdp_bench.simulate.tape import Storage, Tape
from fsdp_bench.spec.setup import OptimizerKind

# -- torchao.optim.AdamW8bit (torchao/optim/adam.py, subclass_8bit.py), whose step torch.compile compiles --------------
#
# The step allocates what the compiled code does, as the memory history of torchao 0.18 with torch 2.13 shows on the
# stand-in for NVIDIA's libraries. In the first step it is compiled for each shape of a parameter, and Inductor tunes
# the kernels that are elementwise and not tiny (compiled/block.py).

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


# -- The optimizer of a setup ------------------------------------------------------------------------------------------


def state_sizes(kernels: Kernels, kind: OptimizerKind, shard: Shard) -> list[tuple[str, int]]:
    """Return what an optimizer keeps of a shard between steps: the name and the bytes of each tensor on the device.

    torch/optim/adamw.py, _adafactor.py (_init_group), _muon.py; torchao/optim/adam.py (_AdamBase._new_buffer).
    """
    if kind is OptimizerKind.SGD or not counts(shard):
        return []
    num_bytes = shard.numel * shard.itemsize
    if kind is OptimizerKind.MUON and takes_muon(shard):
        return [("momentum_buffer", num_bytes)]
    has_step = not kernels.is_cuda or kind is OptimizerKind.ADAMW_FUSED
    step = [("step", STEP_BYTES)] if has_step else []
    if kind is OptimizerKind.ADAFACTOR and shard.is_matrix:
        return [*step, ("row_var", num_bytes // shard.shape[-1]), ("col_var", num_bytes // shard.shape[-2])]
    if kind is OptimizerKind.ADAFACTOR:
        return [*step, ("variance", num_bytes)]
    assert kind.is_adamw_of_torch or kind in (OptimizerKind.ADAMW_8BIT, OptimizerKind.MUON), kind
    moment = bytes_of_moment(shard.numel, shard.itemsize) if kind is OptimizerKind.ADAMW_8BIT else [num_bytes]
    return [*step, *((name, size) for name in ("exp_avg", "exp_avg_sq") for size in moment)]


def states(op: Operators, kind: OptimizerKind, shards: list[Shard]) -> list[Storage]:
    """Allocate what an optimizer keeps between steps, as its first step does: Muon's own first, then its AdamW's."""
    tape, held = op.tape, list[Storage]()
    if kind is OptimizerKind.SGD:
        return held
    is_muon = kind is OptimizerKind.MUON
    for of_muon in (True, False) if is_muon else (False,):
        for shard in marked(tape, tape.phase, [one for one in shards if of_muon == (is_muon and takes_muon(one))]):
            sizes = state_sizes(op.kernels, kind, shard)
            held += [tape.storage(size, name, Category.OPTIMIZER_STATE) for name, size in sizes]
    return held


_STEPS: dict[OptimizerKind, Callable[[Operators, list[Shard]], None] | None] = {
    OptimizerKind.SGD: None,
    OptimizerKind.ADAMW_FUSED: None,
    OptimizerKind.ADAMW_FOREACH: foreach_step,
    OptimizerKind.ADAMW_FOR_LOOP: for_loop_step,
    OptimizerKind.ADAFACTOR: adafactor_step,
    OptimizerKind.ADAMW_8BIT: adamw_8bit_step,
    OptimizerKind.MUON: muon_step,
}


def step(op: Operators, kind: OptimizerKind, shards: list[Shard]) -> None:
    """Allocate and free what one step needs for a moment."""
    if (one := _STEPS[kind]) is not None:
        one(op, shards)


def temporary_bytes(kind: OptimizerKind, sizes: list[int], num_bytes: int) -> int:
    """Return what ``step`` needs for a moment, where it updates pieces of flat parameters of these sizes in bytes.

    ``num_bytes`` is their sum over all blocks, of which one may stand for others.
    """
    pairs = list(zip([0, *sizes], sizes, strict=False))  # the variables of the piece before live on
    if kind is OptimizerKind.ADAMW_FOREACH:
        return num_bytes
    if kind is OptimizerKind.ADAMW_FOR_LOOP:
        return max((2 * size + before for before, size in pairs), default=0)
    if kind is OptimizerKind.ADAFACTOR:
        return max((size + before + max(size, before) for before, size in pairs), default=0)
    return 0


def first_step(op: Operators, kind: OptimizerKind, shards: list[Shard]) -> list[Storage]:
    """Step for the first time, where a parameter's states are made when its turn comes; return the states."""
    held: list[Storage] = []
    for shard in shards:
        held += states(op, kind, [shard])
        step(op, kind, [shard])
    return held


_PASSES = {
    OptimizerKind.SGD: 3,
    OptimizerKind.ADAMW_FUSED: 7,
    OptimizerKind.ADAMW_FOREACH: 21,
    OptimizerKind.ADAMW_FOR_LOOP: 21,
    OptimizerKind.ADAFACTOR: 20,
    OptimizerKind.ADAMW_8BIT: 7,
    OptimizerKind.MUON: 21,
}
"""Reads and writes of an element: a parameter, its gradient and two moments, once in a fused step.

AdamW otherwise: once or twice in each of eight: mul_, lerp_, mul_, addcmul_, sqrt, div_, add_, addcdiv_
(torch/optim/adamw.py). Adafactor (_adafactor.py), of what has one dimension: norm, mul, lerp_, clone, clamp_, rsqrt_,
mul_, norm, add_.
"""

_ADAFACTOR_OF_A_MATRIX = 17
"""Adafactor of a matrix: norm, the norms of rows and of columns, mm, div_, clamp_, rsqrt_, mul_, norm, add_."""


def _moved_bytes(kind: OptimizerKind, shard: Shard) -> int:
    if kind is OptimizerKind.ADAMW_8BIT and is_quantized(shard.numel):
        # A kernel reads the parameter, the gradient and both codes, and writes the parameter and both codes. Where
        # it is not fused with another, that one reads the gradient and both codes, and writes both moments in fp32.
        one = 3 * shard.itemsize + 4
        return shard.numel * (one if is_one_kernel(shard) else one + shard.itemsize + 2 + 4 * FP32)
    if kind is OptimizerKind.MUON and takes_muon(shard):
        return MUON_PASSES * shard.numel * shard.itemsize
    passes = _ADAFACTOR_OF_A_MATRIX if kind is OptimizerKind.ADAFACTOR and shard.is_matrix else _PASSES[kind]
    return passes * shard.numel * shard.itemsize


def issue(tape: Tape, kind: OptimizerKind, shards: list[Shard], on_host: bool) -> None:
    """Issue a step's work, block by block; where it is in host memory, the host does it."""
    for block, group in groupby(shards, key=lambda shard: shard.block):
        tape.mark("optimizer", block)
        issue_one(tape, kind, list(group), on_host)
    tape.mark("optimizer", -1)


def issue_one(tape: Tape, kind: OptimizerKind, shards: list[Shard], on_host: bool = False) -> None:
    """Issue the work of one optimizer, on the current stream."""
    dims = (len(shards), sum(shard.numel for shard in shards))
    num_bytes = sum(_moved_bytes(kind, shard) for shard in shards)
    (tape.host_work if on_host else tape.update)(f"optimizer {kind.value}", num_bytes, dims)
    if kind is OptimizerKind.MUON and not on_host:
        issue_newton_schulz(tape, shards)


# -- One optimizer a parameter, called in backward as soon as its gradient is reduced ----------------------------------
#
# fully_shard calls the hooks of Tensor.register_post_accumulate_grad_hook where it reduces (foreach_reduce in
# _fsdp_collectives.py), FullyShardedDataParallel the optimizers in ``_in_backward_optimizers``
# (_post_backward_use_sharded_grad_views in _runtime_utils.py): both on the stream that reduced, from whose pool states
# and temporaries come.


class InBackward:
    """The optimizers of all parameters."""

    def __init__(self, op: Operators, kind: OptimizerKind) -> None:
        self._op = op
        self._kind = kind
        self._states: list[Storage] = []
        self._stepped: set[int] | None = set()
        """Keys of the optimizers that have their states; None: all have."""

    def warm_up(self, shards: list[Shard], stream: Stream) -> None:
        """Restore what a first step on such a stream leaves."""
        self._states, self._stepped = states(self._op, self._kind, shards), None
        multiplies_matrices = self._kind in (OptimizerKind.ADAFACTOR, OptimizerKind.MUON)
        if multiplies_matrices and any(shard.is_matrix for shard in shards):
            self._op.make_workspace(True, stream)

    def step(self, shards: Iterable[tuple[int, Shard]], stream: Stream) -> None:
        """Step the optimizer of each shard, one after another; each has a key."""
        tape = self._op.tape
        before, tape.stream = tape.stream, stream
        for key, shard in shards:
            if not counts(shard):
                continue
            if self._stepped is not None and key not in self._stepped:
                self._stepped.add(key)
                self._states += states(self._op, self._kind, [shard])
            issue_one(tape, self._kind, [shard])
            step(self._op, self._kind, [shard])
        tape.stream = before


# -- torchao.optim.CPUOffloadOptimizer (torchao/optim/cpu_offload.py): AdamW on the CPU, beside parameters on the GPU --
#
# Gradients are copied to the host as soon as they are reduced, parameters back after the step. The GPU keeps gradients
# until then: ``offload_gradients=True`` fails on fully_shard's DTensors, whose record_stream has no sharding strategy.
# Parameters with few elements are left to an optimizer on the GPU.

_MINIMAL_SIZE = 4096
"""CPUOffloadOptimizer's ``minimal_size``: elements of the whole parameter."""

_STREAM = Stream.OPTIMIZER_OFFLOAD


def is_offloaded(shard: Shard) -> bool:
    """Whether its optimizer is on the CPU."""
    return prod(shard.shape) >= _MINIMAL_SIZE


def on_gpu(shards: Iterable[Shard]) -> list[Shard]:
    """Return what an optimizer on the GPU updates."""
    return [shard for shard in shards if not is_offloaded(shard)]


def copy_gradients(tape: Tape, shards: Iterable[Shard], stream: Stream) -> None:
    """Copy each gradient to the host once a stream has reduced it (``backward_hook``)."""
    for shard in shards:
        if is_offloaded(shard):
            tape.wait_stream(_STREAM, stream)
            tape.copy("to_host", shard.numel * shard.itemsize, _STREAM)


def offloaded_step(op: Operators, kind: OptimizerKind, shards: list[Shard]) -> None:
    """CPUOffloadOptimizer.step: the GPU's optimizer, then parameter by parameter the CPU's and the way back."""
    tape = op.tape
    small = on_gpu(shards)
    if small:
        issue(tape, kind, small, on_host=False)
        step(op, kind, small)
    tape.synchronize(_STREAM)
    large = [shard for shard in shards if is_offloaded(shard)]
    for block, group in groupby(large, key=lambda shard: shard.block):
        held = list(group)
        issue(tape, kind, held, on_host=True)
        tape.mark("optimizer", block)
        tape.copy("to_device", sum(shard.numel * shard.itemsize for shard in held), _STREAM)
    tape.mark("optimizer", -1)
    tape.synchronize(_STREAM)
