"""A training loop with Accelerate: FSDP2 where ``accelerate launch`` says so."""

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import Qwen2Config


class RandomTokens(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.randint(0, 1000, (2048,))


config = Qwen2Config(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=32000,
)
accelerator = Accelerator()
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
data = torch.utils.data.DataLoader(RandomTokens(), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for tokens in data:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print("loss", accelerator.gather(loss.detach()).mean().item())
