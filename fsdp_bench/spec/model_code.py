"""ModelCode: a trial's model that Hugging Face's code or a user's function builds. TrainedModel: any trial's model."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from fsdp_bench.spec.checked import Checked, Count, build
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.impossible import TIED_ENDS, impossible
from fsdp_bench.spec.lora import DTYPES_MIXED, GRADIENTS_MIXED, PACKED_IN_BF16, LoRA
from fsdp_bench.spec.model import LONGEST_NAME, ModelShape
from fsdp_bench.spec.setup import Api, Checkpointing, Loss, TrainSetup, Wrap
from fsdp_bench.spec.subprocesses.dry_run import SIZES, UserModule
from fsdp_bench.spec.units import format_count


class ModelCode(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model given by its code, with the sizes that it built. Raises SpecError unless it names one code."""

    name: str
    code: Literal["huggingface", "module"]
    """``huggingface``: the class in transformers for ``config``. ``module``: what the user's function returns."""
    architecture: str
    num_parameters: Count
    """A tied parameter counts once."""
    num_hidden_layers: int | None = None
    """The blocks of the list that has the most. None if no list of blocks was found."""
    hidden_size: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    """The longest sequence, where positions are learned."""
    has_tokens: bool = True
    """Whether a batch is made of sequences of tokens."""
    config: dict[str, Any] | None = None
    """A config.json of Hugging Face's."""
    lora: LoRA | None = None
    """PEFT's adapters, which are put into the Hugging Face model."""
    function: str | None = None
    """``pkg.mod:function`` of the user."""
    transformer_block: str | None = None
    """``pkg.mod:Class``: the class of the user's blocks; by default that of the largest nn.ModuleList."""
    folder: str = "."
    """The folder in which ``pkg`` is looked for first."""
    source: str | None = None
    """The beginning of a SHA-256 hash of the file with the user's function."""
    arguments: tuple[str, ...] = ()
    """The names of SIZES that the user's function takes."""
    versions: dict[str, str] = {}
    """Versions of the packages that have the code."""

    def _check(self) -> None:
        if not self.name.isprintable() or len(self.name) > LONGEST_NAME:
            raise SpecError(f"name: {shown(self.name)} is not allowed; up to {LONGEST_NAME} printable characters")
        if (self.config is not None, self.function is not None) != (self.code == "huggingface", self.code == "module"):
            raise SpecError(f"code: {self.code!r} needs a config for huggingface, a function for module, and not both")
        if self.lora is not None and self.config is None:
            raise SpecError("lora: goes with a config; a user's function puts in its adapters itself")

    def __hash__(self) -> int:
        """Dictionaries have no hash: equal models have equal names and sizes."""
        return hash((self.name, self.code, self.architecture, self.num_parameters, self.source))

    @property
    def kind(self) -> str:
        """The class of the model, as tables and charts name it."""
        return self.architecture

    @property
    def learned_positions(self) -> int | None:
        """The longest sequence, where positions are learned; else None."""
        return self.max_position_embeddings

    def decisive(self) -> dict[str, Any]:
        """Return what decides the outcome of a trial: not names and folders, nor what follows from the code."""
        found = {"code": self.code, "config": self.config, "function": self.function, "versions": self.versions}
        adapters = {} if self.lora is None else {"lora": self.lora}
        return found | {"transformer_block": self.transformer_block, "source": self.source, **adapters}

    def user_module(self, setup: TrainSetup) -> UserModule:
        """Return the user's function with the sizes of a setup that it takes."""
        arguments = {size: getattr(setup, size) for size in SIZES if size in self.arguments}
        return UserModule(
            function=str(self.function), block=self.transformer_block, folder=self.folder, arguments=arguments
        )

    def why_impossible(self, setup: TrainSetup, device: str) -> str | None:
        """Return why the model cannot be trained under a setup on ``cuda`` or ``cpu``; None if it can."""
        if (reason := impossible(setup, device)) is not None:
            return reason
        if (reason := self._refused_wrap(setup.wrap)) is not None:
            return reason
        by_block = setup.wrap is Wrap.BLOCK or setup.compile or setup.checkpointing is not Checkpointing.NONE
        if by_block and self.num_hidden_layers is None and self.transformer_block is None:
            return (
                f'wrap: {self.name} needs the class of the blocks; transformer_block = "pkg.mod:Class" in its table,'
                " or wrap none without checkpointing and compile"
            )
        if self.lora is not None and (reason := _refused_adapters(self.lora, setup)) is not None:
            return reason
        if setup.loss is Loss.PLAIN:
            return None
        if self.config is None:
            return f"loss: {self.name} computes its own, which {setup.loss.value} cannot replace; leave loss out"
        reason = why_not_replaced(setup.loss, self.architecture, self.config)
        return None if reason is None else f"loss: {reason}"

    def _refused_wrap(self, wrap: Wrap) -> str | None:
        wraps = [Wrap.BLOCK, Wrap.NONE]
        if self.lora is not None:
            wraps.append(Wrap.BLOCK_AND_ADAPTERS)
        elif self.config is not None:
            wraps.append(Wrap.BLOCK_AND_ENDS)
        if wrap not in wraps:
            return f"wrap: {wrap.value} is not for {self.name}; use {' or '.join(one.value for one in wraps)}"
        if wrap is Wrap.BLOCK_AND_ENDS and (self.config or {}).get("tie_word_embeddings"):
            return TIED_ENDS
        return None

    def model_flops_per_token(self, _sequence_length: int) -> None:
        """Return None: FLOPs of other code are not counted in trials."""
        return

    def hardware_flops_per_token(self, _setup: TrainSetup) -> None:
        """Return None: FLOPs of other code are not counted in trials."""
        return

    def describe(self) -> str:
        """Return one line for tables and charts."""
        whose = "Hugging Face's code" if self.code == "huggingface" else f"code of {self.function}"
        layers = "" if self.num_hidden_layers is None else f"{self.num_hidden_layers} layers"
        width = "" if self.hidden_size is None else f" x {self.hidden_size}"
        versions = "".join(f", {name} {version}" for name, version in self.versions.items())
        adapters = "" if self.lora is None else self.lora.title
        inside = ", ".join(part for part in (f"{layers}{width}", adapters, f"{whose}{versions}") if part)
        return f"{self.architecture} {format_count(self.num_parameters)} ({inside})"


