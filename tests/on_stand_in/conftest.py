"""Tests on the stand-in for NVIDIA's libraries, in the environment that ``make test-rehearsal`` installs.

All need PyTorch's CUDA build, and many need transformers. If either is missing, nothing here is collected.
"""

import importlib.util
from pathlib import Path

import pytest

OF_CUDNN = ("test_cudnn", "test_exported_scripts", "test_frameworks", "test_gpu_tests", "test_time", "test_vision")
"""Modules whose rehearsals run the attention that PyTorch chooses."""


def has_cuda_build() -> bool:
    """Return whether this Python's torch is built for CUDA."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return folder is not None and (folder / "lib" / "libtorch_cuda.so").exists()


if not has_cuda_build() or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["*"]


@pytest.fixture(autouse=True)
def flash_attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all other rehearsals run FlashAttention: to compile cuDNN's takes 2 to 4 CPU seconds in each."""
    if request.path.stem not in OF_CUDNN:
        monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
