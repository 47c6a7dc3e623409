"""AdamW8bit: the states that it keeps and the allocations of its compiled step, against torchao's own code."""

from __future__ import annotations

from math import prod

import pytest

from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.optimizers.dispatch import states, step
from fsdp_bench.simulate.optimizers.shards import Shard
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.spec.setup import OptimizerKind
from tests.on_stand_in.interpreters import allocations_on_gpu

STEPS = """
from torchao.optim import AdamW8bit

for dtype, shape in json.load(sys.stdin):
    parameter = torch.zeros(*shape, dtype=getattr(torch, dtype), device="cuda", requires_grad=True)
    optimizer = AdamW8bit([parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    parameter.grad = torch.zeros_like(parameter)
    allocated(optimizer.step)
    kept = [
        [part.numel() * part.element_size() for part in (state.codes, state.scale, state.qmap)]
        if hasattr(state, "codes") else [state.numel() * state.element_size()]
        for state in (optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))
    ]
    print(json.dumps(sum(kept, [])), flush=True)
"""


def _rounded(sizes: list[int]) -> list[int]:
    return [size - size % -512 for size in sizes]


@pytest.mark.slow
def test_states_and_allocations_of_a_compiled_step_are_as_predicted() -> None:
    shapes = ((65536,), (64, 256), (256, 64), (1000, 1024), (65, 63), (4095,), (1, 4096))
    cases = [("float32" if len(shape) > 1 else "bfloat16", shape) for shape in shapes]
    printed = allocations_on_gpu("H200", STEPS, cases)
    for (dtype, shape), allocated, kept in zip(cases, printed[::2], printed[1::2], strict=True):
        op = Operators(Tape(512), CUDA)
        shards = [Shard(prod(shape), 4 if dtype == "float32" else 2, -1, shape=shape)]
        held = states(op, OptimizerKind.ADAMW_8BIT, shards)
        assert [one.num_bytes for one in held] == _rounded(kept)
        for _ in range(2):  # the first step also tunes the kernels; those below are of the second
            begin = len(op.tape.events)
            step(op, OptimizerKind.ADAMW_8BIT, shards)
        sizes = [event.num_bytes for event in op.tape.events[begin:] if event.kind is Kind.ALLOCATE]
        assert sizes == _rounded(allocated), shape
