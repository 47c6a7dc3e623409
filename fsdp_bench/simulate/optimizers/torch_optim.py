"""Steps of torch.optim: AdamW of single tensors and foreach, Adafactor, Muon. Fused AdamW and SGD allocate nothing.

Adafactor's second moment of a matrix is a row and a column. It runs the for-loop unless ``foreach=True`` is given.
Pieces of a flat parameter have one dimension, so that FSDP1 factors nothing where it shards: the second moment is then
as large as the shard.

Muon takes matrices that are held whole, and AdamW what is no matrix. Under fully_shard use a dry run or a rehearsal:
DTensor's cost model chooses for each product what is gathered.
"""

from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernel_workspaces import reduce_all_workspace, sum_over_rows_workspace
from fsdp_bench.simulate.optimizers.shards import STEP_BYTES, Shard, counts, marked
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.spec.setup import OptimizerKind, TrainSetup

_BF16 = 2
"""Bytes of an element in Newton-Schulz iterations."""
MUON_PASSES = 14
"""Reads and writes of a matrix's element in lerp_, lerp, _to_copy, norm, div_, mul_ and add_."""
_ITERATIONS = 5
"""Muon's ``ns_steps``."""


def foreach_step(op: Operators, shards: list[Shard]) -> None:
    """_multi_tensor_adam (torch/optim/adamw.py): the square roots of all second moments at once."""
    if not op.kernels.is_cuda:
        op.temporary(1, STEP_BYTES, "aten::lift_fresh")
    held = [
        op.temporary(shard.numel, shard.itemsize, "aten::_foreach_sqrt")
        for shard in marked(op.tape, "optimizer", shards)
    ]
    for _shard in marked(op.tape, "optimizer", shards[::-1]):
        held.pop()


def for_loop_step(op: Operators, shards: list[Shard]) -> None:
    """_single_tensor_adam: sqrt, then a quotient that lives until the next parameter's is made."""
    for shard in marked(op.tape, "optimizer", filter(counts, shards)):
        root = op.temporary(shard.numel, shard.itemsize, "aten::sqrt")
        _denominator = op.temporary(shard.numel, shard.itemsize, "aten::div")
        del root


def adafactor_step(op: Operators, shards: list[Shard]) -> None:
    """_single_tensor_adafactor (_adafactor.py): its variables live until the next parameter's replace them."""
    _row_mean = _col_mean = _grad_squared = _update = None
    for shard in marked(op.tape, "optimizer", filter(counts, shards)):
        itemsize = shard.itemsize
        _norm_on_host(op, shard)
        if shard.is_matrix:
            height, columns = shard.shape[-2:]
            rows, leading = shard.numel // columns, shard.numel // (height * columns)
            _row_mean = op.temporary(rows, itemsize, "aten::linalg_vector_norm")
            col_mean = op.temporary(leading * columns, itemsize, "aten::linalg_vector_norm")
            op.scratch(sum_over_rows_workspace(height, columns, op.kernels), "Reduce.cuh")
            _col_mean = col_mean
            estimate = op.temporary(shard.numel, itemsize, "aten::mm")
            op.make_workspace(op.tape.in_backward, op.tape.stream)
            mean = op.temporary(leading, itemsize, "aten::mean")
            op.scratch(reduce_all_workspace(height, op.kernels), "Reduce.cuh")
            del mean, col_mean
            _update = estimate
            del estimate
        else:
            _grad_squared = op.temporary(shard.numel, itemsize, "aten::mul")
            _update = op.temporary(shard.numel, itemsize, "aten::clone")
        _norm_on_host(op, shard)


def _norm_on_host(op: Operators, shard: Shard) -> None:
    """``norm(2).item()``: the host waits for it."""
    _norm = op.temporary(1, shard.itemsize, "aten::linalg_vector_norm")
    op.scratch(reduce_all_workspace(shard.numel, op.kernels), "Reduce.cuh")
    if op.kernels.is_cuda:
        op.tape.synchronize(op.tape.stream)


def why_optimizer_is_not_predicted(setup: TrainSetup) -> str | None:
    """Return why the optimizer's step is not predicted, although it runs; None if it is."""
    if setup.optimizer is OptimizerKind.MUON and setup.uses_fully_shard:
        return (
            "optimizer muon under fully_shard is not predicted: DTensor chooses what each product of Newton-Schulz"
            " gathers; dry-run or rehearse it, or use NO_SHARD"
        )
    return None


def takes_muon(shard: Shard) -> bool:
    """Whether Muon updates it: torch's takes two dimensions, so that experts in one tensor are AdamW's."""
    return len(shard.shape) == 2


def muon_step(op: Operators, shards: list[Shard]) -> None:
    """_single_tensor_muon (_muon.py), whose variables live until the next parameter's replace them; then AdamW."""
    _iterate(op, [shard for shard in shards if takes_muon(shard) and counts(shard)])
    others = [shard for shard in shards if not takes_muon(shard)]
    if others:
        foreach_step(op, others)


def _iterate(op: Operators, matrices: list[Shard]) -> None:
    """_zeropower_via_newtonschulz of each momentum, which is mixed with the gradient."""
    update = None
    for shard in marked(op.tape, "optimizer", matrices):
        square = min(shard.shape) ** 2
        update = op.temporary(shard.numel, shard.itemsize, "aten::lerp")
        ortho = update  # which .bfloat16() returns as it is, where it is in bf16
        if shard.itemsize != _BF16:
            ortho = op.temporary(shard.numel, _BF16, "aten::_to_copy")
        norm = op.temporary(1, _BF16, "aten::linalg_vector_norm")
        op.scratch(reduce_all_workspace(shard.numel, op.kernels), "Reduce.cuh")
        clamped = op.temporary(1, _BF16, "aten::clamp")
        del norm, clamped
        gram = gram_update = None
        for _ in range(_ITERATIONS):
            gram = op.temporary(square, _BF16, "aten::mm")
            op.make_workspace(op.tape.in_backward, op.tape.stream)
            gram_update = op.temporary(square, _BF16, "aten::addmm")
            ortho = op.temporary(shard.numel, _BF16, "aten::addmm")
        del gram, gram_update
        update = ortho
        del ortho


def issue_newton_schulz(tape: Tape, shards: list[Shard]) -> None:
    """Issue the matrix products of a step: of each iteration two with the whole matrix, one of the smaller side."""
    for shard in shards:
        if takes_muon(shard) and counts(shard):
            small = min(shard.shape)
            large = shard.numel // small
            for inner, columns in _ITERATIONS * ((large, small), (small, small), (small, large)):
                tape.product("nt" if inner == large else "nn", small, columns, inner, _BF16)
