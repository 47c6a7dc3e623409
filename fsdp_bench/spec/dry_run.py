"""The dry run's question and answer: one setup in, the live bytes of one training step out."""

from __future__ import annotations

from typing import Literal

import msgspec

from fsdp_bench.spec.checked import Checked
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import TrainSetup, Wrap

KernelSet = Literal["cpu", "cuda"]
"""Which kernels are assumed: the CPU's, or CUDA's on a fake accelerator with stand-ins for the fused ones."""

TensorKind = Literal["fake", "real"]
"""Tensors without data, or real tensors in CPU memory: slower and only as large as this machine's memory, but without
anything of torch replaced."""

CATEGORIES = (
    "parameters",
    "unsharded_parameters",
    "gradients",
    "reduction_buffers",
    "optimizer_state",
    "activations",
    "logits",
    "temporary",
)
"""What a storage holds, as in ``predict --json``; train/dry_run/breakdown.py has the rule that sorts storages."""


SIZES = {"micro_batch_size": "batch", "sequence_length": "seq"}
"""Arguments that a user's function may take, by TrainSetup's names, and their options: the size of its batch."""


class UserModule(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's own model: a function that returns it together with a batch."""

    function: str
    """``pkg.mod:function``; returns (nn.Module, batch)."""
    block: str | None = None
    """``pkg.mod:Class``: the class of the model's blocks."""
    folder: str = "."
    """Where ``pkg`` is looked for first."""
    arguments: dict[str, int] = {}
    """What the user asked for of SIZES: passed to the function, which must take it."""


class DryRunSpec(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One dry run: a benchmark model or a user's own, a setup, and whose kernels.

    Raises:
        SpecError: when it names no model, or two, or a module to wrap by blocks without the blocks' class.
    """

    setup: TrainSetup
    model: ModelShape | None = None
    module: UserModule | None = None
    kernels: KernelSet = "cuda"
    rank: int = 0
    """The rank of the world whose memory is followed."""
    tensors: TensorKind = "fake"
    trace: str | None = None
    """A file for every change of the live bytes in the measured step, with the operator that made it."""

    def _check(self) -> None:
        if (self.model is None) == (self.module is None):
            raise SpecError("a dry run needs a model's shape or a user's module, and not both")
        if not 0 <= self.rank < self.setup.world_size:
            raise SpecError(f"rank: {self.rank} is not allowed; 0 to {self.setup.world_size - 1}, by the world size")
        if self.tensors == "real" and (self.kernels == "cuda" or self.module is not None):
            raise SpecError("tensors: real ones are of a benchmark model on the CPU; kernels must be cpu")
        if self.module is not None and self.module.block is None and self.setup.wrap is Wrap.BLOCK:
            raise SpecError(
                "module: which class are its blocks? --transformer-block PKG.MOD:CLASS; or --wrap size, --wrap none"
            )


class MemoryAtStart(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are on the device when a step begins; the micro-batches of the step are in ``other``."""

    parameters_bytes: int
    optimizer_state_bytes: int
    gradients_bytes: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.parameters_bytes + self.optimizer_state_bytes + self.gradients_bytes + self.other_bytes


class DryRunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes of one training step of one rank after warm-up, tracked by storage."""

    peak_allocated_bytes: int
    """The largest of the step's phases."""
    peak_phase: str
    phases: dict[str, int]
    """Peak by phase: forward, loss, backward, optimizer; over all micro-batches. Of a step in the steady state; forward
    also of FSDP1's first step."""
    load_bytes: int
    """Peak while the model was built and wrapped; not part of ``peak_allocated_bytes``: users load in other ways. A
    benchmark model is loaded as a trial's worker loads it, from the meta device, part by part."""
    resident: MemoryAtStart
    breakdown_bytes: dict[str, int]
    """What was live at the peak, by CATEGORIES; adds up to ``peak_allocated_bytes``."""
    num_parameters: int
    """Parameters of the whole model, before sharding; a tied one counts once."""
    kernels: KernelSet
    torch: str
    """torch's version."""
    seconds: float
    """How long this dry run took, without the import of torch."""
    rank: int = 0
    device: Literal["fake", "cpu"] = "fake"
    """``cpu`` for real tensors."""
    arguments: dict[str, int] = {}
    """Of a user's module: the SIZES that its function was called with; what it does not take is not known."""


class DryRunAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the subprocess prints for one spec: a result, or why there is none."""

    result: DryRunResult | None = None
    error: str | None = None
    """One line."""
    users_mistake: bool = True
    """Whether the error is one that the user can correct."""
