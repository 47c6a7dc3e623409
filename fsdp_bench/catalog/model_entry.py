"""A published model as data: its config.json, and whether ModelShape can express it exactly."""

from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.spec.checked import Checked, Count
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Source
from fsdp_bench.spec.model import Family, ModelShape

COMMON_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "num_decoder_layers",
)
"""Fields of a ModelEntry that a config.json has too."""


class FamilyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"architecture": "class"}):
    """A family of models, by its model_type; families.toml says what each field is."""

    architecture: str
    names: dict[str, str] = {}
    without: tuple[str, ...] = ()
    built_as: Family | None = None
    not_built_because: str | None = None


_ENTRIES = msgspec.toml.decode(Path(__file__).with_name("families.toml").read_bytes(), type=dict[str, FamilyEntry])

ARCHITECTURES = {name: entry.architecture for name, entry in _ENTRIES.items()}
"""By model_type, the class of transformers that is trained."""
FAMILIES = {name: entry.built_as for name, entry in _ENTRIES.items() if entry.built_as is not None}
"""By model_type, the family that builds the same modules."""


def config_names(model_type: str) -> dict[str, str]:
    """Return what the common fields are called in the config.json of a model_type.

    Fields that such a config.json does not have are missing. An unknown model_type has the common names.
    """
    entry = _ENTRIES.get(model_type, FamilyEntry(""))
    return {field: entry.names.get(field, field) for field in COMMON_FIELDS if field not in entry.without}


_KNOWN_CONFIG = ("sliding_window", "rope_theta", "rope_scaling", "rope_parameters")
"""Further fields of a config.json that change no module and no parameter of the models that are built here."""


class ModelEntry(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published model, named as in its config.json. Raises SpecError for sizes that attention cannot have."""

    name: str
    family: str
    """Hugging Face's model_type: llama, mistral, gpt2, qwen2, qwen3, t5, or any other."""
    architecture: str | None = None
    """The class of transformers that is trained, ``LlamaForCausalLM``. None: the usual one of the family."""
    num_hidden_layers: Count
    """Layers; of the encoder, in an encoder-decoder model."""
    hidden_size: Count
    num_attention_heads: Count
    intermediate_size: Count
    vocab_size: Count | None = None
    """None only for a family without a vocabulary, such as vit."""
    source: Source
    num_key_value_heads: Count | None = None
    """None: the number of attention heads."""
    max_position_embeddings: Count | None = None
    tie_word_embeddings: bool = False
    head_dim: Count | None = None
    """None: hidden_size / num_attention_heads, or the family's own default in transformers."""
    attention_bias: bool = False
    mlp_bias: bool = False
    num_decoder_layers: Count | None = None
    """Layers of the decoder, in an encoder-decoder model."""
    num_parameters: Count | None = None
    """The published number of parameters. ``shape().num_parameters`` computes it. A tied head counts once."""
    aliases: tuple[str, ...] = ()
    same_architecture: tuple[str, ...] = ()
    """Other models with these sizes and this code, ``owner/name``: further training gave them other weights."""
    config: dict[str, Any] = {}
    """Further fields of its config.json, by their names there: ``num_experts``, ``sliding_window``, ``patch_size``.
    "null" stands for null, which TOML does not have. A ``layer_types`` shorter than the model repeats."""

    def _check(self) -> None:
        names = config_names(self.family)
        if "vocab_size" in names and self.vocab_size is None:
            raise SpecError("has no `vocab_size`")
        if twice := [name for name in (*names, *names.values()) if name in self.config]:
            raise SpecError(f"config.{twice[0]}: is not allowed; the entry has a field of its own for it")
        if self.supported:
            self.shape()

    def hf_config(self) -> dict[str, Any]:
        """Return what the model's config.json says of sizes and code: ``AutoConfig.for_model(**entry.hf_config())``.

        The names are those of the family (``n_embd`` for gpt2, ``d_model`` for t5). Missing are fields whose published
        value is the default in transformers (dropout, activations), lists that it derives, and token numbers.
        """
        architecture = self.architecture or ARCHITECTURES.get(self.family)
        config: dict[str, Any] = {"architectures": [architecture]} if architecture else {}
        config["model_type"] = self.family
        for field, name in config_names(self.family).items():
            value = getattr(self, field)
            if field == "num_key_value_heads":
                value = value or self.num_attention_heads  # some families have a default of their own
            if value is not None and (value is not False or field == "tie_word_embeddings"):
                config[name] = value
        config |= {name: None if value == "null" else value for name, value in self.config.items()}
        if pattern := config.get("layer_types"):
            config["layer_types"] = [pattern[layer % len(pattern)] for layer in range(self.num_hidden_layers)]
        return config

    @property
    def unsupported_because(self) -> str | None:
        """Why ModelShape cannot express this model exactly; None if it can."""
        if self.family not in FAMILIES:
            known = ", ".join(FAMILIES)
            why = _ENTRIES[self.family].not_built_because if self.family in _ENTRIES else None
            return why or f"the family {self.family} is not built here; {known} are"
        is_llama = FAMILIES[self.family] is Family.LLAMA
        if self.head_dim is not None and self.head_dim * self.num_attention_heads != self.hidden_size:
            return (
                f"its heads are {self.head_dim} wide, not hidden_size / num_attention_heads = "
                f"{self.hidden_size / self.num_attention_heads:g}"
            )
        if is_llama and (self.attention_bias or self.mlp_bias):
            return "it has biases in its projections, which the llama family here does not have"
        if self.max_position_embeddings is None:
            return "its max_position_embeddings is not given"
        if unknown := [name for name in self.config if name not in _KNOWN_CONFIG]:
            return f"its config sets {', '.join(unknown)}, which the {self.family} family here does not know"
        return None

    @property
    def supported(self) -> bool:
        """Whether ModelShape can express this model exactly."""
        return self.unsupported_because is None

    def shape(self) -> ModelShape:
        """Return the model as a ModelShape. Raises SpecError, with the reason, if that cannot express it."""
        if (reason := self.unsupported_because) is not None:
            raise SpecError(f"model: {self.name} can be listed, not predicted or trained: {reason}")
        fields = {name: getattr(self, name) for name in ModelShape.__struct_fields__}
        heads = self.num_key_value_heads or self.num_attention_heads
        return ModelShape(**fields | {"family": FAMILIES[self.family], "num_key_value_heads": heads})
