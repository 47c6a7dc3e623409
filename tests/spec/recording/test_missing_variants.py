"""A setup whose variant was not recorded is refused; it is not answered with one that is near."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.variants import VariantKind
from tests.shapes import recorded

CODE = recorded("Llama-3.1-8B").code
CAST = VariantKind("bf16", casts_at_blocks=True)


def test_an_older_recording_without_a_variant_is_to_be_made_again() -> None:
    assert CODE.variant(CAST, is_single=False) == CAST.name
    older = replace(
        CODE,
        variants={name: each for name, each in CODE.variants.items() if "cast" not in name},
        same={name: like for name, like in CODE.same.items() if "cast" not in name},
    )
    with pytest.raises(SpecError, match="bf16 cast at blocks of LlamaForCausalLM was not recorded; record it again"):
        older.variant(CAST, is_single=False)


def test_the_reason_of_a_variant_is_that_of_the_one_it_builds_on() -> None:
    broken = replace(CODE, variants={}, same={}, missing={"bf16": "no kernel"})
    with pytest.raises(SpecError, match="does not run in bf16: no kernel"):
        broken.variant(CAST, is_single=True)
