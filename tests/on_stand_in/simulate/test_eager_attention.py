"""Recorded code with transformers' eager attention, against dry runs of it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="a dry run needs torch")
pytest.importorskip("transformers", reason="the model is transformers'")

from fsdp_bench.catalog.loader import gpu
from fsdp_bench.plan.estimate import Verdict, estimate, predict_memory
from fsdp_bench.spec.setup import Precision, TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.train.recording.subjects import huggingface
from tests.on_stand_in.simulate.frozen_models import CONFIG as LLAMA
from tests.simulate.comparing import OBSERVED, assert_recorded_equals_dry_runs
from tests.simulate.recorded.recording import record_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the recording takes half a minute

CONFIG = LLAMA | {"attn_implementation": "eager"}
VARIANTS = ("bf16", "bf16 autocast", "bf16 cast at blocks", "fp16")


def test_every_phase_equals_the_dry_run_and_a_v100_has_a_verdict() -> None:
    recorded = record_here(huggingface, CONFIG, 128, variants=VARIANTS)
    assert not recorded.has_fused_attention
    usual = {"precision": Precision.parse("bf16-mixed"), "sequence_length": 96, "micro_batch_size": 2, "world_size": 4}
    setups = [
        TrainSetup(**usual, api="fsdp1"),  # type: ignore[arg-type]
        TrainSetup(**usual, api="fsdp2", checkpointing="full"),  # type: ignore[arg-type]
        # From fp16 softmax computes in fp32 without a copy of the scores.
        TrainSetup(**usual | {"precision": Precision.parse("fp16-mixed")}, api="fsdp1"),  # type: ignore[arg-type]
    ]
    ranks = [predict_memory(recorded, setup, OBSERVED).peak_rank for setup in setups]
    specs = [DryRunSpec(setup=setup, config=CONFIG, rank=rank) for setup, rank in zip(setups, ranks, strict=True)]
    assert_recorded_equals_dry_runs(recorded, *specs)
    assert estimate(recorded, setups[0], gpu("V100-SXM2-16GB")).verdict is Verdict.FITS
