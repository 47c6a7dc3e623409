"""Finds a model, or records its code in a subprocess, which imports torch, and keeps the recording in a cache."""

import gzip
import hashlib
import lzma
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.catalog.architectures import BEFORE_SM80, NotRecorded, recorded_architecture
from fsdp_bench.catalog.loader import BUILT_IN, Catalog
from fsdp_bench.catalog.lookup import adapted_model, name_with, named_config
from fsdp_bench.catalog.lookup import model as find_model
from fsdp_bench.catalog.recorded import read_recorded, recorded_model
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import ExitCode, FsdpBenchError, MachineError, SpecError, install_hint
from fsdp_bench.spec.files import cache_folder, write_atomically
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.config import loops_over_sequence
from fsdp_bench.spec.recording.model import Model, code_of
from fsdp_bench.spec.recording.recorded import FORMAT_VERSION, RecordedCode, length_not_recorded
from fsdp_bench.spec.recording.variants import with_frozen
from fsdp_bench.spec.subprocesses.model_code import RecordingAnswer, RecordingSpec
from fsdp_bench.spec.subprocesses.own_python import own_environment, own_python

_RECORDER = Path(__file__).parent.parent / "train"
"""The folder whose code decides what is recorded: train/recording imports most of it."""
_PREFIX = "recording: "
"""Begins the lines of progress."""


class RecordingError(FsdpBenchError):
    """A recording failed in PyTorch or in fsdp-bench, not because of its input. The message is one line."""

    exit_code = ExitCode.CRASHED


