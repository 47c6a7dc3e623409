"""export(): the files of one setting, by kind. document() is their JSON form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_bench.plan.export import accelerate, huggingface, pytorch, slurm, torchtitan
from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import File
from fsdp_bench.spec.errors import SpecError, not_allowed
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import Float8

_MAKERS = {
    pytorch.KIND: pytorch.script,
    accelerate.KIND: accelerate.config_and_script,
    huggingface.KIND: huggingface.arguments_and_script,
    torchtitan.KIND: torchtitan.config,
}
KINDS = (*_MAKERS, slurm.KIND)
"""The kinds of files."""


def read_kinds(words: Sequence[str]) -> tuple[str, ...]:
    """Read kinds, several by comma; each once.

    Raises:
        SpecError: for a word that is no kind.
    """
    found = [word.strip().lower() for text in words for word in text.split(",")]
    for word in found:
        if word not in KINDS:
            raise not_allowed("export", word, KINDS)
    return tuple(dict.fromkeys(found))


def refuse_model(model: Model) -> None:
    """Raise for a model that no library builds from a config.json.

    Raises:
        SpecError: naming what can be exported.
    """
    if not isinstance(model, RecordedModel):
        return
    origin = model.code.origin
    if origin.lora is not None:
        raise SpecError("export: models with adapters are not exported; leave out --lora and --qlora")
    if origin.code not in ("huggingface", "torchtitan"):
        raise SpecError(f"export: {model.name} is your own code; --model, --params and --hf-config are exported")


def export(kinds: Sequence[str], chosen: Chosen) -> list[File]:
    """Return the files of a setting. Nothing is written; files.write() does that.

    Args:
        kinds: some of KINDS.
        chosen: the setting and its model, of ``chosen_by_prediction`` or ``chosen_by_offer``.

    Raises:
        SpecError: for a setting that a kind cannot express, with what would help.
    """
    kinds = read_kinds(kinds)
    refuse_model(chosen.question.model)
    if chosen.question.kernels != "cuda":
        raise SpecError("export: what is exported runs on GPUs; leave out --kernels cpu")
    if chosen.setup.float8 is not Float8.NONE:
        raise SpecError("export: float8 is not exported; leave it out, and call torchao's convert_to_float8_training")
    notes = _of_code(chosen)
    files = [file for kind, make in _MAKERS.items() if kind in kinds for file in make(chosen, notes)]
    if slurm.KIND in kinds:
        started = slurm.started_kind(kinds)
        of_started = dict.fromkeys(note for file in files if file.kind == started for note in file.notes)
        files += slurm.job(chosen, kinds, tuple(of_started))
    return files


def _of_code(chosen: Chosen) -> tuple[str, ...]:
    """Return a note where the files train other code than was predicted."""
    if chosen.code == "huggingface":
        return ()
    whose = "the benchmark's own code" if chosen.code == "benchmark" else "torchtitan's code"
    return (f"predicted for {whose}; this trains transformers' code, which --code huggingface predicts",)


def document(files: Sequence[File], paths: Sequence[Path]) -> list[Mapping[str, Any]]:
    """Return the JSON form of files and where they were written."""
    return [
        {"kind": file.kind, "path": str(path), "start": file.start, "notes": list(file.notes)}
        for file, path in zip(files, paths, strict=True)
    ]
