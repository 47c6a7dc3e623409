"""A published model as data: its config.json, and whether ModelShape can express it exactly."""

from __future__ import annotations

from typing import Any

from fsdp_bench.spec.checked import Checked, Count
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Source
from fsdp_bench.spec.model import Family, ModelShape

# -- The names of a model's common fields in Hugging Face's config.json, and the class of transformers that builds it --
#
# Most families use one set of names (hidden_size, num_hidden_layers, ...). Older ones have names of their own, and some
# have no name for a field, because every model of the family is alike in it: ViT has no vocabulary, BERT no grouped
# key-value heads. The names are those of the configuration classes in transformers/models/*/configuration_*.py, which
# the tests compare with this table.

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

_OWN_NAMES: dict[str, dict[str, str | None]] = {
    "bert": {"num_key_value_heads": None, "head_dim": None},
    "gpt2": {
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_key_value_heads": None,
        "head_dim": None,
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    "modernbert": {"num_key_value_heads": None, "head_dim": None},
    "qwen2": {"attention_bias": None},  # its code has biases for queries, keys and values, whatever the file says
    "t5": {
        "num_hidden_layers": "num_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": None,
        "head_dim": "d_kv",
        "intermediate_size": "d_ff",
        "max_position_embeddings": None,
    },
    "vit": {
        "num_key_value_heads": None,
        "head_dim": None,
        "vocab_size": None,
        "max_position_embeddings": None,
        "tie_word_embeddings": None,
    },
}
"""By model_type, the names that differ from the common ones; None where the config.json has no such field."""

ARCHITECTURES = {
    "bert": "BertForMaskedLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "modernbert": "ModernBertForMaskedLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}
"""By model_type, the class of transformers that is trained: the one that the published config.json names."""


def config_names(model_type: str) -> dict[str, str]:
    """Return what the common fields are called in the config.json of a model_type.

    Fields that such a config.json does not have are missing. An unknown model_type has the common names.
    """
    names = {**{field: field for field in COMMON_FIELDS}, **_OWN_NAMES.get(model_type, {})}
    return {field: name for field, name in names.items() if name is not None}


# -- One model ---------------------------------------------------------------------------------------------------------

FAMILIES = {"llama": Family.LLAMA, "mistral": Family.LLAMA, "gpt2": Family.GPT2}
"""The family that builds the same modules, by Hugging Face's model_type."""

_UNSUPPORTED_FAMILIES = {
    "qwen2": "Qwen 2.5 adds biases to the query, key and value projections, which the llama family here does not have",
    "qwen3": "Qwen 3 normalises queries and keys (q_norm, k_norm), which the llama family here does not",
    "t5": "T5 is an encoder-decoder; only decoders are built here",
}

_KNOWN_CONFIG = ("sliding_window", "rope_theta", "rope_scaling", "rope_parameters")
"""Further fields of a config.json that change no module and no parameter of the models that are built here."""


class ModelEntry(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published model. All sizes are numbers of elements, named as in Hugging Face's config.json.

    Raises SpecError if a size is not positive, or the sizes do not divide as attention needs.
    """

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
    """Further names of this model."""
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
            return _UNSUPPORTED_FAMILIES.get(self.family, f"the family {self.family} is not built here; {known} are")
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
        """Return the model as a ModelShape, which predictions and measurements take.

        Raises SpecError if ModelShape cannot express the model, with the reason.
        """
        if (reason := self.unsupported_because) is not None:
            raise SpecError(f"model: {self.name} can be listed, not predicted or trained: {reason}")
        fields = {name: getattr(self, name) for name in ModelShape.__struct_fields__}
        heads = self.num_key_value_heads or self.num_attention_heads
        return ModelShape(**fields | {"family": FAMILIES[self.family], "num_key_value_heads": heads})
