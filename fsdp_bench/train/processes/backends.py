"""``python -m fsdp_bench.train.processes.backends``: what this torch can do, as one JSON object, for ``doctor``.

A process of its own, because looking at CUDA starts it, and a sweep's manager must not.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist


def facts() -> dict[str, object]:
    """Return torch's version, its backends, and each GPU as torch sees it."""
    cuda = torch.cuda.is_available()
    return {
        "torch": str(torch.__version__),
        "cuda_build": torch.version.cuda,
        "cuda_available": cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None,
        "gloo": dist.is_gloo_available(),
        "gpus": [
            {
                "name": torch.cuda.get_device_name(index),
                "total_memory_bytes": torch.cuda.get_device_properties(index).total_memory,
                "native_bf16": torch.cuda.get_device_capability(index) >= (8, 0),
            }
            for index in range(torch.cuda.device_count() if cuda else 0)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
