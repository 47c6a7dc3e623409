"""LoRA as it is written, and what is refused."""

from __future__ import annotations

import pytest

from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.lora import LoRA, parse_lora
from tests.conftest import message_of

WRITTEN = {
    "16": LoRA(rank=16),
    " rank = 4 , targets = q_proj + v_proj ": LoRA(rank=4, targets=("q_proj", "v_proj")),
    "targets=all-linear,dropout=0.05,alpha=32,bias=all": LoRA(
        targets=("all-linear",), dropout=0.05, alpha=32.0, bias="all"
    ),
    "8,base=bf16,modules-to-save=lm_head": LoRA(base="bf16", modules_to_save=("lm_head",)),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_fields_are_read_and_written(text: str) -> None:
    lora = parse_lora(text, "lora")
    assert lora == WRITTEN[text]
    assert parse_lora(lora.text(), "lora") == lora
    assert from_json(to_json(lora), LoRA) == lora


def test_qlora_is_a_base_in_4_bits() -> None:
    lora = parse_lora("16", "qlora", base="nf4")
    assert lora == LoRA(rank=16, base="nf4")
    assert (lora.title, LoRA(rank=16).title) == ("QLoRA rank=16", "LoRA rank=16")
    assert lora.packages == ("peft", "bitsandbytes")


def test_frozen_weights_are_stored_as_the_option_says_or_by_the_default() -> None:
    assert parse_lora("16", "lora", default_base="bf16").base == "bf16"
    assert parse_lora("16,base=same", "lora", default_base="bf16").base is None
    assert parse_lora("16", "qlora", base="nf4", default_base="bf16").base == "nf4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "lora: '' is not allowed; a rank, or fields like rank=16"),
        ("x", "lora: rank: 'x' is not allowed; a whole number"),
        ("rank=0", "lora: rank: 0 is not allowed; 1 or more"),
        ("rank=1.5", "a whole number"),
        ("8,rank=9", "lora: rank is given twice"),
        ("ranks=8", "lora: has no field 'ranks' (did you mean 'rank'?)"),
        ("dropout=2", "dropout: 2.0 is not allowed"),
        ("dropout=nan", "dropout: nan is not allowed"),
        ("alpha=0", "alpha: 0.0 is not allowed"),
        ("bias=some", "bias: 'some' is not allowed; one of none, all, lora_only"),
        ("base=int3", "base: 'int3' is not allowed; one of bf16, nf4, same"),
        ("targets=q_proj+", "targets: an empty name is not allowed"),
        ("targets=all-linear+q_proj", "all-linear stands for all linear layers"),
    ],
)
def test_a_wrong_value_is_refused_and_named(text: str, expected: str) -> None:
    assert expected in message_of(lambda: parse_lora(text, "lora"))
