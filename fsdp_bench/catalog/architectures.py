"""Recordings that come with fsdp-bench, by architecture: each holds for every config.json with the same settings.

They are files of recordings/, named ``MODEL_TYPE.WHAT.json.xz``: Hugging Face's code, with adapters in
recordings/adapters/, as on V100 and T4 in recordings/before_sm80/; and in recordings/torchtitan/ torchtitan's.
``make recordings`` writes them.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Literal

import msgspec

from fsdp_bench.catalog.model_entry import ARCHITECTURES
from fsdp_bench.catalog.recorded import read_recorded
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.lora import ALL_LINEAR, RANK, SCALED_TOGETHER, LoRA
from fsdp_bench.spec.recording.config import LAYERS, POSITIONS, complete, masked_from, symbols
from fsdp_bench.spec.recording.formula import evaluate
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.recording.recorded import RecordedCode

ADAPTERS = Path(__file__).parent / "recordings" / "adapters"

_BASES: tuple[Literal["bf16", "nf4"], ...] = ("bf16", "nf4")
USUAL = tuple(LoRA(targets=targets, base=base) for targets in ((), (ALL_LINEAR,)) for base in _BASES)
"""The adapters that are recorded, for all ranks, of the model_types that are fine-tuned most: on the layers that PEFT
chooses, and on all linear layers, as in QLoRA."""


def folder_of(usual: LoRA, root: Path = ADAPTERS) -> Path:
    """Return the folder of the recordings with one of USUAL: ``all-linear-nf4``."""
    return root / f"{'+'.join(usual.targets) or 'default'}-{usual.base}"


def folders_of(lora: LoRA, root: Path = ADAPTERS) -> list[Path]:
    """Return the folders in which recordings may hold for some adapters; of modules' names that is any."""
    named = lora.targets not in ((), (ALL_LINEAR,))
    return [
        folder_of(each, root) for each in USUAL if each.base == lora.base and (named or each.targets == lora.targets)
    ]


def differences(code: RecordedCode, lora: LoRA, values: dict[str, int]) -> list[str]:
    """Return for what a recording does not hold for some adapters; empty if it does.

    ``code`` is a recording of one of the folders of these adapters; ``values`` are the symbols of formulas, for the
    model.
    """
    found = []
    if lora.rank == 1:
        found.append("adapters of rank 1")
    if lora.dropout:
        found.append(f"dropout {lora.dropout:g}, recorded with 0")
    if lora.bias != "none":
        found.append(f"bias {lora.bias}, recorded with none")
    if lora.modules_to_save:
        found.append(f"modules_to_save {'+'.join(lora.modules_to_save)}, recorded with none")
    if lora.targets not in ((), (ALL_LINEAR,)) and set(lora.targets) != (recorded := _adapted(code)):
        found.append(f"targets {shown('+'.join(lora.targets))}, recorded with {'+'.join(sorted(recorded))}")
    if any(_is_cut(parameter.shape, parameter.packed, values) for parameter in code.parameters if parameter.packed > 1):
        found.append(f"weights in 4 bits that are no multiple of {SCALED_TOGETHER}")
    return found


def _is_cut(shape: tuple[str, ...], packed: int, values: dict[str, int]) -> bool:
    """Whether the last block of a weight's scales is not full, for which formulas do not hold."""
    return prod(evaluate(size, values) for size in shape) * packed % SCALED_TOGETHER != 0


def _adapted(code: RecordedCode) -> set[str]:
    """Return the names of the modules that have adapters; none is the name of one without."""
    of_adapters = (parameter.name.partition(".lora_A.") for parameter in code.parameters)
    return {module.rpartition(".")[2] for module, found, _ in of_adapters if found}


FOLDER = Path(__file__).parent / "recordings"
FOLDERS = {"huggingface": FOLDER, "torchtitan": FOLDER / "torchtitan"}
"""By whose code they are of."""
BEFORE_SM80 = FOLDER / "before_sm80"
"""Those of Hugging Face's code on GPUs without FlashAttention (Gpu.is_before_sm80)."""


ATTENTION, DEFAULT_ATTENTION = "attn_implementation", "sdpa"
"""The field of a config.json that chooses transformers' code of attention, and the one that was recorded."""


FLASH_ATTN_PACKAGE = "flash_attention_2"
ATTENTIONS = (DEFAULT_ATTENTION, "eager", FLASH_ATTN_PACKAGE)
"""Those that are predicted."""


def parse_attention(text: str) -> str | None:
    """Read transformers' attn_implementation; None for its default. Raises SpecError for one that is not predicted."""
    attention = text.strip().lower() if isinstance(text, str) else ""
    if attention not in ATTENTIONS:
        raise SpecError(f"attention: {shown(text)} is not predicted; one of {', '.join(ATTENTIONS)}")
    return None if attention == DEFAULT_ATTENTION else attention


class NotRecorded(SpecError):
    """No recording that comes with fsdp-bench holds for a config.json. The message says why."""


