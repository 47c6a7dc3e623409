"""Times single operators: matrix products, attention, memory-bound operators, copies, optimizers."""

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle, product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fsdp_bench.spec.calibration_profile import (
    CASTING_CHUNK_CAT,
    AttentionTime,
    CopyTime,
    MatmulTime,
    OperatorTime,
    OptimizerTime,
)
from fsdp_bench.spec.setup import OptimizerKind
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.models.optimizer import build_optimizer

SIDES = {"cpu": (64, 256, 1024, 4096), "cuda": (512, 2048, 8192)}
"""Sides of matrix products. All combinations that are not too large are timed."""
LARGEST_FLOPS = {"cpu": 9e9, "cuda": 1.2e12}
LENGTHS = {"cpu": (128, 512), "cuda": (512, 2048, 8192)}
HEAD_DIMS = (64, 128)
ATTENTION_HEADS = 8
NUMELS = {"cpu": (2**8, 2**15, 2**18, 2**21), "cuda": (2**10, 2**20, 2**24, 2**27)}
PARAMETERS = 4
"""Number of parameters that fully_shard copies together."""
ROW = 256
"""Columns of tensors that are summed, normalised or looked up."""
COPIES = (2**16, 2**22, 2**27)
TENSORS = {"cpu": ((64, 2**16), (64, 2**22), (8, 2**23)), "cuda": ((256, 2**18), (256, 2**24), (8, 2**27))}
"""Pairs of number of tensors and number of elements of all together, for optimizers."""
WARM_BYTES = 2**18
"""Operands up to this size are not rotated: in training, small activations stay in the cache between operators too."""
STATE_BYTES = 16
"""Bytes of an element with its gradient and Adam's two states, in fp32."""
COLD_BYTES = {"cpu": 2**25, "cuda": 2**28}
"""Bytes of all copies of the operands together: more than a core's cache, or a GPU's L2 (60 MB on an H200)."""


ROUNDS = 4


