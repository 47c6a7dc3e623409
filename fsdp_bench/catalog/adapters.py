"""Recordings with PEFT's adapters that come with fsdp-bench: which there are, and which hold for some adapters.

They are in folders of recordings/adapters/, named after what gets adapters and how the frozen weights are stored. The
rank is a symbol of their formulas.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Literal

from fsdp_bench.spec.errors import shown
from fsdp_bench.spec.lora import ALL_LINEAR, SCALED_TOGETHER, LoRA
from fsdp_bench.spec.recording.formula import evaluate
from fsdp_bench.spec.recording.recorded import RecordedCode

ADAPTERS = Path(__file__).parent / "recordings" / "adapters"

_BASES: tuple[Literal["bf16", "nf4"], ...] = ("bf16", "nf4")
USUAL = tuple(LoRA(targets=targets, base=base) for targets in ((), (ALL_LINEAR,)) for base in _BASES)
"""What is recorded of the model_types that are fine-tuned most, for all ranks: what PEFT chooses, and QLoRA's all
linear layers."""


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

    Args:
        code: a recording of one of the folders of these adapters.
        lora: the adapters.
        values: the symbols of formulas, for the model.
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
