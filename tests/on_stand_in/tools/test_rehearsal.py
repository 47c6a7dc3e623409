"""Predictions against rehearsals of drawn setups."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.loader import model
from fsdp_bench.spec.checkpointing_policy import EVERY_SECOND_PRODUCT
from fsdp_bench.spec.setup import Api, Checkpointing, Float8, Loss, Precision, TrainSetup, Wrap
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.conftest import run_command
from tests.profiles import draws
from tools.validate.__main__ import main
from tools.validate.random_setups import Cell
from tools.validate.rehearsal import GPU, against_rehearsals, validate_rehearsals

SEED = 4

pytestmark = pytest.mark.timeout(3600)


def test_setups_have_the_predicted_peaks_and_reserved_memory() -> None:
    """Equal to the byte in 95 % of the peaks and in 85 % of reserved memory, of which the worst is within 3 %."""
    _, summary = validate_rehearsals(draws(12, 110), SEED)
    assert summary.num_failed == 0
    assert summary.num_fits_right == summary.num_fits
    assert summary.peak.num_equal >= 0.95 * summary.peak.num_cells
    assert summary.reserved.num_equal >= 0.85 * summary.reserved.num_cells
    assert summary.reserved.worst <= 0.03


COMPILED: dict[str, Any] = {"compiled": True}
HUGGING_FACE: dict[str, Any] = {"code": "huggingface"}


@pytest.mark.parametrize(
    ("count", "seed", "drawn", "median", "worst"),
    [  # Seeds 8 and 6: their first setups have two and four layers, and compiling takes long.
        pytest.param(draws(1, 10), draws(8, SEED), COMPILED, 0.03, 0.08, id="compiled"),
        pytest.param(draws(1, 4), draws(6, SEED), {"float8": True}, 0.03, 0.03, id="float8"),
        pytest.param(draws(1, 4), SEED, HUGGING_FACE | COMPILED | {"model_type": "qwen2"}, 0.03, 0.08, id="qwen2"),
        pytest.param(
            *(draws(1, 4), SEED, HUGGING_FACE | COMPILED | {"model_type": "llama"}, 0.03, 0.08),
            id="llama",
            marks=pytest.mark.slow,
        ),
        pytest.param(draws(2, 10), SEED, HUGGING_FACE | {"model_type": "qwen2"}, 0.01, 0.01, id="qwen2 in eager mode"),
    ],
)
def test_peaks_of_compiled_blocks_and_of_hugging_faces_code_are_near_the_predicted_ones(
    count: int, seed: int, drawn: dict[str, Any], median: float, worst: float
) -> None:
    """Limits from before compiled blocks were recorded anew; docs/validation/allocator.md has 0.7 %, eager code 0.07 %.

    Adapters are among the setups of Hugging Face's code in eager mode.
    """
    _, summary = validate_rehearsals(count, seed, **drawn)
    assert summary.num_failed == 0
    assert summary.peak.median <= median
    assert summary.peak.worst <= worst


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Float8.TENSORWISE, Float8.ROWWISE])
def test_float8_with_torchtitans_checkpointing_has_the_predicted_peaks(recipe: Float8) -> None:
    """Within 2 %: batch, length, units, loss and clipping are those of torchtitan's Llama 3 8B, with two blocks."""
    setup = TrainSetup(
        world_size=8,
        sequence_length=8192,
        micro_batch_size=1,
        api=Api.FSDP2,
        wrap=Wrap.BLOCK_AND_ENDS,
        precision=Precision.parse("bf16-mixed"),
        checkpointing=Checkpointing.SELECTIVE,
        checkpointing_policy=EVERY_SECOND_PRODUCT,
        max_grad_norm=1.0,
        loss=Loss.COMPILED,
        compile=True,
        float8=recipe,
    )
    shape = replace(model("Llama-3.1-8B").shape(), num_hidden_layers=2)
    (found,) = against_rehearsals([Cell(model=shape, setup=setup)], rehearsed_gpu(GPU))
    assert found.error is None
    assert abs(found.worst[1]) <= 0.02
    assert found.reserved is not None
    assert abs(found.reserved.relative) <= 0.02


def test_the_json_document_has_every_drawn_setup() -> None:
    done = run_command("--against", "rehearsal", "--cells", "3", "--seed", "8", "--json", program=main)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["summary"]["num_cells"] == len(document["cells"]) == 3
    assert all(cell["reserved"] for cell in document["cells"])
