"""Recorded code with transformers' eager attention, and with the flash-attn package, against dry runs of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.loader import gpu
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import Api, Checkpointing, Precision, TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.train.recording.main import huggingface
from tests.on_stand_in.simulate.frozen_models import CONFIG as LLAMA
from tests.predicted import estimate_of, memory_of
from tests.simulate.comparing import OBSERVED, assert_recorded_equals_dry_runs
from tests.simulate.recorded.recording import record_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the recording takes half a minute

VARIANTS = ("bf16", "bf16 autocast", "bf16 cast at blocks", "fp16")
SETUP = TrainSetup(precision=Precision.parse("bf16-mixed"), sequence_length=96, micro_batch_size=2, world_size=4)


def _assert_equals_dry_runs(attention: str) -> RecordedModel:
    """Softmax from fp16 computes in fp32 without a copy of the scores."""
    config = LLAMA | {"attn_implementation": attention}
    recorded = record_here(huggingface, config, 128, variants=VARIANTS)
    setups = [
        replace(SETUP, api=Api.FSDP1),
        replace(SETUP, api=Api.FSDP2, checkpointing=Checkpointing.FULL),
        replace(SETUP, api=Api.FSDP1, precision=Precision.parse("fp16-mixed")),
    ]
    ranks = [memory_of(recorded, setup, OBSERVED).peak_rank for setup in setups]
    specs = [DryRunSpec(setup=setup, config=config, rank=rank) for setup, rank in zip(setups, ranks, strict=True)]
    assert_recorded_equals_dry_runs(recorded, *specs)
    assert recorded.document()["attention"] == attention
    return recorded


def test_every_phase_of_eager_attention_equals_the_dry_run_and_a_v100_has_a_verdict() -> None:
    recorded = _assert_equals_dry_runs("eager")
    assert not recorded.has_fused_attention
    assert estimate_of(recorded, SETUP, Hardware.of_gpu(gpu("V100-SXM2-16GB"))).verdict is Verdict.FITS


def test_every_phase_of_the_flash_attn_package_equals_the_dry_run_and_a_t4_is_refused() -> None:
    recorded = _assert_equals_dry_runs("flash_attention_2")
    assert recorded.has_flash_attn
    assert not recorded.code.missing
    assert estimate_of(recorded, SETUP, Hardware.of_gpu(gpu("A100-SXM-40GB"))).verdict is Verdict.FITS
    with pytest.raises(SpecError, match=r"T4 has 7\.5; the flash-attn package needs compute capability 8\.0"):
        estimate_of(recorded, SETUP, Hardware.of_gpu(gpu("T4")))
