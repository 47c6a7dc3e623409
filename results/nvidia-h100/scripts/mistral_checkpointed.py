"""Ten blocks of Mistral-7B of transformers, all in bf16, every block checkpointed, AdamW. One GPU."""

import torch
from transformers import MistralConfig, MistralForCausalLM

config = MistralConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=10,
    num_attention_heads=32,
    num_key_value_heads=8,
    sliding_window=None,
)
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = MistralForCausalLM(config)
torch.set_default_dtype(torch.float32)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(10):
    tokens = torch.randint(config.vocab_size, (4, 4096), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
