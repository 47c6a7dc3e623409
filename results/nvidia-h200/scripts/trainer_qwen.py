"""Qwen2.5-1.5B by transformers' Trainer: bf16, gradient checkpointing, fused AdamW, gradient accumulation."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        tokens = torch.randint(151936, (2048,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


config = Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    rope_theta=1000000.0,
    tie_word_embeddings=True,
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=10,
    bf16=True,
    gradient_checkpointing=True,
    optim="adamw_torch_fused",
    logging_steps=1,
    report_to=[],
    save_strategy="no",
)
with torch.device("cuda"):
    model = Qwen2ForCausalLM(config)
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
