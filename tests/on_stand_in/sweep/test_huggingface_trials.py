"""Trials of Hugging Face's models, with losses of their own and others, and with adapters: on gloo ranks, rehearsed."""

import json
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.spec.errors import SweepFileError
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.train.recording.main import huggingface
from fsdp_bench.validate import predictable
from fsdp_bench.validate.memory import compare_with_record
from tests.conftest import message_of, records_of_sweep
from tests.on_stand_in.rehearsing import STUBS
from tests.shapes import llama_config
from tests.simulate.recorded.recording import record_here
from tests.sweep.config.test_grid import machine

T5 = {
    **{"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 128},
    **{"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2},
    **{"dropout_rate": 0.0, "decoder_start_token_id": 0, "tie_word_embeddings": True},
}
QWEN = llama_config(
    **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 6, "intermediate_size": 128},
    **{"vocab_size": 256, "max_position_embeddings": 256, "tie_word_embeddings": True},
)
MODELS: dict[str, dict[str, Any]] = {
    "t5": {"hf_config": "t5.json"},
    "qwen": {"hf_config": "qwen.json"},
    "lora": {"hf_config": "qwen.json", "lora": "rank=4,targets=q_proj+v_proj"},
    "qlora": {"hf_config": "qwen.json", "qlora": 4},
}
ON_GLOO = {
    **{"device": "cpu", "steps": 2, "threads_per_rank": 1},
    **{"communication_steps": 0, "steps_without_communication": 0},
}
ON_THE_STAND_IN = {"device": "rehearsed", "gpu": "H100-SXM", "steps": 1}

FSDP1, FSDP2, BOTH_APIS = {"api": "fsdp1"}, {"api": "fsdp2"}, {"api": ["fsdp1", "fsdp2"]}
TWO_RANKS = {"world_size": 2, "sequence_length": 16}
FULL, NO_SHARD = "FULL_SHARD", "NO_SHARD"
APART = FSDP1 | {"wrap": "block-and-adapters", "use_orig_params": False}
GLOO: list[dict[str, Any]] = [
    TWO_RANKS
    | {"precision": "fp32", "model": ["t5", "qwen"], "checkpointing": "none"}
    | BOTH_APIS
    | {"strategy": [FULL, "SHARD_GRAD_OP", NO_SHARD]},
    FSDP2 | {"model": "t5", "checkpointing": "full", "precision": "bf16-mixed", "strategy": [FULL, NO_SHARD]},
    FSDP2 | {"model": "t5", "checkpointing": "selective", "offload": "params", "strategy": FULL},
]
ON_EIGHT = BOTH_APIS | {"model": "qwen", "world_size": 8, "sequence_length": 64, "micro_batch_size": 2}
EVERY_STRATEGY = [
    ON_EIGHT | {"checkpointing": "none", "strategy": [FULL, "SHARD_GRAD_OP", "HYBRID_SHARD", NO_SHARD]},
    ON_EIGHT | {"checkpointing": "full", "strategy": FULL},
]
OFFLOADED = {"world_size": 8, "sequence_length": 128, "micro_batch_size": 2, "activation_offload": True}
QWEN_ALONE = FSDP2 | {"model": "qwen", "precision": "bf16-mixed", "checkpointing": ["none", "full"]}
BOTH = BOTH_APIS | {
    **{"model": ["qwen", "t5"], "precision": ["bf16-mixed", "fp32"], "strategy": [FULL, NO_SHARD]},
    **{"checkpointing": ["none", "full"]},
}
OF_LOSSES = {"model": "qwen", "world_size": 8, "sequence_length": 512, "micro_batch_size": 2}
EVERY = BOTH_APIS | {"precision": ["bf16-mixed", "fp32"]}
FEWEST = FSDP2 | {"precision": "fp32"}
WITH_ADAPTERS: list[dict[str, Any]] = [
    FSDP2 | TWO_RANKS | {"model": ["lora", "qlora"], "precision": "bf16-mixed", "strategy": FULL},
    APART | {"model": ["lora", "qlora"], "strategy": FULL},
    FSDP1 | {"model": "qlora", "strategy": FULL},
]
REHEARSED = {"world_size": 8, "sequence_length": 256, "precision": "bf16-mixed"}
LORA = [
    REHEARSED | FSDP2 | {"model": "lora", "checkpointing": "none"},
    APART | {"model": "lora", "checkpointing": "none"},
]
LOSSES_OF_LORA = FSDP2 | {"model": "lora", "checkpointing": "none", "loss": ["chunked", "liger-fused-linear"]}
QLORA = REHEARSED | FSDP2 | {"model": "qlora", "batch": [1, 8], "checkpointing": "selective"}
"""Fewer and more tokens than bitsandbytes' kernel without unpacked weights takes."""
VARIANTS = (
    *("bf16", "bf16 cast at blocks", "bf16-true flat units"),
    *("bf16 adapters apart", "bf16 adapters apart as gathered"),
)
"""The variants of a recording that these setups use. All variants take a minute more."""


def write_sweep(folder: Path, run: dict[str, Any], *grids: dict[str, Any]) -> Path:
    """Write a sweep file, of which the first grid is ``[grid]`` and each other one an ``[[include]]``."""
    (folder / "t5.json").write_text(json.dumps(T5))
    (folder / "qwen.json").write_text(json.dumps(QWEN))
    named = [grid["model"] for grid in grids]
    names = {name for each in named for name in ([each] if isinstance(each, str) else each)}
    tables = {"run": run, **{f"models.{name}": MODELS[name] for name in sorted(names)}, "grid": grids[0]}
    lines = []
    for title, table in [*tables.items(), *(("[include]", grid) for grid in grids[1:])]:
        lines += [f"[{title}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path = folder / "sweep.toml"
    path.write_text("\n".join(lines))
    return path


def sweep(folder: Path, run: dict[str, Any], *grids: dict[str, Any]) -> list[TrialRecord]:
    return records_of_sweep(write_sweep(folder, run, *grids))


@cache
def _recorded(model: ModelCode, sequence_length: int, _offload: bool) -> RecordedModel:
    assert model.config is not None
    return record_here(huggingface, model.config, sequence_length, model.lora, variants=VARIANTS)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> list[TrialRecord]:
    return sweep(tmp_path_factory.mktemp("gloo"), ON_GLOO, *GLOO)


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
        grid = TWO_RANKS | FSDP2 | {"model": "qwen", "precision": "fp32", "loss": ["plain", "chunked"]}
        plain, chunked = sweep(tmp_path, ON_GLOO, grid)
        assert {plain.outcome, chunked.outcome} == {Outcome.OK}
        for own, other in zip(plain.ranks, chunked.ranks, strict=True):
            assert own.losses == pytest.approx(other.losses, rel=1e-5)

    def test_every_wrapper_trains_the_same_adapters(self, tmp_path: Path) -> None:
        losses = defaultdict(list)
        for record in sweep(tmp_path, ON_GLOO, *WITH_ADAPTERS):
            if record.model.name == "qlora" and record.setup.wrap == "block" and record.setup.api == "fsdp1":
                assert record.outcome is Outcome.SKIPPED
                assert "Must flatten tensors with uniform dtype" in str(record.reason)
                continue
            assert record.outcome is Outcome.OK, record.model.name
            losses[record.model.name].append([rank.losses for rank in record.ranks])
        assert [len(found) for found in losses.values()] == [2, 2]
        for first, *others in losses.values():
            assert first[0] != first[1]  # every rank has tokens of its own
            assert all(other[rank] == pytest.approx(first[rank], rel=1e-3) for other in others for rank in (0, 1))


class TestOnTheStandIn:
    def test_every_strategy_allocates_what_is_predicted(self, tmp_path: Path) -> None:
        """By a recording of the code, which is made when it is asked for; to the byte in every phase of the steps."""
        for record in sweep(tmp_path, ON_THE_STAND_IN, *EVERY_STRATEGY):
            found = compare_with_record(record)
            assert found.error is None
            assert list(found.phases) == ["forward", "loss", "backward", "optimizer"]
            assert found.is_equal, found
            assert found.peak.predicted_bytes == found.peak.reference_bytes
            assert found.reserved.predicted_bytes == found.reserved.reference_bytes

    @pytest.mark.parametrize("grid", [QWEN_ALONE, pytest.param(BOTH, marks=pytest.mark.slow)], ids=["qwen", "both"])
    def test_offloaded_blocks_allocate_what_is_predicted(self, grid: dict[str, Any], tmp_path: Path) -> None:
        """Tensors that come back from the host are contiguous, which changes the allocations of backward.

        To 2 KiB in every phase: the scratch of sorts, which T5's table of positions needs, is not modelled.
        """
        for record in sweep(tmp_path, ON_THE_STAND_IN, OFFLOADED | grid):
            found = compare_with_record(record)
            assert found.error is None
            for phase in found.phases.values():
                assert abs(phase.predicted_bytes - phase.reference_bytes) <= 2048, (record.setup, found)

    @pytest.mark.parametrize(
        ("losses", "needs", "grid"),
        [
            (["chunked", "compiled", "liger-fused-linear"], "liger_kernel", FEWEST),
            pytest.param(["chunked", "compiled"], "torch", EVERY, marks=pytest.mark.slow),
            pytest.param(["liger", "liger-fused-linear"], "liger_kernel", EVERY, marks=pytest.mark.slow),
            pytest.param(["flash-attn"], "flash_attn", EVERY, marks=pytest.mark.slow),
            pytest.param(["unsloth-fp32"], "torch", EVERY, marks=pytest.mark.slow),
        ],
    )
    def test_peaks_with_another_loss_are_as_predicted(
        self, losses: list[str], needs: str, grid: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Attention in fp32 is unfused: its softmax needs room in backward, which a smaller loss makes the peak."""
        if find_spec(needs) is None:
            pytest.skip(f"needs {needs}")
        monkeypatch.setitem(QWEN, "vocab_size", 32000)  # so that the logits are the peak
        monkeypatch.setenv("PYTHONPATH", str(STUBS), prepend=":")
        peaks = {}
        for record in sweep(tmp_path, ON_THE_STAND_IN, OF_LOSSES | grid | {"loss": ["plain", *losses]}):
            found = compare_with_record(record)
            assert found.error is None
            assert abs(found.peak.relative) <= 0.005, found
            setup = record.setup
            peaks[setup.api, setup.precision, setup.loss.value] = found.peak.reference_bytes
        for (api, precision, loss), peak in peaks.items():
            assert loss == "plain" or peak < peaks[api, precision, "plain"]

    @pytest.mark.parametrize(
        ("grids", "count"),
        [(LORA, 2), pytest.param([*LORA, LOSSES_OF_LORA], 4, marks=pytest.mark.slow), ([QLORA], 2)],
        ids=["lora", "lora with other losses", "qlora"],
    )
    def test_peaks_with_adapters_are_within_one_per_cent(
        self, grids: list[dict[str, Any]], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without use_orig_params adapters show what was gathered last, so that PEFT casts nothing.

        Selective checkpointing keeps what aten::mm returns, but does not see those inside bitsandbytes.
        """
        monkeypatch.setattr(predictable, "_recorded", _recorded)
        records = sweep(tmp_path, ON_THE_STAND_IN, *grids)
        assert len(records) == count
        for record in records:
            found = compare_with_record(record)
            assert found.error is None
            assert abs(found.peak.relative) <= 0.01, found


@pytest.mark.parametrize(
    ("model", "config", "said"),
    [
        ({}, {"model_type": "qwen6"}, "[models.m] model_type 'qwen6': transformers refuses it"),
        ({}, {"architectures": ["Qwen6Model"]}, "has no 'Qwen6Model'"),
        ({}, {"num_attention_heads": "many"}, "[models.m] "),
        ({"lora": "rang=4"}, {}, "lora: has no field 'rang'"),
        ({"lora": 4, "qlora": 4}, {}, "lora and qlora: keep one"),
        ({"lora": True}, {}, "lora: True is not allowed"),
        ({"lora": "targets=nothing"}, {}, "PEFT refuses it"),
    ],
    ids=str,
)
def test_what_transformers_or_peft_refuses_is_one_line(
    model: dict[str, Any], config: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "m", {"hf_config": "m.json", **model})
    (tmp_path / "m.json").write_text(json.dumps(QWEN | config))
    path = write_sweep(tmp_path, {}, {"model": "m"})
    assert said in message_of(lambda: read_file(path, machine()), SweepFileError)
