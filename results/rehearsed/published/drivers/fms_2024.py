"""Starts main_training.py of fms-fsdp of March 2024: ``fms_2024.py ARGUMENTS``.

To be run in a checkout of that repository; ARGUMENTS are those of its main_training.py. What it replaces:

    the greatest length of rotary embeddings, which foundation-model-stack keeps on the GPU and compares with 0 in each
    layer. The comparison is made and read, as there; but on a stand-in for a GPU it says nothing, so the length itself
    is the number that main_training.py gives the model.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import torch
from fms.modules.positions import RotaryEmbedding

_original = RotaryEmbedding.compute_freqs_cis


def _compute(self: Any, device: torch.device, max_seq_len: Any) -> Any:
    if isinstance(max_seq_len, torch.Tensor):
        bool(max_seq_len > 0)
        max_seq_len = self.max_seq_len
    return _original(self, device, max_seq_len)


if __name__ == "__main__":
    RotaryEmbedding.compute_freqs_cis = _compute
    sys.path.insert(0, os.getcwd())
    sys.argv[0] = "main_training.py"
    runpy.run_path("main_training.py", run_name="__main__")
