"""Gemma-2-2B of transformers, eager attention with soft caps and sliding windows, all in bf16, SGD with momentum."""

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

config = Gemma2Config(
    vocab_size=256000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    sliding_window=1024,
    attn_implementation="eager",
)
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = Gemma2ForCausalLM(config)
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
for _ in range(10):
    tokens = torch.randint(config.vocab_size, (1, 2048), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
