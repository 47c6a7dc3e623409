"""Reads what torch.compile made of blocks: of the benchmark models' and, in a file a model_type, of transformers'.

``make recordings`` writes them.
"""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

import msgspec

from fsdp_bench.spec.recording.compiled import CompiledCatalog

FOLDER = Path(__file__).parent / "recordings" / "compiled"
BENCHMARK = "benchmark"
"""The name of the file with the benchmark models' blocks."""
FLOAT8 = "float8"
"""The name of the file with the benchmark Llama's blocks in float8."""


@cache
def compiled_catalog(name: str = BENCHMARK) -> CompiledCatalog:
    """Return the recordings of the benchmark models, in float8, or of a model_type; without codes if there are none."""
    path = FOLDER / f"{name}.json.xz"
    if not path.exists():
        return CompiledCatalog(torch="", date="", codes={})
    return msgspec.json.decode(lzma.decompress(path.read_bytes()), type=CompiledCatalog)
