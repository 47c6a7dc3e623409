"""Builds torchtitan's model of a config.json, its batch and its loss, as torchtitan's trainer has them.

The sizes are those of the config.json; the modules are those of torchtitan's own configs: one linear layer for queries,
keys and values, a table of rotary positions in every block, one block after another. Two things are chosen here, of
what torchtitan offers: its attention by F.scaled_dot_product_attention, and its cross-entropy of whole logits
(CrossEntropyLoss). Its configs for language models take flex or varlen attention, and the loss in chunks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_bench.spec.errors import MachineError, SpecError, install_hint, shown
from fsdp_bench.spec.recording.config import complete
from fsdp_bench.train.models.huggingface import config_class

BLOCKS = {
    "llama": "torchtitan.models.llama3.model:Llama3TransformerBlock",
    "qwen3": "torchtitan.models.qwen3.model:Qwen3TransformerBlock",
}
"""The class of the blocks, by the model_type of a config.json."""


def build(config: Mapping[str, Any], sequence_length: int) -> tuple[nn.Module, str]:
    """Return torchtitan's initialized model of a config.json, and the name of its class.

    Raises MachineError without torchtitan or transformers, SpecError for a config that torchtitan has no code of.
    """
    model_type = config.get("model_type")
    if model_type not in BLOCKS:
        raise SpecError(f"model_type: {shown(model_type)} is not allowed for torchtitan's code; {' or '.join(BLOCKS)}")
    full = complete(config, config_class(str(model_type)))
    for field, allowed in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if full.get(field, allowed) != allowed:
            raise SpecError(f"{field}: {shown(full[field])} is not allowed for torchtitan's code; {shown(allowed)}")
    try:
        made = _config(full, sequence_length)
    except ImportError as error:
        raise MachineError(f"torchtitan's code needs torchtitan: {install_hint('torchtitan')} ({error})") from None
    model = made.build()
    model.register_forward_pre_hook(_without_labels, with_kwargs=True)
    return model, type(model).__name__


def _config(full: Mapping[str, Any], sequence_length: int) -> Any:
    """Return the config of torchtitan's model: torchtitan/models/llama3/__init__.py and qwen3/__init__.py."""
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    is_llama = full["model_type"] == "llama"
    model, block = (Llama3Model, Llama3TransformerBlock) if is_llama else (Qwen3Model, Qwen3TransformerBlock)
    width, head, vocabulary = full["hidden_size"], full["head_dim"], full["vocab_size"]
    rope = (ComplexRoPE if is_llama else CosSinRoPE).Config(dim=head, max_seq_len=sequence_length)
    norm = RMSNorm.Config(normalized_shape=width)

    def layer() -> Any:
        attention = make_gqa_config(
            dim=width,
            n_heads=full["num_attention_heads"],
            n_kv_heads=full["num_key_value_heads"],
            head_dim=head,
            wqkv_param_init={},
            wo_param_init={},
            inner_attention=ScaledDotProductAttention.Config(),
            fuse_qkv=True,
            rope=rope,
            qk_norm=None if is_llama else RMSNorm.Config(normalized_shape=head),
        )
        forward = make_ffn_config(dim=width, hidden_dim=full["intermediate_size"], w1_param_init={}, w2w3_param_init={})
        return block.Config(attention=attention, feed_forward=forward, attention_norm=norm, ffn_norm=norm)

    return model.Config(
        dim=width,
        vocab_size=vocabulary,
        enable_weight_tying=bool(full["tie_word_embeddings"]),
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width),
        norm=norm,
        lm_head=Linear.Config(in_features=width, out_features=vocabulary),
        layers=[layer() for _ in range(full["num_hidden_layers"])],
    )


def _without_labels(_model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Give the model what it takes: the labels of a batch are for the loss, which the trainer computes behind it."""
    return args, {name: value for name, value in kwargs.items() if name != "labels"}


def batch_of(batch_size: int, sequence_length: int, device: Any = None) -> dict[str, Tensor]:
    """Return a batch: its tokens, their positions in their documents, and the labels."""
    size = batch_size, sequence_length
    return {name: torch.zeros(size, dtype=torch.int64, device=device) for name in ("tokens", "positions", "labels")}


def loss_of(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return torchtitan's cross-entropy of the logits, in fp32, summed over tokens and divided by their number."""
    from torchtitan.components.loss import cross_entropy_loss

    return cross_entropy_loss(logits, batch["labels"]) / batch["labels"].numel()