class Stopwatch:
    """Times functions on one device. All ranks call it in the same order, with the same limits.

    The mean counts, not the median: ranks that share cores take turns, and a round in which a rank has a core for
    itself is not like training.
    """

    def __init__(
        self,
        device: torch.device,
        round_seconds: float,
        rounds: int = ROUNDS,
        average: Callable[[list[float]], float] = statistics.fmean,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device = device
        self.round_seconds = round_seconds
        self.rounds = rounds
        self._average, self._clock = average, clock

    def seconds(self, call: Callable[[], object], together: bool = False) -> float:
        """Return the seconds of one call, as the mean over ranks.

        A call is ``together`` if it is a collective, so that every rank must make the same number of calls.
        """
        call()
        once = self._round(call, 1)
        if together:
            once = self._over_ranks(once, dist.ReduceOp.MAX)
        times = max(int(self.round_seconds / max(once, 1e-7)), 1)
        dist.barrier()
        rounds = [self._round(call, times) for _ in range(self.rounds)]
        mean = self._average(rounds)
        if dist.get_backend() == "fake":  # its collectives add nothing up
            return mean
        return self._over_ranks(mean, dist.ReduceOp.SUM) / dist.get_world_size()

    def _round(self, call: Callable[[], object], times: int) -> float:
        self._synchronize()
        begin = self._clock()
        for _ in range(times):
            call()
        self._synchronize()
        return (self._clock() - begin) / times

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _over_ranks(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        reduced = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, operation)
        return float(reduced)


def _copies(num_bytes: int, device: torch.device) -> int:
    """Return how many copies of operands of ``num_bytes`` are used in turn."""
    return max(COLD_BYTES[device.type] // num_bytes, 1)


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes to time."""
    return ("fp32", "bf16", "fp16") if device.type == "cuda" else ("fp32", "bf16")


def matmul_times(watch: Stopwatch) -> Iterator[MatmulTime]:
    """Time matrix products as in a linear layer: forward, and its two gradients."""
    device, sides = watch.device, SIDES[watch.device.type]
    for dtype, (m, n, k) in product(dtypes_of(device), product(sides, repeat=3)):
        if 2 * m * n * k > LARGEST_FLOPS[device.type]:
            continue
        for layout, call in _products(m, n, k, DTYPES[dtype], device):
            yield MatmulTime(layout=layout, dtype=dtype, m=m, n=n, k=k, seconds=watch.seconds(call))


def _products(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls with random numbers: the time of a product depends on the numbers if power is limited."""
    left, right = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    yield "nt", Rotating(F.linear, (left, right.t().contiguous()))
    yield "nn", Rotating(torch.mm, (left, right))
    yield "tn", Rotating(lambda one, other: one.t() @ other, (left.t().contiguous(), right))


class Rotating:
    """Calls an operator with one copy of its operands after the other, and frees all results at once.

    This is as in training. A weight, its gradient and its optimizer states were last used a step ago, so they are read
    from memory and not from a cache. Freed memory went back to the system, so results are in new pages. Small operands
    stay in a cache.
    """

    def __init__(self, operator: Callable[..., object], operands: tuple[Tensor, ...]) -> None:
        self._operator = operator
        num_bytes = sum(operand.numel() * operand.itemsize for operand in operands)
        copies = _copies(num_bytes, operands[0].device) if num_bytes >= WARM_BYTES else 1
        self._sets = cycle([operands, *(tuple(map(torch.clone, operands)) for _ in range(copies - 1))])
        self._copies = copies
        self._held: list[object] = []

    def __call__(self) -> None:
        """Call the operator with the next copy."""
        self._held.append(self._operator(*next(self._sets)))
        if len(self._held) >= self._copies:
            self._held.clear()


def attention_times(watch: Stopwatch) -> Iterator[AttentionTime]:
    """Time causal attention of one sequence, forward alone and backward alone."""
    heads, device = ATTENTION_HEADS, watch.device
    for dtype, length, head_dim in product(dtypes_of(device), LENGTHS[device.type], HEAD_DIMS):
        q, k, v = (
            torch.randn(1, heads, length, head_dim, device=device, dtype=DTYPES[dtype], requires_grad=True)
            for _ in range(3)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradient = torch.randn_like(out)
        calls: dict[bool, Callable[[], object]] = {
            False: lambda q=q, k=k, v=v: F.scaled_dot_product_attention(  # type: ignore[misc]
                q.detach(), k.detach(), v.detach(), is_causal=True
            ),
            True: lambda out=out, q=q, k=k, v=v, gradient=gradient: torch.autograd.grad(  # type: ignore[misc]
                out, (q, k, v), gradient, retain_graph=True
            ),
        }
        for backward, call in calls.items():
            seconds = watch.seconds(call)
            yield AttentionTime(
                backward=backward, dtype=dtype, heads=heads, length=length, head_dim=head_dim, seconds=seconds
            )


def operator_times(watch: Stopwatch) -> Iterator[OperatorTime]:
    """Time the memory-bound operators of a step, under the names that predictions use."""
    device = watch.device
    for dtype, numel in product(dtypes_of(device), NUMELS[device.type]):
        itemsize = DTYPES[dtype].itemsize
        for name, (passes, operator) in _operators(DTYPES[dtype], device).items():
            operands = tuple(torch.rand(numel, device=device, dtype=DTYPES[dtype]) for _ in range(2))
            seconds = watch.seconds(Rotating(operator, operands))
            num_bytes = round(passes * numel * itemsize)
            yield OperatorTime(operator=name, dtype=dtype, num_bytes=num_bytes, seconds=seconds)


def _operators(dtype: torch.dtype, device: torch.device) -> dict[str, tuple[float, Callable[[Tensor, Tensor], object]]]:
    """Return, by name, how often an element is read or written, and a call with two tensors."""
    aten = torch.ops.aten
    weight = torch.ones(ROW, device=device, dtype=dtype)
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    cast = 1 + other.itemsize / dtype.itemsize
    found: dict[str, tuple[float, Callable[[Tensor, Tensor], object]]] = {
        "aten::add": (3, lambda x, y: x + y),
        "aten::add_": (3, lambda x, y: x.add_(y)),
        "aten::mul": (3, lambda x, y: x * y),
        "aten::mul_out": (2, lambda x, y: torch.mul(x, 0.5, out=y)),
        "aten::div_": (2, lambda x, y: x.div_(1.0)),
        "aten::neg": (2, lambda x, y: -x),
        "aten::pow": (2, lambda x, y: x.pow(2)),
        "aten::cat": (2, lambda x, y: torch.cat([x[: len(x) // 2], x[len(x) // 2 :]])),
        "fsdp::chunk_cat": (2, lambda x, y: _chunk_cat(x, dtype)),
        CASTING_CHUNK_CAT: (cast, lambda x, y: _chunk_cat(x, other)),
        "fsdp::split_with_sizes_copy": (2, _split_with_sizes_copy),
        "aten::clone": (2, lambda x, y: x.clone()),
        "aten::copy_": (2, lambda x, y: y.copy_(x)),
        "aten::_to_copy": (cast, lambda x, y: x.to(other)),
        "aten::sum": (1, lambda x, y: x.view(-1, ROW).sum(0)),
        "aten::mean": (1, lambda x, y: x.view(-1, ROW).mean(1)),
        "aten::silu": (2, lambda x, y: F.silu(x)),
        "aten::silu_backward": (3, aten.silu_backward),
        "aten::gelu": (2, lambda x, y: F.gelu(x, approximate="tanh")),
        "aten::gelu_backward": (3, lambda x, y: aten.gelu_backward(x, y, approximate="tanh")),
        "aten::embedding": (2, lambda x, y: aten.embedding(x.view(-1, ROW), _indices(x))),
        "aten::embedding_dense_backward": (
            4,
            lambda x, y: aten.embedding_dense_backward(x.view(-1, ROW), _indices(x), len(x) // ROW, -1, False),
        ),
        "aten::native_layer_norm": (2, lambda x, y: F.layer_norm(x.view(-1, ROW), [ROW], weight, weight)),
        "aten::native_layer_norm_backward": (5, lambda x, y: _norm_backward(x.view(-1, ROW), weight)),
        "aten::_log_softmax": (2, lambda x, y: F.log_softmax(x.view(-1, ROW), 1)),
        "aten::_log_softmax_backward_data": (
            4,
            lambda x, y: aten._log_softmax_backward_data(x.view(-1, ROW), y.view(-1, ROW), 1, dtype),
        ),
    }
    if device.type == "cuda":
        found["aten::_fused_rms_norm"] = (2, lambda x, y: F.rms_norm(x.view(-1, ROW), [ROW], weight))
    return found


def _chunk_cat(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy gradients into one buffer for two ranks, as foreach_reduce_scatter_copy_in does (fully_shard)."""
    out = torch.empty(2, x.numel() // 2, device=x.device, dtype=dtype)
    torch._chunk_cat(_matrices(x), 0, 2, out=out)
    return out


def _split_with_sizes_copy(x: Tensor, y: Tensor) -> None:
    """Copy the output of an all-gather of two ranks into parameters, as foreach_all_gather_copy_out does."""
    parts = [part.view(2, -1) for part in _matrices(y)]
    torch.split_with_sizes_copy(x.view(2, -1), [part.shape[1] for part in parts], dim=1, out=parts)


def _matrices(x: Tensor) -> list[Tensor]:
    """Split a tensor, as a block, into matrices with an even number of rows."""
    parts = x.chunk(PARAMETERS)
    return [part.view(-1, min(ROW, len(part) // 2)) for part in parts]


def _indices(x: Tensor) -> Tensor:
    return torch.arange(len(x) // ROW, device=x.device)


def _norm_backward(rows: Tensor, weight: Tensor) -> object:
    # CPU's kernel wants the statistics in the input's dtype, CUDA's in fp32 (layer_norm_kernel.cu).
    statistics = rows[:, :1] if rows.device.type == "cpu" else rows[:, :1].float()
    return torch.ops.aten.native_layer_norm_backward(
        rows, rows, [ROW], statistics, statistics, weight, weight, [True, True, True]
    )


def copy_times(watch: Stopwatch) -> Iterator[CopyTime]:
    """Time copies between pinned memory and a GPU. On a CPU, yield nothing."""
    if watch.device.type != "cuda":
        return
    for num_bytes in COPIES:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(num_bytes, dtype=torch.uint8, device=watch.device)
        to_device = watch.seconds(lambda h=host, d=device: d.copy_(h, non_blocking=True))  # type: ignore[misc]
        to_host = watch.seconds(lambda h=host, d=device: h.copy_(d, non_blocking=True))  # type: ignore[misc]
        yield CopyTime(direction="to_device", num_bytes=num_bytes, seconds=to_device)
        yield CopyTime(direction="to_host", num_bytes=num_bytes, seconds=to_host)


def optimizer_times(watch: Stopwatch) -> Iterator[OptimizerTime]:
    """Time the steps of AdamW and SGD on the device; on a machine with GPUs also in host memory."""
    places = [("", watch.device)]
    if watch.device.type == "cuda":
        places.append(("host ", torch.device("cpu")))
    kinds = [kind for kind in OptimizerKind if kind.is_adamw_of_torch or kind is OptimizerKind.SGD]
    for (prefix, device), kind in product(places, kinds):
        for num_tensors, numel in TENSORS[device.type]:
            step = _optimizer_step(kind, num_tensors, numel, device)
            yield OptimizerTime(
                kind=prefix + kind.value, num_tensors=num_tensors, num_elements=numel, seconds=watch.seconds(step)
            )


def _optimizer_step(kind: OptimizerKind, num_tensors: int, numel: int, device: torch.device) -> Callable[[], object]:
    """Return a function that runs a step. Sets of tensors are used in turn, so that they are not in the GPU's cache."""
    steps: list[Callable[[], object]] = []
    for _ in range(_copies(STATE_BYTES * numel, device) if device.type == "cuda" else 1):
        parameters = [torch.nn.Parameter(torch.randn(numel // num_tensors, device=device)) for _ in range(num_tensors)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        steps.append(build_optimizer(parameters, kind, 1e-4).step)
        steps[-1]()
    rotation = cycle(steps)
    return lambda: next(rotation)()
