"""LoRA: the adapters that PEFT puts into a model, and how the frozen weights below them are stored.

Written ``16`` or ``rank=16,targets=q_proj+v_proj,base=bf16``; names are separated by ``+``. The defaults are those of
peft.LoraConfig.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fsdp_bench.spec.checked import Checked, Count, Positive, build
from fsdp_bench.spec.errors import SpecError, nearest, shown

ALL_LINEAR = "all-linear"
"""The target that stands for every nn.Linear but the head (peft.utils.constants.INCLUDE_LINEAR_LAYERS_SHORTHAND)."""

QUANTIZED = "nf4"
"""LoRA.base of QLoRA."""
SAME = "same"
"""The word for LoRA.base where it is None."""
_BASES = ("bf16", QUANTIZED, SAME)

RANK = "lora_rank"
"""The symbol of the rank in formulas of recordings for all sizes."""
SCALED_TOGETHER = 64 * 256
"""Weights of 4 bits whose scales bitsandbytes quantizes together: blocks of 64 (bnb.nn.Params4bit, blocksize), and 256
scales to a block (bnb.functional.quantize_4bit, compress_statistics)."""

LARGEST_FUSED_PRODUCT = 1536
"""Rows from which on bitsandbytes always unpacks a weight (backends/cuda/ops.py, _gemm_4bit_custom_max_m)."""

DTYPES_MIXED = (
    "wrap: fsdp1 refuses units with parameters of several dtypes, here frozen and trained ones ("
    '"Must flatten tensors with uniform dtype"); use block-and-adapters, api fsdp2, or precision bf16-true'
)
GRADIENTS_MIXED = (
    "use_orig_params: false is refused by fsdp1 for units with both frozen and trained parameters"
    ' ("Must flatten tensors with uniform `requires_grad`"); use true, or api fsdp2'
)
PACKED_IN_BF16 = "precision: the frozen weights are 4-bit numbers in elements of bf16; compute in bf16"
"""Reasons against setups with frozen parameters."""

_LISTS = ("targets", "modules_to_save")
_NUMBERS = {"rank": int, "alpha": float, "dropout": float}
_FORM = "a rank, or fields like rank=16,targets=q_proj+v_proj"


class LoRA(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A peft.LoraConfig, and the dtype of the frozen weights. Raises SpecError for a value that is not allowed."""

    rank: Count = 8
    alpha: Positive = 8.0
    targets: tuple[str, ...] = ()
    """Names of the modules that get adapters, or ``all-linear``; none: PEFT's choice for the architecture."""
    dropout: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    bias: Literal["none", "all", "lora_only"] = "none"
    """The biases that are trained."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole, as copies."""
    base: Literal["bf16", "nf4"] | None = None
    """The storage of frozen parameters. None, written ``same``: like the trained ones. ``bf16``: as most checkpoints
    are. ``nf4``: the linear layers' in 4 bits by bitsandbytes (with double quantization, and bf16 for
    bnb_4bit_quant_storage), the others in bf16; this is QLoRA."""

    def _check(self) -> None:
        for name in _LISTS:
            if any(not word or word != word.strip() for word in getattr(self, name)):
                raise SpecError(f"{name}: an empty name is not allowed; names of modules, as q_proj+v_proj")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise SpecError(f"targets: {ALL_LINEAR} stands for all linear layers; leave the other names out")

    @property
    def is_quantized(self) -> bool:
        """Whether it is QLoRA."""
        return self.base == QUANTIZED

    @property
    def title(self) -> str:
        """The name of a model with it: ``QLoRA rank=16``."""
        if not self.is_quantized:
            return f"LoRA {self.text()}"
        return f"QLoRA {self.text().replace(f',base={QUANTIZED}', '')}"

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages whose code it is."""
        return ("peft", "bitsandbytes") if self.is_quantized else ("peft",)

    def text(self) -> str:
        """Return it as it is written on a command line, without what is the default."""
        default = LoRA()
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "rank"}
        changed = {name: value for name, value in fields.items() if value != getattr(default, name)}
        words = [
            f"{n}={'+'.join(v) if n in _LISTS else format(v, 'g') if n in _NUMBERS else v}" for n, v in changed.items()
        ]
        return ",".join([f"rank={self.rank}", *words])

    @classmethod
    def parse(cls, text: object) -> LoRA:
        """Read what a command line or a file says. Raises SpecError, naming the field and what is allowed."""
        return parse_lora(text, "lora")


def parse_lora(text: object, option: str, base: str | None = None, default_base: str | None = None) -> LoRA:
    """Read ``16`` or ``rank=16,targets=q_proj+v_proj``. Raises SpecError, naming the ``option``.

    Frozen weights are stored as ``base`` says (``nf4`` for --qlora), else as the text, else as ``default_base``.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    if not isinstance(text, str) or not text.strip():
        raise SpecError(f"{option}: {shown(text)} is not allowed; {_FORM}")
    fields: dict[str, object] = {"base": base} if base else {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            name, value = "rank", name
        name = name.replace("-", "_")
        if name not in LoRA.__struct_fields__:
            hint = nearest(name, LoRA.__struct_fields__) or f"; one of {', '.join(LoRA.__struct_fields__)}"
            raise SpecError(f"{option}: has no field {shown(name)}{hint}")
        if name in fields:
            raise SpecError(f"{option}: {name} is given twice" if name != "base" else f"{option}: its base is {base}")
        fields[name] = _value(name, value, option)
    if fields.get("base") == SAME:
        fields["base"] = None
    return build(LoRA, {"base": default_base, **fields}, f"{option}: ")


def _value(name: str, text: str, option: str) -> object:
    if name in _LISTS:
        return tuple(word.strip() for word in text.split("+"))
    if name in _NUMBERS:
        try:
            return _NUMBERS[name](text)
        except ValueError:
            what = "a whole number" if _NUMBERS[name] is int else "a number"
            raise SpecError(f"{option}: {name}: {shown(text)} is not allowed; {what}") from None
    if name == "base" and text not in _BASES:
        raise SpecError(f"{option}: {name}: {shown(text)} is not allowed; one of {', '.join(_BASES)}")
    return text
