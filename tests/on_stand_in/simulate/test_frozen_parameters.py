"""Recorded models with frozen parameters, against dry runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, UserModule
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.train.recording.main import of_module
from tests.on_stand_in.simulate.frozen_models import WHICH
from tests.predicted import memory_of
from tests.simulate.comparing import OBSERVED, assert_recorded_equals_dry_runs
from tests.simulate.recorded.recording import record_here

pytestmark = pytest.mark.slow

MODULE = UserModule(
    function="frozen_models:make",
    block="transformers.models.llama.modeling_llama:LlamaDecoderLayer",
    folder=str(Path(__file__).parent),
)
FROZEN = ["lora", "embed_tokens layers.0. layers.1.", "embed_tokens norm lm_head"]
"""Blocks of both; whole blocks, and the rest of both; blocks of both, and nothing trained in the rest."""


@pytest.fixture(scope="module", params=FROZEN)
def recorded(request: pytest.FixtureRequest) -> Iterator[RecordedModel]:
    """A recording of the model that the environment names. Dry runs build the same model."""
    if request.param == "lora":
        pytest.importorskip("peft", reason="LoRA is peft's")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WHICH, request.param)
        yield record_here(of_module, MODULE)


SETUPS = [
    TrainSetup(api="fsdp1", world_size=4, micro_batch_size=2, sequence_length=64),
    TrainSetup(
        api="fsdp1",
        strategy="SHARD_GRAD_OP",
        world_size=2,
        precision="fp32",
        micro_batch_size=2,
        sequence_length=96,
        gradient_accumulation_steps=3,
        sync_every_micro_batch=False,
        max_grad_norm=1.0,
    ),
    TrainSetup(api="fsdp1", world_size=8, sequence_length=64, checkpointing="full", backward_prefetch="BACKWARD_POST"),
    TrainSetup(api="fsdp1", world_size=4, sequence_length=64, wrap="none"),
    TrainSetup(
        api="fsdp2",
        world_size=4,
        micro_batch_size=2,
        sequence_length=64,
        gradient_accumulation_steps=2,
        precision="fp32",
    ),
    TrainSetup(api="fsdp2", world_size=4, micro_batch_size=2, sequence_length=64, checkpointing="selective"),
    TrainSetup(api="fsdp2", strategy="NO_SHARD", world_size=4, micro_batch_size=2, sequence_length=64),
]


def test_every_phase_equals_the_dry_run(recorded: RecordedModel) -> None:
    ranks = [memory_of(recorded, setup, OBSERVED).peak_rank for setup in SETUPS]
    specs = [DryRunSpec(setup=setup, module=MODULE, rank=rank) for setup, rank in zip(SETUPS, ranks, strict=True)]
    assert_recorded_equals_dry_runs(recorded, *specs)


def test_flat_parameters_of_both_need_use_orig_params(recorded: RecordedModel) -> None:
    setup = TrainSetup(api="fsdp1", world_size=4, sequence_length=64, use_orig_params=False)
    [answer] = [answer for _, answer in dry_runs([DryRunSpec(setup=setup, module=MODULE, kernels="cuda")])]
    reason = why_impossible(recorded, setup, "cuda")
    assert (reason is None) == (answer.result is not None)
    assert reason is None or "uniform `requires_grad`" in reason
