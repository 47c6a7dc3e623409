"""Reads a recorded model from a file that ``fsdp-bench record`` wrote."""

import gzip
import lzma
import zlib
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.recording.compiled import CompiledCatalog
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.recording.recorded import FORMAT_VERSION, RecordedCode


@lru_cache(maxsize=16)
def read_recorded(path: Path) -> RecordedCode:
    """Read a recording. Raises SpecError if the file is missing, damaged or of a newer version; naming it."""
    try:
        data = _unpacked(path)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise SpecError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version == FORMAT_VERSION:
            return msgspec.json.decode(data, type=RecordedCode)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{path}: is not a recorded model: {error}") from None
    if version is None:
        raise SpecError(f"{path}: is not a recorded model; `fsdp-bench record` writes one")
    raise SpecError(
        f"{path}: is a recorded model of version {shown(version)}, and this fsdp-bench reads {FORMAT_VERSION};"
        " record it again"
    )


MOST_BYTES = 1 << 28
"""More than an unpacked recording has: the largest of the catalogue has 38 MB. Packed zeros could fill the memory."""


def _unpacked(path: Path) -> bytes:
    with open(path, "rb") as file:
        begin = file.read(6)
    unpacking = gzip.open if begin[:2] == b"\x1f\x8b" else lzma.open if begin == b"\xfd7zXZ\0" else open
    with unpacking(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise SpecError(f"{path}: is no recorded model: it has more than {MOST_BYTES >> 20} MiB")
    return data


class _Version(msgspec.Struct):
    """The fields that every version of the format has."""

    format_version: Any = None


def recorded_model(code: RecordedCode, name: str) -> RecordedModel:
    """Return the model that was recorded, with its own sizes."""
    return RecordedModel(
        name=name,
        code=code,
        sizes=tuple(sorted(code.sizes.items())),
        counts=tuple(code.counts.items()),
        max_position_embeddings=code.positions,
    )


FOLDER = Path(__file__).parent / "recordings" / "compiled"
BENCHMARK = "benchmark"
FLOAT8 = "float8"


@cache
def compiled_catalog(name: str = BENCHMARK) -> CompiledCatalog:
    """Return the recordings of the benchmark models, in float8, or of a model_type; without codes if there are none."""
    path = FOLDER / f"{name}.json.xz"
    if not path.exists():
        return CompiledCatalog(torch="", date="", codes={})
    return msgspec.json.decode(lzma.decompress(path.read_bytes()), type=CompiledCatalog)
