"""A small training script, run on the stand-in as rank 0 of 8: ``python training.py fsdp1`` or ``fsdp2``."""

from __future__ import annotations

import functools
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH, VOCABULARY, BLOCKS = 512, 8192, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 8, WIDTH // 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def wrapped(model: nn.Module, api: str) -> nn.Module:
    if api == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=0, mixed_precision=precision)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy2 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*(block for block in model.modules() if isinstance(block, Block)), model):
        fully_shard(module, mp_policy=policy2)
    return model.cuda()


def main(api: str) -> None:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    torch.cuda.set_device(0)
    blocks = [Block() for _ in range(BLOCKS)]
    model = wrapped(nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)), api)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        tokens = torch.randint(0, VOCABULARY, (2, 512), device="cuda")
        F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
    # A thread of PyTorch's autograd engine still frees what FSDP queued on the backward pass, and needs the interpreter
    # for that (THPEngine_queue_callback): a process that ends at once may abort.
    time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1])
