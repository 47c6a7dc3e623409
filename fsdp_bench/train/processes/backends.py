"""``python -m fsdp_bench.train.processes.backends``: what this torch can do, as a JSON object, for ``doctor``.

It runs in a process of its own, because asking CUDA starts it, which the process of a sweep must not do.
"""

import json
import platform

import torch
import torch.distributed as dist


def versions(device_type: str) -> dict[str, str]:
    """Return the versions of what runs, and the backend of the process group."""
    found = {"torch": str(torch.__version__), "python": platform.python_version(), "backend": dist.get_backend()}
    return found | ({"cuda": str(torch.version.cuda), "nccl": _nccl()} if device_type == "cuda" else {})


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def facts() -> dict[str, object]:
    """Return torch's version, its backends, and each GPU as torch sees it."""
    cuda = torch.cuda.is_available()
    return {
        "torch": str(torch.__version__),
        "cuda_build": torch.version.cuda,
        "cuda_available": cuda,
        "nccl": _nccl() if cuda and dist.is_nccl_available() else None,
        "gloo": dist.is_gloo_available(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count() if cuda else 0)],
    }


def _gpu(index: int) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "total_memory_bytes": properties.total_memory,
        "native_bf16": torch.cuda.get_device_capability(index) >= (8, 0),
        "num_multiprocessors": properties.multi_processor_count,
        "l2_cache_bytes": getattr(properties, "L2_cache_size", None),  # torch 2.6 and later
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
