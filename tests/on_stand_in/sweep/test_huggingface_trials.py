"""Trials of Hugging Face's models, with their own loss and with others: on gloo ranks, and rehearsed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdp_bench.spec.errors import SweepFileError
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.validate.memory import compare_with_record
from tests.conftest import records_of_sweep
from tests.on_stand_in.rehearsing import STUBS
from tests.shapes import llama_config
from tests.sweep.config.test_grid import machine

T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_heads": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "vocab_size": 128,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": True,
}
QWEN = llama_config(
    **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 6, "intermediate_size": 128},
    **{"vocab_size": 256, "max_position_embeddings": 256, "tie_word_embeddings": True},
)
ON_GLOO = """
[run]
device = "cpu"
steps = 2
communication_steps = 0
steps_without_communication = 0
threads_per_rank = 1
"""
ON_THE_STAND_IN = """
[run]
device = "rehearsed"
gpu = "H100-SXM"
steps = 1
[models.qwen]
hf_config = "qwen.json"
"""
GLOO = f"""{ON_GLOO}
[models.t5]
hf_config = "t5.json"
[models.qwen]
hf_config = "qwen.json"
[grid]
world_size = 2
sequence_length = 16
precision = "fp32"
model = ["t5", "qwen"]
checkpointing = "none"
api = ["fsdp1", "fsdp2"]
strategy = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
[[include]]
model = "t5"
checkpointing = "full"
precision = "bf16-mixed"
api = "fsdp2"
strategy = ["FULL_SHARD", "NO_SHARD"]
[[include]]
model = "t5"
checkpointing = "selective"
offload = "params"
api = "fsdp2"
strategy = "FULL_SHARD"
"""
REHEARSED = f"""{ON_THE_STAND_IN}
[grid]
model = "qwen"
world_size = 8
sequence_length = 64
micro_batch_size = 2
checkpointing = ["none", "full"]
api = ["fsdp1", "fsdp2"]
strategy = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]
"""
OFFLOADED = f"""{ON_THE_STAND_IN}
[models.t5]
hf_config = "t5.json"
[grid]
world_size = 8
sequence_length = 128
micro_batch_size = 2
checkpointing = ["none", "full"]
api = ["fsdp1", "fsdp2"]
activation_offload = true
"""
QWEN_ALONE = """
model = "qwen"
precision = "bf16-mixed"
"""
BOTH = """
model = ["qwen", "t5"]
precision = ["bf16-mixed", "fp32"]
strategy = ["FULL_SHARD", "NO_SHARD"]
"""
LOSSES_ON_GLOO = f"""{ON_GLOO}
[models.qwen]
hf_config = "qwen.json"
[grid]
world_size = 2
sequence_length = 32
micro_batch_size = 2
precision = "fp32"
model = "qwen"
api = "fsdp2"
loss = ["plain", "chunked"]
"""
LOSSES_REHEARSED = f"""{ON_THE_STAND_IN}
[grid]
model = "qwen"
world_size = 8
sequence_length = 512
micro_batch_size = 2
precision = [PRECISIONS]
api = [APIS]
loss = ["plain", LOSSES]
"""
EVERY = ('"bf16-mixed", "fp32"', '"fsdp1", "fsdp2"')
FEWEST = ('"fp32"', '"fsdp2"')


def sweep(folder: Path, text: str) -> list[TrialRecord]:
    (folder / "t5.json").write_text(json.dumps(T5))
    (folder / "qwen.json").write_text(json.dumps(QWEN))
    (folder / "sweep.toml").write_text(text)
    return records_of_sweep(folder / "sweep.toml")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> list[TrialRecord]:
    return sweep(tmp_path_factory.mktemp("gloo"), GLOO)


class TestOnGlooRanks:
    @pytest.mark.parametrize("name", ["t5", "qwen"])
    def test_every_wrapper_trains_the_same_model(self, swept: list[TrialRecord], name: str) -> None:
        records = [record for record in swept if record.model.name == name]
        assert len(records) == (9 if name == "t5" else 6)
        assert {record.outcome for record in records} == {Outcome.OK}
        exact = [record for record in records if str(record.setup.precision) == "fp32"]
        losses = {rank.rank: rank.losses for rank in exact[0].ranks}
        assert losses[0] != losses[1]  # every rank has tokens of its own
        for record in exact:
            for rank in record.ranks:
                assert rank.losses == pytest.approx(losses[rank.rank], rel=1e-4)

    def test_a_tied_parameter_is_trained_once(self, swept: list[TrialRecord]) -> None:
        for record in swept:
            if record.effective_strategy == "NO_SHARD":
                for rank in record.ranks:
                    assert rank.memory.parameters_bytes == 4 * record.num_parameters

    def test_each_block_is_a_unit(self, swept: list[TrialRecord]) -> None:
        for record in swept:
            effective = record.ranks[0].effective
            if effective.wrapper != "DistributedDataParallel":
                assert effective.num_units == (5 if record.model.name == "t5" else 7)

    def test_the_record_says_whose_code_it_is(self, swept: list[TrialRecord]) -> None:
        model = swept[0].model
        assert isinstance(model, ModelCode)
        assert (model.code, model.architecture, model.config) == ("huggingface", "T5ForConditionalGeneration", T5)
        assert list(model.versions) == ["transformers"]
        assert swept[0].tokens_per_second_per_gpu is not None

    def test_the_chunked_loss_is_the_models_own(self, tmp_path: Path) -> None:
        plain, chunked = sweep(tmp_path, LOSSES_ON_GLOO)
        assert {plain.outcome, chunked.outcome} == {Outcome.OK}
        for own, other in zip(plain.ranks, chunked.ranks, strict=True):
            assert own.losses == pytest.approx(other.losses, rel=1e-5)


class TestOnTheStandIn:
    def test_every_strategy_allocates_what_is_predicted(self, tmp_path: Path) -> None:
        """By a recording of the code, which is made when it is asked for; to the byte in every phase of the steps."""
        for record in sweep(tmp_path, REHEARSED):
            found = compare_with_record(record)
            assert found.error is None
            assert list(found.phases) == ["forward", "loss", "backward", "optimizer"]
            assert found.is_equal, found
            assert found.peak.predicted_bytes == found.peak.reference_bytes
            assert found.reserved.predicted_bytes == found.reserved.reference_bytes

    @pytest.mark.parametrize("grid", [QWEN_ALONE, pytest.param(BOTH, marks=pytest.mark.slow)], ids=["qwen", "both"])
    def test_offloaded_blocks_allocate_what_is_predicted(self, grid: str, tmp_path: Path) -> None:
        """Tensors that come back from the host are contiguous, which changes the allocations of backward.

        To 2 KiB in every phase: the scratch of sorts, which T5's table of positions needs, is not modelled.
        """
        for record in sweep(tmp_path, OFFLOADED + grid):
            found = compare_with_record(record)
            assert found.error is None
            for phase in found.phases.values():
                assert abs(phase.predicted_bytes - phase.reference_bytes) <= 2048, (record.setup, found)

    @pytest.mark.parametrize(
        ("losses", "needs", "precisions_and_apis"),
        [
            ('"chunked", "compiled", "liger-fused-linear"', "liger_kernel", FEWEST),
            pytest.param('"chunked", "compiled"', "torch", EVERY, marks=pytest.mark.slow),
            pytest.param('"liger", "liger-fused-linear"', "liger_kernel", EVERY, marks=pytest.mark.slow),
            pytest.param('"flash-attn"', "flash_attn", EVERY, marks=pytest.mark.slow),
            pytest.param('"unsloth-fp32"', "torch", EVERY, marks=pytest.mark.slow),
        ],
    )
    def test_peaks_with_another_loss_are_as_predicted(
        self,
        losses: str,
        needs: str,
        precisions_and_apis: tuple[str, str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Attention in fp32 is unfused: its softmax needs room in backward, which a smaller loss makes the peak."""
        if find_spec(needs) is None:
            pytest.skip(f"needs {needs}")
        monkeypatch.setitem(QWEN, "vocab_size", 32000)  # so that the logits are the peak
        monkeypatch.setenv("PYTHONPATH", str(STUBS), prepend=":")
        precisions, apis = precisions_and_apis
        grid = LOSSES_REHEARSED.replace("PRECISIONS", precisions).replace("APIS", apis)
        records = sweep(tmp_path, grid.replace("LOSSES", losses))
        peaks = {}
        for record in records:
            found = compare_with_record(record)
            assert found.error is None
            assert abs(found.peak.relative) <= 0.005, found
            setup = record.setup
            peaks[setup.api, setup.precision, setup.loss.value] = found.peak.reference_bytes
        for (api, precision, loss), peak in peaks.items():
            assert loss == "plain" or peak < peaks[api, precision, "plain"]


class TestBadInput:
    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({**T5, "model_type": "t6"}, "[models.t5] model_type 't6': transformers refuses it"),
            ({**T5, "architectures": ["T6Model"]}, "has no 'T6Model'"),
            ({**QWEN, "num_attention_heads": "many"}, "[models.t5] "),
        ],
    )
    def test_a_config_that_transformers_refuses_is_one_line(
        self, tmp_path: Path, config: dict[str, object], said: str
    ) -> None:
        (tmp_path / "t5.json").write_text(json.dumps(config))
        (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
        (tmp_path / "sweep.toml").write_text(GLOO)
        with pytest.raises(SweepFileError) as raised:
            read_file(tmp_path / "sweep.toml", machine())
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)
