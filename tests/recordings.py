"""``make recordings``: records what the models of the catalogue run, or those that are named, where it is missing.

A model whose code a recording holds for already is left out; to record all anew, empty the folder first. A recording
takes from half a minute to three minutes. Where torchtitan is installed, its code is recorded, too. Then the blocks of
models whose blocks are all alike are compiled, which takes five minutes an architecture.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from fsdp_bench.catalog.adapters import ADAPTED, USUAL
from fsdp_bench.catalog.loader import models
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.spec.errors import FsdpBenchError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.subprocesses.dry_run import ModelCode
from fsdp_bench.sweep.architectures import BEFORE_SM80_MODELS, record_compiled, record_missing

TORCHTITAN = ("llama", "qwen3")
"""The architectures of torchtitan's that are recorded (train/models/torchtitan.py)."""


def main() -> None:
    """Record what is missing; say what cannot be recorded."""
    for entry in models():
        if sys.argv[1:] and entry.name not in sys.argv[1:]:
            continue
        _record(entry, "huggingface")
        for lora in USUAL if entry.family in ADAPTED else ():
            _record(entry, "huggingface", lora)
        if entry.name in BEFORE_SM80_MODELS:
            _record(entry, "huggingface", before_sm80=True)
        if entry.family in TORCHTITAN and find_spec("torchtitan") is not None:
            _record(entry, "torchtitan")
    _compile(None)
    _compile(None, float8=True)
    for entry in models():
        if not sys.argv[1:] or entry.name in sys.argv[1:]:
            _compile(entry)


def _record(entry: ModelEntry, code: ModelCode, lora: LoRA | None = None, before_sm80: bool = False) -> None:
    try:
        for path in record_missing(entry, code, lora=lora, before_sm80=before_sm80):
            print(f"{code} {path.parent.name}/{path.name}: {path.stat().st_size // 1024} KiB", flush=True)
    except FsdpBenchError as error:
        print(f"{entry.name}: {error}", file=sys.stderr, flush=True)


def _compile(entry: ModelEntry | None, float8: bool = False) -> None:
    try:
        if (path := record_compiled(entry, float8)) is not None:
            print(f"compiled {path.name}: {path.stat().st_size // 1024} KiB", flush=True)
    except FsdpBenchError as error:
        print(f"{entry.name if entry else 'benchmark models'}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
