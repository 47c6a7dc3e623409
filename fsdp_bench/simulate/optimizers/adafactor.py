"""torch.optim.Adafactor, whose second moment of a matrix is a row and a column (torch/optim/_adafactor.py).

It runs the for-loop unless ``foreach=True`` is given. Pieces of a flat parameter have one dimension, so that FSDP1
factors nothing where it shards: the second moment is then as large as the shard.
"""

from __future__ import annotations

from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernel_workspaces import reduce_all_workspace, sum_over_rows_workspace
from fsdp_bench.simulate.optimizers.shards import STEP_BYTES, Shard, counts, marked
from fsdp_bench.simulate.tape import Storage, Tape


def adafactor_states(tape: Tape, shards: list[Shard], has_step: bool) -> list[Storage]:
    """Adafactor._init_group: a row's and a column's factor of a matrix, else a variance like the gradient."""
    held = []
    category = Category.OPTIMIZER_STATE
    for shard in marked(tape, tape.phase, shards):
        if has_step and counts(shard):
            held.append(tape.storage(STEP_BYTES, "step", category))
        for name, numel in _variances(shard):
            held.append(tape.storage(numel * shard.itemsize, name, category))
    return held


def _variances(shard: Shard) -> list[tuple[str, int]]:
    """Return the names and elements of what estimates the second moment."""
    if not shard.is_matrix:
        return [("variance", shard.numel)]
    return [("row_var", shard.numel // shard.shape[-1]), ("col_var", shard.numel // shard.shape[-2])]


def adafactor_step(op: Operators, shards: list[Shard]) -> None:
    """_single_tensor_adafactor: its variables live until the next parameter's replace them."""
    step = _AdafactorStep(op)
    for shard in marked(op.tape, "optimizer", [shard for shard in shards if counts(shard)]):
        (step.matrix if shard.is_matrix else step.vector)(shard)


class _AdafactorStep:
    """The variables of the loop."""

    def __init__(self, op: Operators) -> None:
        self._op = op
        self._tape = op.tape
        self._kernels = op.kernels
        self._row_mean: Storage | None = None
        self._col_mean: Storage | None = None
        self._grad_squared: Storage | None = None
        self._update: Storage | None = None

    def matrix(self, shard: Shard) -> None:
        """Estimate the second moment of a matrix from its factors."""
        rows, columns = shard.numel // shard.shape[-1], shard.shape[-1]
        leading = shard.numel // (shard.shape[-2] * columns)
        self._norm(shard)
        self._row_mean = self._temporary(rows, shard, "aten::linalg_vector_norm")
        col_mean = self._temporary(leading * columns, shard, "aten::linalg_vector_norm")
        self._inside(sum_over_rows_workspace(shard.shape[-2], columns, self._kernels))
        self._col_mean = col_mean
        estimate = self._temporary(shard.numel, shard, "aten::mm")
        self._op.make_workspace(self._tape.in_backward, self._tape.stream)
        mean = self._temporary(leading, shard, "aten::mean")
        self._inside(reduce_all_workspace(shard.shape[-2], self._kernels))
        del mean
        self._update = estimate
        self._norm(shard)

    def vector(self, shard: Shard) -> None:
        """Keep the second moment of every element."""
        self._norm(shard)
        self._grad_squared = self._temporary(shard.numel, shard, "aten::mul")
        self._update = self._temporary(shard.numel, shard, "aten::clone")
        self._norm(shard)

    def _temporary(self, numel: int, shard: Shard, name: str) -> Storage:
        return self._tape.storage(numel * shard.itemsize, name, Category.TEMPORARY)

    def _inside(self, sizes: list[int]) -> None:
        """Allocate what a kernel needs while it is launched."""
        if not self._kernels.observed:
            _workspace = [self._tape.storage(size, "Reduce.cuh", Category.TEMPORARY) for size in sizes]

    def _norm(self, shard: Shard) -> None:
        """``norm(2).item()``: the host waits for it."""
        norm = self._temporary(1, shard, "aten::linalg_vector_norm")
        self._inside(reduce_all_workspace(shard.numel, self._kernels))
        if self._kernels.is_cuda:
            self._tape.synchronize(self._tape.stream)
        del norm
