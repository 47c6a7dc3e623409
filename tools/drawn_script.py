"""A drawn training script: ``torchrun drawn_script.py JSON``, where JSON is what validate/observer.py:draw returns.

Semicolons may stand for its commas, which separate the values of ``rehearse --each``.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    """A block of own code."""

    def __init__(self, drawn: Any, number: int) -> None:
        super().__init__()
        width = drawn.width
        self.head_dim, self.dropout = 64, drawn.dropout
        self.breaks = drawn.breaks and number % 2 == 1
        self.norm, self.norm_of_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Return the block's output for its input."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, -1, self.head_dim).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), self.dropout)
        h = F.gelu(self.up(self.norm_of_mlp(x)))
        if self.breaks:
            torch._dynamo.graph_break()
            h = h * h.detach().abs().mean()
        return x + self.down(h)


class Own(nn.Module):
    """A language model of own code."""

    def __init__(self, drawn: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, drawn.width)
        self.blocks = nn.ModuleList([Block(drawn, number) for number in range(drawn.layers)])
        self.head = nn.Linear(drawn.width, 8000, bias=False)

    def forward(self, tokens: Any) -> Any:
        """Return logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(drawn: Any) -> tuple[nn.Module, type[nn.Module]]:
    """Return a model, and the class of its blocks."""
    if drawn.code == "own":
        return Own(drawn), Block
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    sizes = {"hidden_size": drawn.width, "intermediate_size": 3 * drawn.width, "vocab_size": 8000}
    heads = {"num_attention_heads": drawn.width // 64, "num_key_value_heads": max(1, drawn.width // 128)}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=drawn.layers, use_cache=False))
    return model, LlamaDecoderLayer


def wrapped(drawn: Any, model: nn.Module, block: type[nn.Module]) -> nn.Module:
    """Return the model under FSDP or DDP, with its blocks checkpointed and compiled as drawn."""
    if drawn.checkpointing != "none":
        kinds, is_reentrant = checkpoints.CheckpointImpl, drawn.checkpointing == "reentrant"
        kind = kinds.REENTRANT if is_reentrant else kinds.NO_REENTRANT
        wrap = functools.partial(checkpoints.checkpoint_wrapper, checkpoint_impl=kind)
        checkpoints.apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrap, check_fn=lambda one: isinstance(one, block)
        )
    blocks = [one for one in model.modules() if isinstance(one, block)]
    if drawn.compile == "blocks":
        for one in blocks:
            one.compile()
    if drawn.wrapper == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        for one in [*blocks, model]:
            fully_shard(one, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    elif drawn.wrapper == "fsdp1":
        policy, precision = ModuleWrapPolicy({block}), MixedPrecision(torch.bfloat16, torch.float32)
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, mixed_precision=precision, use_orig_params=drawn.use_orig_params
        )
    elif drawn.wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model, static_graph=drawn.checkpointing == "reentrant")
    if drawn.compile == "whole":
        return torch.compile(model)  # type: ignore[return-value]
    if drawn.compile == "method":
        model.compile()
    return model


def loss_of(model: Callable[..., Any], tokens: torch.Tensor) -> Any:
    """Return the loss of a micro-batch."""
    found = model(tokens)
    logits = found if isinstance(found, torch.Tensor) else found.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def main() -> None:
    """Train four steps."""
    drawn = SimpleNamespace(**json.loads(sys.argv[1].replace(";", ",")))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model, block = made(drawn)
    model = wrapped(drawn, model.cuda(), block)
    loss = torch.compile(loss_of) if drawn.compile == "loss" else loss_of
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        for _ in range(drawn.accumulation):
            tokens = torch.randint(0, 8000, (2, drawn.lengths[step % len(drawn.lengths)]), device="cuda")
            with torch.autocast("cuda", torch.bfloat16, enabled=drawn.wrapper == "ddp"):
                found = loss(model, tokens)
            found.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