def record(
    spec: RecordingSpec,
    progress: Callable[[str], None] = lambda what: None,
    recorder: Sequence[str] = tuple(own_python("fsdp_bench.train.recording.main")),
) -> RecordedCode:
    """Record a model's code. ``progress`` is called with each variant that is begun; ``recorder`` is the command.

    Raises MachineError, with the reason, if it cannot be recorded; RecordingError if PyTorch's code fails.
    """
    if _version("torch") is None:
        what, extras = ("torch", "train") if spec.config is None else ("torch and transformers", "train,hf")
        raise MachineError(f"recording a model needs {what}: {install_hint(extras)}")
    last = ""
    with tempfile.TemporaryFile() as output:  # a pipe would be full before the lines of progress end
        process = subprocess.Popen(
            [*recorder, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.PIPE,
            env=own_environment(),
        )
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            process.stdin.write(msgspec.json.encode(to_builtins(spec)))
            process.stdin.close()
            for line in process.stderr:
                text = line.decode(errors="replace").strip()
                last = text or last
                if text.startswith(_PREFIX):
                    progress(text.removeprefix(_PREFIX))
            process.wait()
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
        output.seek(0)
        answer = output.read()
    if not answer:
        raise RecordingError(f"the recording's process ended: {last or 'no message'}")
    found = msgspec.json.decode(answer, type=RecordingAnswer)
    if found.recorded is None:
        raise (MachineError if found.users_mistake else RecordingError)(str(found.error))
    return found.recorded


def write(recorded: RecordedCode, path: Path) -> int:
    """Write a recording, compressed for ``.gz``; return its bytes. Raises OSError if the folder cannot be written."""
    data = msgspec.json.encode(recorded)
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    elif path.suffix == ".xz":
        data = lzma.compress(data, preset=9)
    write_atomically(path, data)
    return len(data)


def recorded_config(
    config: dict[str, Any],
    sequence_length: int,
    progress: Callable[[str], None],
    lora: LoRA | None = None,
    activation_offload: bool = False,
    name: str = "the model",
    before_sm80: bool = False,
) -> RecordedCode:
    """Return the recording of a config.json, for its sizes alone: the cached one, or a new one of half a minute.

    If the code loops over the sequence, the recording is valid for this length only; with a sliding window, for one
    side of it; else for all lengths. A length of 1 is that of a search for the longest, and stands for any.
    ``before_sm80``: as on GPUs without FlashAttention.

    Raises:
        SpecError: for a length that code is not recorded for, before it is.
        MachineError: as ``record``.
    """
    is_fixed = loops_over_sequence(config)
    reason = None if is_fixed or sequence_length == 1 else length_not_recorded(name, sequence_length)
    if reason is not None:
        raise SpecError(reason)
    spec = RecordingSpec(
        config=config,
        sequence_length=sequence_length,
        lora=lora,
        activation_offload=activation_offload,
        fixed_length=is_fixed,
        before_sm80=before_sm80,
    )
    key, folder = _digest(spec), kept_folder()
    if folder is None:
        return record(spec, progress)
    for kept in sorted(folder.glob(f"{key}-*.json.gz")):
        with suppress(SpecError):  # damaged
            recorded = read_recorded(kept)
            if recorded.shortest <= sequence_length <= (recorded.longest or sequence_length):
                return recorded
    recorded = record(spec, progress)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write(recorded, folder / f"{key}-{sequence_length}.json.gz")
    return recorded


def kept_folder() -> Path | None:
    """Return where what was asked of models' code is kept; None for a user without a home."""
    folder = cache_folder()
    return folder and folder / "recorded"


def found_or_recorded(
    named: str | Path,
    sequence_length: int,
    catalog: Catalog = BUILT_IN,
    code: str | None = None,
    lora: LoRA | None = None,
    activation_offload: bool = False,
    attention: str | None = None,
    progress: Callable[[str], None] = lambda what: None,
    before_sm80: bool = False,
) -> Model:
    """Return a model of the catalogue or of a config.json; record Hugging Face's code of which no recording holds.

    With ``before_sm80`` it is for 16 bits on GPUs without FlashAttention (Gpu.is_before_sm80) where it can be had: else
    as on others, of which ``knows_attention`` says so. ``activation_offload``: what offloaded activations need is
    recorded, too. ``progress`` is called with each variant that is begun. Other arguments as ``catalog.lookup.model``.

    Raises:
        SpecError: as ``catalog.lookup.model``.
        MachineError: as ``record``, with the reason why it has to be recorded.
    """

    def recorded(**how: bool) -> Model:
        config, name = named_config(named, catalog, attention)
        code = recorded_config(config, sequence_length, progress, lora, activation_offload, name, **how)
        return recorded_model(code, name_with(name, lora))

    if before_sm80 and attention is None and _is_huggingfaces(named, catalog, code, lora):
        with suppress(NotRecorded):
            if lora is None:
                config, name = named_config(named, catalog)
                return recorded_architecture(config, sequence_length, name, BEFORE_SM80)
        with suppress(MachineError):
            return recorded(before_sm80=True)
    try:
        if attention is not None or (lora is not None and activation_offload):
            raise NotRecorded(f"{name_with(named_config(named, catalog, attention)[1], lora)} was not recorded")
        if lora is not None:
            return adapted_model(named, sequence_length, lora, catalog)
        return find_model(named, sequence_length, catalog=catalog, code=code)
    except NotRecorded as why:
        if code == "torchtitan":
            raise
        try:
            return recorded()
        except MachineError as error:
            raise MachineError(f"{why}; {error}") from None


def _is_huggingfaces(named: str | Path, catalog: Catalog, code: str | None, lora: LoRA | None) -> bool:
    try:
        return lora is not None or code_of(find_model(named, catalog=catalog, code=code)) == "huggingface"
    except NotRecorded:
        return True


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _digest(spec: RecordingSpec) -> str:
    """Return a name for what decides a recording: the config, the variants, the recorder, the versions of what runs.

    The sequence length is not in it: the recording says for which it holds.
    """
    packages = ("torch", "transformers", *(spec.lora.packages if spec.lora is not None else ()))
    versions = [_version(package) or "" for package in packages]
    kinds = [kind.name for kind in with_frozen(spec.lora)]
    request = {**to_builtins(spec), "sequence_length": None}
    data = msgspec.json.encode([request, versions, FORMAT_VERSION, kinds], order="sorted")
    digest = hashlib.sha256(data)
    for source in sorted(_RECORDER.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]
