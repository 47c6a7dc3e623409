"""The names of a model's common fields in Hugging Face's config.json, and the class of transformers that builds it.

Most families use one set of names (hidden_size, num_hidden_layers, ...). Older ones have names of their own, and some
have no name for a field, because every model of the family is alike in it: ViT has no vocabulary, BERT no grouped
key-value heads. The names are those of the configuration classes in transformers/models/*/configuration_*.py, which the
tests compare with this table.
"""

from __future__ import annotations

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
