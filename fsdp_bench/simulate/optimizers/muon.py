"""torch.optim.Muon of matrices that are held whole (torch/optim/_muon.py), and AdamW of what is no matrix.

Under fully_shard use a dry run or a rehearsal: DTensor's cost model chooses for each product what is gathered.
"""

from __future__ import annotations

from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernel_workspaces import reduce_all_workspace
from fsdp_bench.simulate.optimizers.adamw import adamw_states, adamw_step
from fsdp_bench.simulate.optimizers.shards import Shard, counts, marked
from fsdp_bench.simulate.tape import Storage, Tape
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import OptimizerKind, TrainSetup

_BF16 = 2
"""Bytes of an element in Newton-Schulz iterations."""
MUON_PASSES = 14
"""Reads and writes of a matrix's element in lerp_, lerp, _to_copy, norm, div_, mul_ and add_."""
_ITERATIONS = 5
"""Muon's ``ns_steps``."""


def refuse_muon_of_dtensors(setup: TrainSetup) -> None:
    """Refuse to predict Muon of fully_shard's DTensors.

    Raises:
        SpecError: naming what answers instead.
    """
    if setup.optimizer is OptimizerKind.MUON and setup.uses_fully_shard:
        raise SpecError(
            "optimizer muon under fully_shard is not predicted: DTensor chooses what each product of Newton-Schulz"
            " gathers; dry-run or rehearse it, or use NO_SHARD"
        )


def muon_states(tape: Tape, shards: list[Shard], has_step: bool) -> list[Storage]:
    """Allocate a momentum a matrix, and AdamW's states of the rest."""
    held = [
        tape.storage(shard.numel * shard.itemsize, "momentum_buffer", Category.OPTIMIZER_STATE)
        for shard in marked(tape, tape.phase, _matrices(shards))
    ]
    return held + adamw_states(tape, _others(shards), has_step)


def muon_step(op: Operators, shards: list[Shard]) -> None:
    """Step Muon, then AdamW."""
    step = _MuonStep(op)
    for shard in marked(op.tape, "optimizer", _matrices(shards)):
        step.matrix(shard)
    del step
    others = _others(shards)
    if others:
        adamw_step(op.tape, OptimizerKind.ADAMW_FOREACH, others, steps_on_device=not op.kernels.is_cuda)


def issue_newton_schulz(tape: Tape, shards: list[Shard]) -> None:
    """Issue the matrix products of a step: of each iteration two with the whole matrix, one of the smaller side."""
    for shard in _matrices(shards):
        small = min(shard.shape)
        large = shard.numel // small
        for _ in range(_ITERATIONS):
            for inner, columns in ((large, small), (small, small), (small, large)):
                tape.product("nt" if inner == large else "nn", small, columns, inner, _BF16)


def _matrices(shards: list[Shard]) -> list[Shard]:
    return [shard for shard in shards if takes_muon(shard) and counts(shard)]


def _others(shards: list[Shard]) -> list[Shard]:
    return [shard for shard in shards if not takes_muon(shard)]


def takes_muon(shard: Shard) -> bool:
    """Whether Muon updates it: torch's takes two dimensions, so that experts in one tensor are AdamW's."""
    return len(shard.shape) == 2


class _MuonStep:
    """_single_tensor_muon: its variables live until the next parameter's replace them."""

    def __init__(self, op: Operators) -> None:
        self._op = op
        self._tape = op.tape
        self._update: Storage | None = None

    def matrix(self, shard: Shard) -> None:
        """_zeropower_via_newtonschulz of a momentum that is mixed with the gradient."""
        square = min(shard.shape) ** 2
        self._update = self._temporary(shard.numel * shard.itemsize, "aten::lerp")
        ortho = self._update  # which .bfloat16() returns as it is, where it is in bf16
        if shard.itemsize != _BF16:
            ortho = self._temporary(shard.numel * _BF16, "aten::_to_copy")
        self._norm(shard.numel)
        gram = gram_update = None
        for _ in range(_ITERATIONS):
            gram = self._temporary(square * _BF16, "aten::mm")
            self._op.make_workspace(self._tape.in_backward, self._tape.stream)
            gram_update = self._temporary(square * _BF16, "aten::addmm")
            ortho = self._temporary(shard.numel * _BF16, "aten::addmm")
        del gram, gram_update
        self._update = ortho

    def _norm(self, numel: int) -> None:
        norm = self._temporary(_BF16, "aten::linalg_vector_norm")
        if not self._op.kernels.observed:
            sizes = reduce_all_workspace(numel, self._op.kernels)
            _workspace = [self._temporary(size, "Reduce.cuh") for size in sizes]
            del _workspace
        clamped = self._temporary(_BF16, "aten::clamp")
        del norm, clamped

    def _temporary(self, num_bytes: int, name: str) -> Storage:
        return self._tape.storage(num_bytes, name, Category.TEMPORARY)
