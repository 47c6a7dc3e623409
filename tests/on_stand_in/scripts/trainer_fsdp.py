"""Hugging Face's Trainer with FSDP and activation checkpointing, as its users write it. ``lora``: with PEFT's LoRA."""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.models.llama import LlamaConfig

config = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
model = AutoModelForCausalLM.from_config(config)
if "lora" in sys.argv:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


class RandomTokens(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = torch.randint(0, 1000, (2048,))
        return {"input_ids": tokens, "labels": tokens}


arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=1,
    max_steps=20,
    bf16=True,
    report_to=[],
    save_strategy="no",
    logging_steps=1,
    fsdp="full_shard auto_wrap",
    fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True},
)
Trainer(model, arguments, train_dataset=RandomTokens()).train()
