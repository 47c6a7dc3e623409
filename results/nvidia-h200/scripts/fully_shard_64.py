"""Llama-3.1-8B of transformers as rank 0 of 64 under fully_shard; collectives end at once. Every block checkpointed."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

torch.cuda.set_device(0)
dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
config = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope_theta=500000.0,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device="cuda")
model.model.rotary_emb = type(model.model.rotary_emb)(config, device="cuda")
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.02)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
for _ in range(10):
    tokens = torch.randint(config.vocab_size, (2, 4096), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
