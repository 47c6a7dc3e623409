"""export_each(): the files of one setting, by kind. document() is their JSON form."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_bench.catalog.lookup import CODES
from fsdp_bench.plan.export import accelerate, huggingface, pytorch, torchtitan
from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import SEGMENTS, File, text_of
from fsdp_bench.plan.export.pieces import refuse_adapters
from fsdp_bench.spec.errors import SpecError, not_allowed
from fsdp_bench.spec.recording.model import Model, code_of, whose_code
from fsdp_bench.spec.units import format_gib

_MAKERS = {
    pytorch.KIND: pytorch.script,
    accelerate.KIND: accelerate.config_and_script,
    huggingface.KIND: huggingface.arguments_and_script,
    torchtitan.KIND: torchtitan.config,
}
SLURM = "slurm"
KINDS = (*_MAKERS, SLURM)


def read_kinds(words: Sequence[str]) -> tuple[str, ...]:
    """Read kinds, several by comma; each once. Raises SpecError for a word that is no kind."""
    found = [word.strip().lower() for text in words for word in text.split(",")]
    for word in found:
        if word not in KINDS:
            raise not_allowed("export", word, KINDS)
    return tuple(dict.fromkeys(found))


def refuse_model(model: Model) -> None:
    """Raise SpecError for a model that no library builds from a config.json, naming what can be exported."""
    if code_of(model) not in CODES:
        raise SpecError(f"export: {model.name} is your own code; --model, --params and --hf-config are exported")


def export_each(kinds: Sequence[str], chosen: Chosen) -> tuple[list[File], list[SpecError]]:
    """Return the files of those kinds that can express a setting, and for each of the others the error that says why.

    Nothing is written; files.write() does that. Raises SpecError for a setting that no kind can express.
    """
    kinds = read_kinds(kinds)
    _refuse_for_all(chosen)
    files: list[File] = []
    refused: list[SpecError] = []
    for kind in (kind for kind in _MAKERS if kind in kinds):
        try:
            if chosen.lora is not None and kind in (accelerate.KIND, torchtitan.KIND):
                raise SpecError(f"export {kind}: adapters are not exported for it; --export {pytorch.KIND} has them")
            files += _MAKERS[kind](*_in_trained_code(chosen, kind))
        except SpecError as error:
            refused.append(error)
    if SLURM in kinds and (files or not refused):
        written = [file.kind for file in files]
        started = _started_kind(written)
        of_started = dict.fromkeys(note for file in files if file.kind == started for note in file.notes)
        files += _job(_in_trained_code(chosen, started)[0], written, tuple(of_started))
    return files, refused


def _refuse_for_all(chosen: Chosen) -> None:
    refuse_model(chosen.question.model)
    if chosen.question.kernels != "cuda":
        raise SpecError("export: what is exported runs on GPUs; leave out --kernels cpu")
    for one in chosen.setup.changed():
        if one.not_exported is not None:
            raise SpecError(f"export: {one.name} is not exported; {one.not_exported}")
    if chosen.lora is not None:
        refuse_adapters(chosen.setup, chosen.lora)


def _in_trained_code(chosen: Chosen, kind: str) -> tuple[Chosen, tuple[str, ...]]:
    """Return a setting predicted for the code that a file trains, with a note. Raises SpecError if it does not fit."""
    code = torchtitan.KIND if kind == torchtitan.KIND else "huggingface"
    if chosen.code == code:
        return chosen, ()
    answered, trained = whose_code(chosen.code), whose_code(code)
    found = chosen.in_code(code)
    if found is None:
        return chosen, (f"the answer is for {answered}; this trains {trained}, whose memory is not known here",)
    needed, was = found.prediction.needed_bytes, chosen.prediction.needed_bytes
    if found.prediction.fits is False:
        raise SpecError(
            f"export {kind}: the answer is for {answered}; what is exported trains {trained}, which with this setting"
            f" needs {format_gib(needed)} reserved and does not fit (predicted); --code {code} answers for it"
        )
    return found, (
        f"the answer is for {answered}; this trains {trained}: {format_gib(needed)} reserved instead of"
        f" {format_gib(was)} (predicted); --code {code} answers for it",
    )


def document(files: Sequence[File], paths: Sequence[Path]) -> list[Mapping[str, Any]]:
    """Return the JSON form of files and where they were written."""
    return [
        {"kind": file.kind, "path": str(path), "start": file.start, "notes": list(file.notes)}
        for file, path in zip(files, paths, strict=True)
    ]


# -- train.sbatch: a job for Slurm that starts one of the other exported files on every node ---------------------------

JOB_NAME = "train.sbatch"

_STARTS = {
    pytorch.KIND: pytorch.NAME,
    huggingface.KIND: huggingface.NAME,
    torchtitan.KIND: "-m torchtitan.train --module torchtitan_config --config chosen_setting",
    accelerate.KIND: accelerate.NAME,
}
"""The file that is started, by kind; the first kind that is exported beside."""


def _started_kind(kinds: Sequence[str]) -> str:
    return next((one for one in _STARTS if one in kinds), pytorch.KIND)


def _job(chosen: Chosen, kinds: Sequence[str], notes: tuple[str, ...]) -> list[File]:
    """Return the job, which starts the first of the other kinds, or train_fsdp.py where there is none.

    ``notes`` are those of what it starts.

    Raises SpecError if it is not known how the GPUs are spread over servers.
    """
    kind = _started_kind(kinds)
    if kind not in kinds:
        notes = (*notes, f"the job starts {pytorch.NAME}, which --export pytorch writes")
    facts = {
        "segments": SEGMENTS,
        "accelerate_config": accelerate.CONFIG_NAME if kind == accelerate.KIND else "",
        "started": _STARTS[kind],
    }
    text = text_of(JOB_NAME, f"Slurm job that starts {_STARTS[kind]}", chosen, notes, has_imports=True, **facts)
    return [File(SLURM, JOB_NAME, f"#!/bin/bash\n{text}", f"sbatch {JOB_NAME}", notes)]
