"""TRL's SFTTrainer: Qwen2.5-1.5B in bf16 with LoRA, packed sequences of 2,048 tokens, already tokenized."""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

words = {f"w{index}": index for index in range(1000)} | {"<pad>": 1000, "<eos>": 1001, "<unk>": 1002}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
processing = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
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
torch.manual_seed(0)
rows = torch.randint(1000, (100, 2048), generator=torch.Generator().manual_seed(0)).tolist()
arguments = SFTConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    max_steps=10,
    bf16=True,
    max_length=2048,
    gradient_checkpointing=True,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
)
with torch.device("cuda"):
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"input_ids": rows}),
    processing_class=processing,
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
).train()
