"""Models with frozen parameters: the simulation against PyTorch's own wrappers on tensors without data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a dry run needs torch")
pytest.importorskip("transformers", reason="the models are transformers'")

from fsdp_bench.plan.estimate import KERNELS, predict_memory
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, UserModule
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.train.models.huggingface import unpacked_sequences
from fsdp_bench.train.recording.record import record
from fsdp_bench.train.recording.subjects import of_module
from tests.on_stand_in.simulate.frozen_models import WHICH

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
    """The model that the environment names, recorded; dry runs build the same."""
    if request.param == "lora":
        pytest.importorskip("peft", reason="LoRA is peft's")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WHICH, request.param)
        with unpacked_sequences(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as train/recording/main.py: transformers' and peft's own
            code = record(of_module(MODULE))
        yield RecordedModel(
            name=request.param, code=code, sizes=tuple(code.sizes.items()), counts=tuple(code.num_blocks.items())
        )


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


def test_peaks_of_all_phases_are_those_of_the_dry_run(recorded: RecordedModel) -> None:
    predicted = [predict_memory(recorded, setup, KERNELS["cuda-observed"]) for setup in SETUPS]
    specs = [
        DryRunSpec(setup=setup, module=MODULE, kernels="cuda", rank=one.peak_rank)
        for setup, one in zip(SETUPS, predicted, strict=True)
    ]
    for index, answer in dry_runs(specs):
        assert answer.result is not None, answer.error
        phases = answer.result.phases
        assert {phase: predicted[index].phases[phase] for phase in phases} == phases, SETUPS[index]


def test_flat_parameters_of_both_need_use_orig_params(recorded: RecordedModel) -> None:
    setup = TrainSetup(api="fsdp1", world_size=4, sequence_length=64, use_orig_params=False)
    [answer] = [answer for _, answer in dry_runs([DryRunSpec(setup=setup, module=MODULE, kernels="cuda")])]
    reason = why_impossible(recorded, setup, "cuda")
    assert (reason is None) == (answer.result is not None)
    assert reason is None or "uniform `requires_grad`" in reason
