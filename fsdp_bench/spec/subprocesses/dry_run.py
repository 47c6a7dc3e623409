"""Input and output of a dry run: a model and a setup; the live bytes of one training step."""

from typing import Any, Literal

import msgspec

from fsdp_bench.spec.checked import Checked
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import TrainSetup

KernelSet = Literal["cpu", "cuda"]
"""The kernels that are assumed: the CPU's, or CUDA's on a fake accelerator, fused kernels included."""

ModelCode = Literal["huggingface", "torchtitan"]
"""Whose code of a config.json runs: transformers' class, or torchtitan's model of the same sizes."""

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
"""Categories of storages, as in ``predict --json``. train/dry_run/fake_tracker.py has the rules that sort storages."""


SIZES = {"micro_batch_size": "batch", "sequence_length": "seq"}
"""Arguments for the batch size that a user's function may take: fields of TrainSetup, each with its CLI option."""


class UserModule(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's own model: a function that returns it together with a batch."""

    function: str
    """``pkg.mod:function``; returns (nn.Module, batch)."""
    block: str | None = None
    """``pkg.mod:Class``: the class of the model's blocks."""
    folder: str = "."
    """The folder in which ``pkg`` is looked for first."""
    arguments: dict[str, int] = {}
    """The SIZES that the user gave. They are passed to the function, which must accept them."""


class CodeToBuild(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's code: that of a config.json, or a user's function.

    Raises SpecError for none of them, for both, and for adapters in a user's function.
    """

    config: dict[str, Any] | None = None
    """A config.json of Hugging Face's."""
    module: UserModule | None = None
    lora: LoRA | None = None
    """PEFT's adapters, which are put into the Hugging Face model."""

    def _check(self) -> None:
        if (self.config is None) == (self.module is None):
            raise SpecError("a model's code is that of a config.json or of a user's module, and not both")
        self._check_adapters()

    def _check_adapters(self) -> None:
        if self.lora is not None and self.config is None:
            raise SpecError("lora: goes with a config.json; a user's function puts in its adapters itself")


class DryRunSpec(CodeToBuild, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The input of one dry run: a benchmark model, a config.json or a user's own module, a setup, and the kernels.

    Raises SpecError if it names no model, or several, or a module to wrap by blocks without the class of its blocks.
    """

    setup: TrainSetup
    model: ModelShape | None = None
    code: ModelCode = "huggingface"
    """Whose code of the config.json."""
    kernels: KernelSet = "cuda"
    before_sm80: bool = False
    """Whether the GPU is one of compute capability 7.0 or 7.5, which has no FlashAttention (Gpu.is_before_sm80)."""
    rank: int = 0
    """The rank whose memory is tracked."""
    trace: str | None = None
    """A file to write: every change of live bytes in the measured step, with its operator."""

    @property
    def name(self) -> str:
        """The description of the model, the name of the user's function, or the class of the Hugging Face model."""
        if self.model is not None:
            return self.model.describe()
        if self.module is not None:
            return self.module.function
        config = self.config or {}
        if self.code == "torchtitan":
            return f"torchtitan's {config.get('model_type')}"
        architecture = str((config.get("architectures") or [config.get("model_type")])[0])
        return architecture if self.lora is None else f"{architecture} with {self.lora.title}"

    def _check(self) -> None:
        if [self.model, self.module, self.config].count(None) != 2:
            raise SpecError("a dry run needs a model's shape, a user's module or a config.json, and one of them")
        if self.code == "torchtitan" and (self.config is None or self.lora is not None):
            raise SpecError("code: torchtitan's needs a config.json, and has no adapters")
        self._check_adapters()
        if not 0 <= self.rank < self.setup.world_size:
            raise SpecError(f"rank: {self.rank} is not allowed; 0 to {self.setup.world_size - 1}, by the world size")
        if self.module is not None and self.module.block is None and self.setup.wrap.has_blocks:
            raise SpecError(
                "module: which class are its blocks? --transformer-block PKG.MOD:CLASS; or --wrap size, --wrap none"
            )


class MemoryAtStart(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the device when a step begins. The micro-batches of the step are in ``other``."""

    parameters_bytes: int
    optimizer_state_bytes: int
    gradients_bytes: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of all fields."""
        return self.parameters_bytes + self.optimizer_state_bytes + self.gradients_bytes + self.other_bytes


class DryRunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes of one training step of one rank after warm-up, tracked by storage."""

    peak_allocated_bytes: int
    """The highest peak of all phases of the step."""
    peak_phase: str
    phases: dict[str, int]
    """Peak by phase (forward, loss, backward, optimizer) over all micro-batches of a step in the steady state. With
    FSDP1, ``forward`` includes the first step."""
    load_bytes: int
    """Peak while the model was built and wrapped. Not part of ``peak_allocated_bytes``, because users load models in
    other ways. A benchmark model is loaded as in a trial: from the meta device, part by part."""
    resident: MemoryAtStart
    breakdown_bytes: dict[str, int]
    """Live bytes at the peak by category (CATEGORIES). They add up to ``peak_allocated_bytes``."""
    num_parameters: int
    """Number of parameters of the whole model. A tied parameter counts once."""
    kernels: KernelSet
    torch: str
    """The version of torch."""
    seconds: float
    """Duration of this dry run, without the import of torch."""
    rank: int = 0
    arguments: dict[str, int] = {}
    """The SIZES with which the function of a user's own module was called."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer that a subprocess prints: a result, or an error."""

    error: str | None = None
    """The error in one line."""
    users_mistake: bool = True
    """Whether the user can correct the error."""


class DryRunAnswer(Answer, frozen=True, kw_only=True):
    """The answer to one spec."""

    result: DryRunResult | None = None
