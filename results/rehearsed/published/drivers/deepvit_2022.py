"""Starts main_training.py of transformer_framework of July 2022: ``deepvit_2022.py BATCH_SIZE DEPTH STRATEGY``.

To be run in a checkout of that repository. What it replaces:

    a rank's batch size, the model's depth and the sharding strategy, which are edited in config/deepvit_config.py;
    the module turtle, whose ``update`` performance/gpu_memory.py imports without using it: it needs a display;
    two defaults of torch, by those of July 2022: FullyShardedDataParallel had no ``limit_all_gathers`` yet (now True),
    and AdamW looped over tensors (``foreach``, now chosen on GPUs).
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.distributed import fsdp
from vit_pytorch import deepvit

if __name__ == "__main__":
    turtle: Any = ModuleType("turtle")
    turtle.update = None
    sys.modules["turtle"] = turtle
    sys.path.insert(0, os.getcwd())
    from config import deepvit_config

    batch_size, depth, strategy = int(sys.argv[1]), int(sys.argv[2]), fsdp.ShardingStrategy[sys.argv[3]]

    @dataclass
    class Config(deepvit_config.train_config):  # type: ignore[misc]
        """Theirs, with another batch size and strategy."""

        batch_size_training: int = batch_size
        sharding_strategy: fsdp.ShardingStrategy = strategy

    deepvit_config.train_config = Config
    deepvit_config.DeepViT = lambda **given: deepvit.DeepViT(**{**given, "depth": depth})
    fsdp.FullyShardedDataParallel = partial(fsdp.FullyShardedDataParallel, limit_all_gathers=False)
    torch.optim.AdamW = partial(torch.optim.AdamW, foreach=False)  # type: ignore[misc]
    sys.argv[:] = ["main_training.py"]
    runpy.run_path("main_training.py", run_name="__main__")
