"""``make recordings``: records what the models of the catalogue run, or those that are named, where it is missing.

A model whose code a recording holds for already is left out; to record all anew, empty the folder first. A recording
takes from half a minute to three minutes. Where torchtitan is installed, its code is recorded, too. Then the blocks of
models whose blocks are all alike are compiled, on the stand-in for NVIDIA's libraries, which takes five minutes an
architecture.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from fsdp_bench.catalog.architectures import (
    ADAPTERS,
    BEFORE_SM80,
    FOLDERS,
    USUAL,
    NotRecorded,
    folder_of,
    recorded_architecture,
)
from fsdp_bench.catalog.loader import models
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.catalog.recorded import BENCHMARK, FLOAT8
from fsdp_bench.catalog.recorded import FOLDER as COMPILED
from fsdp_bench.plan.recording import record, write
from fsdp_bench.spec.errors import FsdpBenchError, MachineError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.compiled import huggingface_block
from fsdp_bench.spec.recording.config import loops_over_sequence
from fsdp_bench.spec.recording.recorded import RecordedCode
from fsdp_bench.spec.subprocesses.dry_run import ModelCode
from fsdp_bench.spec.subprocesses.model_code import RecordingSpec
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu, stand_in_environment

ADAPTED = ("gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""The model_types that are fine-tuned most."""
TORCHTITAN = ("llama", "qwen3")
"""The architectures of torchtitan's that are recorded (train/models/torchtitan.py)."""
SHORT, LONG = 32, 1 << 30
"""Sequence lengths within and beyond any sliding window."""
LOOPED = 4096
"""The one length for which code is recorded that loops over the sequence."""

BEFORE_SM80_MODELS = (
    "Llama-3.2-1B",
    "Llama-2-7B",
    "Llama-2-70B",
    "Mistral-7B-v0.3",
    "Qwen2.5-0.5B",
    "Qwen2.5-7B",
    "gpt2",
)
"""The models whose architectures are recorded as on V100 and T4, too; others are recorded where they are asked for."""


def record_missing(
    entry: ModelEntry,
    code_of: ModelCode = "huggingface",
    folder: Path | None = None,
    lora: LoRA | None = None,
    before_sm80: bool = False,
) -> list[Path]:
    """Record what a model runs within and beyond its sliding window, where no recording holds; return the new files.

    ``folder`` is where to look and write, by default what comes with fsdp-bench. With ``lora``, PEFT's adapters of any
    rank, nothing is recorded that offloaded activations need; with ``before_sm80``, what runs on GPUs without
    FlashAttention (Gpu.is_before_sm80).

    Raises:
        MachineError: if torch, transformers or torchtitan is missing, or the code cannot be recorded; with the reason.
    """
    folder = folder or (BEFORE_SM80 if before_sm80 else FOLDERS[code_of] if lora is None else ADAPTERS)
    into = folder if lora is None else folder_of(lora, folder)
    written = []
    loops = loops_over_sequence(entry.hf_config())
    for length in (LOOPED,) if loops else (SHORT, LONG):
        try:
            recorded_architecture(entry.hf_config(), length, entry.name, folder, lora)
        except NotRecorded:
            spec = RecordingSpec(
                config=entry.hf_config(),
                sequence_length=length,
                fixed_length=loops,
                lora=lora,
                activation_offload=lora is None,
                before_sm80=before_sm80,
            )
            code = record(spec, recorder=_python("tools.all_sizes", code_of))
            path = into / file_name(entry, code)
            into.mkdir(parents=True, exist_ok=True)
            write(code, path)
            written.append(path)
    return written


def file_name(entry: ModelEntry, code: RecordedCode) -> str:
    """Return the name of a recording's file: the model_type, the model that it was recorded for, and the window."""
    assert code.architecture is not None
    parts = [entry.family, *(re.sub(r"[^A-Za-z0-9]+", "-", part) for part in (entry.name, code.architecture.side))]
    return ".".join([part for part in parts if part] + ["json", "xz"])


COMPILED_TYPES = ("gpt2", "llama", "ministral", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
"""The model_types whose blocks are recorded compiled: dense, and all of one kind."""
GPU = "H200"
"""The GPU that blocks are compiled for. Formulas have the parts of sums, which depend on it, as symbols."""


def record_compiled(entry: ModelEntry | None, float8: bool = False) -> list[Path]:
    """Record what is missing of the compiled blocks of a model's architecture, or of the benchmark models (None).

    With ``float8`` the benchmark Llama's whose linear layers compute in float8, which needs torchao.

    Returns the file; nothing for a model whose blocks are not recorded.

    Raises MachineError if this machine cannot rehearse, or torch cannot compile the blocks; with the reason.
    """
    of_benchmark = FLOAT8 if float8 else BENCHMARK
    path = COMPILED / f"{of_benchmark if entry is None else entry.family}.json.xz"
    given = [FLOAT8] if float8 else []
    if entry is not None:
        if entry.family not in COMPILED_TYPES:
            return []
        config = entry.hf_config()
        architecture = recorded_architecture(config, SHORT, entry.name).code.architecture
        assert architecture is not None
        given = [huggingface_block(architecture), json.dumps(config)]
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **stand_in_environment(rehearsed_gpu(GPU))}
    command = _python("tools.compiled.main", str(path), *given)
    if subprocess.run(command, env=environment, check=False).returncode:
        raise MachineError(f"{path.name}: the blocks cannot be compiled; the reason is above")
    return [path]


def main() -> None:
    """Record what is missing; say what cannot be recorded."""
    for entry in models():
        if sys.argv[1:] and entry.name not in sys.argv[1:]:
            continue
        _report(entry.name, partial(record_missing, entry))
        for lora in USUAL if entry.family in ADAPTED else ():
            _report(entry.name, partial(record_missing, entry, lora=lora))
        if entry.name in BEFORE_SM80_MODELS:
            _report(entry.name, partial(record_missing, entry, before_sm80=True))
        if entry.family in TORCHTITAN and find_spec("torchtitan") is not None:
            _report(entry.name, partial(record_missing, entry, "torchtitan"))
    _report("benchmark models", partial(record_compiled, None))
    _report("benchmark models", partial(record_compiled, None, float8=True))
    for entry in models():
        if not sys.argv[1:] or entry.name in sys.argv[1:]:
            _report(entry.name, partial(record_compiled, entry))


def _report(name: str, make: Callable[[], list[Path]]) -> None:
    """Make recordings; print the new files, or why a model cannot be recorded."""
    try:
        for path in make():
            print(f"{path.relative_to(COMPILED.parent)}: {path.stat().st_size // 1024} KiB", flush=True)
    except FsdpBenchError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)


def _python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of tools/, whatever the current folder is."""
    return ["env", f"PYTHONPATH={Path(__file__).parents[1]}", sys.executable, "-m", module, *arguments]


if __name__ == "__main__":
    main()