def _refused_adapters(lora: LoRA, setup: TrainSetup) -> str | None:
    compute = setup.precision.compute
    if lora.is_quantized and compute != "bf16":
        return f"{PACKED_IN_BF16}, not in {compute}"
    if setup.api is not Api.FSDP1 or setup.wrap is Wrap.BLOCK_AND_ADAPTERS:
        return None
    if lora.base is not None and setup.precision.store != "bf16":
        return DTYPES_MIXED
    return None if setup.use_orig_params else GRADIENTS_MIXED


_CHANGES_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""Fields of a config.json: with a value the model changes logits after the head."""


def why_not_replaced(loss: Loss, architecture: str, config: Mapping[str, Any]) -> str | None:
    """Return why the own loss of one of Hugging Face's models cannot be replaced by another kind; None if it can."""
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return f"{architecture} is no causal language model, whose loss alone {loss.value} can replace"
    if config.get("output_router_logits"):
        return f"{architecture} with output_router_logits adds its routers' loss, which {loss.value} leaves out"
    changes = [name for name in _CHANGES_LOGITS if config.get(name) not in (None, 1, 1.0)]
    if changes and loss.includes_head:
        return f"{architecture} changes its logits by {changes[0]}, which {loss.value} leaves out; use liger"
    return None


if TYPE_CHECKING:
    TrainedModel = ModelShape | ModelCode
else:

    class TrainedModel(ABC):  # noqa: B024  # registered classes inherit nothing
        """The model of a trial. msgspec reads no union of two structs unless they are tagged, as no record is."""

        @staticmethod
        def parse(value: object) -> ModelShape | ModelCode:
            """Read the table of a model: that of a ModelCode has ``code``. Raises SpecError for anything else."""
            if not isinstance(value, Mapping):
                raise SpecError(f"model: {shown(value)} is not allowed; a table")
            kind = ModelCode if "code" in value else ModelShape
            return build(kind, value, "model.")

    TrainedModel.register(ModelShape)
    TrainedModel.register(ModelCode)