def is_recorded(model_type: str, folder: Path = FOLDER) -> bool:
    """Whether some recordings of an architecture come with fsdp-bench."""
    return bool(_files([folder], model_type))


def _files(folders: list[Path], model_type: object) -> list[Path]:
    found = (path for folder in folders for path in sorted(folder.glob("*.json.xz")))
    return [path for path in found if path.name.partition(".")[0] == model_type]


def recorded_architecture(
    config: Mapping[str, Any], sequence_length: int, name: str, folder: Path = FOLDER, lora: LoRA | None = None
) -> RecordedModel:
    """Return the model of a config.json, by its architecture's recording for this side of a sliding window.

    ``folder`` is one of FOLDERS; with adapters the one that holds the folders of ``folder_of``. Raises NotRecorded,
    with what differs from the nearest, and SpecError for a config.json that no model can have.
    """
    if (attention := config.get(ATTENTION)) not in (None, DEFAULT_ATTENTION):
        raise NotRecorded(f"{name} with attention {shown(attention)} was not recorded; {DEFAULT_ATTENTION} was")
    folders = [folder] if lora is None else folders_of(lora, folder)
    found = _find(config, sequence_length, name, folders, lora)
    if found.code.longest is not None:
        with suppress(NotRecorded):
            found = msgspec.structs.replace(found, beyond=_find(config, found.code.longest + 1, name, folders, lora))
    return found


def _find(
    config: Mapping[str, Any], sequence_length: int, name: str, folders: list[Path], lora: LoRA | None
) -> RecordedModel:
    model_type = config.get("model_type")
    files = _files(folders, model_type)
    if not files and lora is not None:
        raise NotRecorded(f"{name} was not recorded")
    if not files:
        (folder,) = folders
        known = ", ".join(sorted({path.name.partition(".")[0] for path in folder.glob("*.json.xz")}))
        whose = "torchtitan's code of " if folder == FOLDERS["torchtitan"] else ""
        raise NotRecorded(f"{whose}model_type {shown(model_type)} was not recorded; {known} were")
    architectures = config.get("architectures") or [ARCHITECTURES.get(str(model_type))]
    if not isinstance(architectures, list):
        raise SpecError(f"architectures: {shown(architectures)} is not allowed; a list of class names")
    named = architectures[0]
    reasons: list[list[str]] = []
    for code in map(read_recorded, files):
        assert code.architecture is not None
        found = code.architecture.differences(config, sequence_length)
        is_titan = code.origin.code == "torchtitan"  # whose classes have other names
        recorded = ARCHITECTURES.get(str(model_type)) if is_titan else code.origin.architecture
        if named != recorded:
            found.append(f"{shown(named)}, recorded was {recorded}")
        if not found and lora is not None:
            found = differences(code, lora, _symbols(code, config, lora))
        if not found:
            try:
                return _model(code, config, name, lora)
            except SpecError as error:
                reasons.insert(0, [str(error)])
        reasons.append(found or reasons[0])
    fewest = sorted(reasons, key=len)[0]
    raise NotRecorded(f"{name} was not recorded: {'; '.join(fewest)}")


def _symbols(code: RecordedCode, config: Mapping[str, Any], lora: LoRA | None) -> dict[str, int]:
    assert code.architecture is not None
    sizes = symbols(complete(config, code.architecture.config_class))
    return sizes if lora is None else {**sizes, RANK: lora.rank}


def _model(code: RecordedCode, config: Mapping[str, Any], name: str, lora: LoRA | None) -> RecordedModel:
    assert code.architecture is not None
    full = complete(config, code.architecture.config_class)
    first = masked_from(full)
    is_beyond = code.architecture.side == "beyond"
    positions = next((_count(full, field) for field in POSITIONS if full.get(field)), None) if code.positions else None
    layers = next(_count(full, field) for field in LAYERS if full.get(field))
    counts = {path: _count(full, "num_decoder_layers") if "decoder" in path else layers for path in code.num_blocks}
    lengths = first if is_beyond and first else 1, None if is_beyond or not first else first - 1
    if code.shortest == code.longest:
        lengths = code.shortest, code.longest
    return RecordedModel(
        name=name,
        code=_as_asked(code, *lengths, positions, lora),
        sizes=tuple(sorted(_symbols(code, config, lora).items())),
        counts=tuple(counts.items()),
        max_position_embeddings=positions,
    )


def _count(config: Mapping[str, Any], field: str) -> int:
    value = config[field]
    if type(value) is not int or value < 1:
        raise SpecError(f"{field}: {shown(value)} is not allowed; a positive whole number")
    return value


@lru_cache(maxsize=64)
def _as_asked(
    code: RecordedCode, shortest: int, longest: int | None, positions: int | None, lora: LoRA | None
) -> RecordedCode:
    """Return a code for sequences of some lengths, with adapters; the same one for the same, as models compare it."""
    origin = code.origin if lora is None else msgspec.structs.replace(code.origin, lora=lora)
    return msgspec.structs.replace(code, origin=origin, shortest=shortest, longest=longest, positions=positions)
