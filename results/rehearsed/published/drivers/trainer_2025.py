"""Mistral-7B by transformers' Trainer, as fms-acceleration's benchmark of January 2025 ran it through trl's SFTTrainer.

``trainer_2025.py BATCH``: sequences for each GPU. In place of packed sequences of alpaca: random tokens, as many. In
place of a checkpoint: random weights in bf16. In place of the flash-attn package: PyTorch's FlashAttention, causal and
without a window, as a window as long as the sequence. The other arguments are those of the benchmark's defaults.yaml,
scenarios.yaml and accelerate.yaml.
"""

import sys

import torch
from torch.utils.data import Dataset
from transformers import MistralConfig, MistralForCausalLM, Trainer, TrainingArguments

LENGTH = 4096


class Tokens(Dataset):
    """Packed sequences."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32000, (LENGTH,))
        return {"input_ids": tokens, "labels": tokens}


torch.set_default_dtype(torch.bfloat16)
model = MistralForCausalLM(MistralConfig(sliding_window=None, attn_implementation="sdpa", use_cache=False))
torch.set_default_dtype(torch.float32)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=int(sys.argv[1]),
    gradient_checkpointing=True,
    max_steps=100,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    learning_rate=2e-5,
    weight_decay=0.01,
    warmup_steps=10,
    adam_epsilon=1e-4,
    lr_scheduler_type="linear",
    fsdp="full_shard auto_wrap",
    fsdp_config={
        "transformer_layer_cls_to_wrap": ["MistralDecoderLayer"],
        "backward_prefetch": "backward_pre",
        "forward_prefetch": False,
        "use_orig_params": True,
    },
)
Trainer(model, arguments, train_dataset=Tokens()).train()
