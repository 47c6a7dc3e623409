"""What kernels allocate beside their results, on the stand-in: sums, norms, softmax, an embedding's backward."""

from __future__ import annotations

import json
import random

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernel_workspaces import (
    embedding_backward_workspace,
    foreach_norm_workspace,
    sum_over_rows_workspace,
)
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.simulate.recorded.workspaces import workspace_of
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.on_stand_in.interpreters import run_on_gpu

SUMS = """
import json, sys
import torch

torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")
for rows, columns in json.load(sys.stdin):
    matrix = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    matrix.sum(0)
    trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    print(json.dumps([entry["size"] for entry in trace if entry["action"] == "alloc"]))
"""


def test_partial_sums_are_of_the_predicted_sizes() -> None:
    gpu = rehearsed_gpu("H200")
    kernels = kernels_on(CUDA, gpu_by_product_name(gpu.product_name))
    source = random.Random(5)
    shapes = [(source.randint(1, 40_000), source.randint(1, 12_000)) for _ in range(150)]
    shapes += [(rows, columns) for rows in (128, 1024, 8192) for columns in (1024, 4096, 6400)]
    printed = run_on_gpu("H200", SUMS, json.dumps(shapes))
    for (rows, columns), line in zip(shapes, printed.splitlines(), strict=True):
        _result, *inside = json.loads(line)
        assert inside == sum_over_rows_workspace(rows, columns, kernels), (rows, columns)


SOFTMAX_AND_NORMS = """
import json, sys
import torch

torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")

def allocated(run):
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    run()
    trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    print(json.dumps([entry["size"] for entry in trace if entry["action"] == "alloc"]))

for shape in ((2, 3, 50, 70), (1, 1, 7, 600)):
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    allocated(lambda: torch._safe_softmax(x, -1))
gradients = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in (5, 65536, 200_000)]
allocated(lambda: torch._foreach_norm(gradients))
"""


def test_softmax_and_norms_of_gradients_allocate_what_is_predicted() -> None:
    wide, narrow, norms = map(json.loads, run_on_gpu("H200", SOFTMAX_AND_NORMS, "").splitlines())
    for (_softmax, *inside), rows, columns in ((wide, 300, 70), (narrow, 7, 600)):
        num_bytes = 2 * rows * columns
        recorded_with_sizes = workspace_of("aten::_safe_softmax", (rows, columns), 2, CUDA, results=(num_bytes,))
        without = workspace_of("aten::_safe_softmax", (), 2, CUDA, results=(num_bytes,), num_keys=columns)
        assert tuple(inside) == recorded_with_sizes.after == without.after
    assert norms == [*foreach_norm_workspace([5, 65536, 200_000]), 2, 2, 2]


EMBEDDINGS = """
import json, sys
import torch

torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")
for indices, rows, width in json.load(sys.stdin):
    gradient = torch.empty(indices, width, dtype=torch.bfloat16, device="cuda")
    places = torch.zeros(indices, dtype=torch.long, device="cuda")
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    made = torch.ops.aten.embedding_dense_backward(gradient, places, rows, -1, False)
    trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    sign = {"alloc": 1, "free_completed": -1}
    print(json.dumps([sign[entry["action"]] * entry["size"] for entry in trace if entry["action"] in sign]))
    del made
"""


def test_an_embeddings_backward_allocates_and_frees_in_the_predicted_order() -> None:
    shapes = [(100, 300, 64), (3072, 50, 8), (3073, 5001, 24), (4000, 1705, 384), (9000, 333, 100)]
    printed = run_on_gpu("H200", EMBEDDINGS, json.dumps(shapes))
    for (indices, rows, width), line in zip(shapes, printed.splitlines(), strict=True):
        # cub's scratch is no multiple of 8; what sorts and counts is not predicted.
        real = [size for size in json.loads(line) if size % 8 == 0]
        assert _rounded(real) == _of_embedding(indices, rows, width), (indices, rows, width)


def _rounded(sizes: list[int]) -> list[int]:
    return [-(-abs(size) // 512) * 512 * (1 if size > 0 else -1) for size in sizes]


def _of_embedding(indices: int, rows: int, width: int) -> list[int]:
    """Return what the simulated backward allocates, and as negative numbers what it frees."""
    tape = Tape(512)
    op = Operators(tape, CUDA)
    before, after = embedding_backward_workspace(indices, rows, width)
    held = op.scratch(before, "before")
    result = tape.storage(rows * width * 2, "result")
    held += op.scratch(after, "after")
    del held
    sizes = {event.number: event.num_bytes for event in tape.events if event.kind is Kind.ALLOCATE}
    signs = {Kind.ALLOCATE: 1, Kind.FREE: -1}
    found = [signs[event.kind] * sizes[event.number] for event in tape.events]
    del result
    return found
