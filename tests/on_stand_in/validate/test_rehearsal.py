"""Predictions against rehearsals of drawn setups."""

from __future__ import annotations

import json

import pytest

from fsdp_bench.validate.rehearsal import validate_rehearsals
from tests.conftest import run_command
from tests.profiles import draws

SEED = 4
SHALLOW = 8, 6
"""Seeds whose first setup has few layers: two of compiled blocks, four of blocks in float8. Compiling takes long."""

pytestmark = pytest.mark.timeout(3600)


def test_pytorchs_allocator_holds_what_is_predicted() -> None:
    """Equal to the byte in 95 % of the peaks and in 85 % of reserved memory, of which the worst is within 3 %."""
    _, summary = validate_rehearsals(draws(12, 110), SEED)
    assert summary.num_failed == 0
    assert summary.num_fits_right == summary.num_fits
    assert summary.peak is not None
    assert summary.peak.num_equal >= 0.95 * summary.peak.num_cells
    assert summary.reserved is not None
    assert summary.reserved.num_equal >= 0.85 * summary.reserved.num_cells
    assert summary.reserved.worst <= 0.03


def test_compiled_blocks_hold_what_is_predicted() -> None:
    """Issue 19: within 3 % (median) and 8 % (worst) of peak allocated."""
    _, summary = validate_rehearsals(draws(1, 10), draws(SHALLOW[0], SEED), compiled=True)
    assert summary.num_failed == 0
    assert summary.peak is not None
    assert summary.peak.median <= 0.03
    assert summary.peak.worst <= 0.08


def test_blocks_in_float8_hold_what_is_predicted() -> None:
    """torchao's own layers, compiled: within 3 % of peak allocated."""
    _, summary = validate_rehearsals(draws(1, 4), draws(SHALLOW[1], SEED), float8=True)
    assert summary.num_failed == 0
    assert summary.peak is not None
    assert summary.peak.worst <= 0.03


@pytest.mark.parametrize("model_type", ["qwen2", pytest.param("llama", marks=pytest.mark.slow)])
def test_compiled_blocks_of_hugging_face_do_too(model_type: str) -> None:
    _, summary = validate_rehearsals(draws(1, 4), SEED, compiled=True, code="huggingface", model_type=model_type)
    assert summary.num_failed == 0
    assert summary.peak is not None
    assert summary.peak.median <= 0.03
    assert summary.peak.worst <= 0.08


def test_hugging_faces_code_holds_what_is_predicted() -> None:
    """Issue 19: within 1 %, LoRA's and QLoRA's adapters among ten setups (and in sweep/test_adapters.py)."""
    _, summary = validate_rehearsals(draws(2, 10), SEED, code="huggingface", model_type="qwen2")
    assert summary.num_failed == 0
    assert summary.peak is not None
    assert summary.peak.worst <= 0.01


def test_the_document_has_what_the_text_says() -> None:
    done = run_command("validate", "--against", "rehearsal", "--cells", "3", "--seed", "8", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["summary"]["num_cells"] == len(document["cells"]) == 3
    assert all(cell["reserved"] for cell in document["cells"])
