"""gpt2-large of transformers under FullyShardedDataParallel, bf16 compute, parameters in host memory."""

import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
config = GPT2Config(n_embd=1280, n_layer=36, n_head=20, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
with torch.device("cuda"):
    model = GPT2LMHeadModel(config)
model = FullyShardedDataParallel(
    model,
    auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block}),
    mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
    cpu_offload=CPUOffload(offload_params=True),
    device_id=torch.cuda.current_device(),
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(10):
    tokens = torch.randint(config.vocab_size, (4, 1024), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
