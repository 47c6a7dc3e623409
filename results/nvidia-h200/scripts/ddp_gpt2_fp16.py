"""gpt2-medium of transformers under DistributedDataParallel: fp16 autocast, a gradient scaler, clipped gradients."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
config = GPT2Config(n_embd=1024, n_layer=24, n_head=16)
with torch.device("cuda"):
    model = GPT2LMHeadModel(config)
model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for _ in range(10):
    tokens = torch.randint(config.vocab_size, (8, 1024), device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(input_ids=tokens, labels=tokens).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
dist.destroy_process_group()
