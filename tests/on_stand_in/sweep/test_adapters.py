"""Trials of Hugging Face's models with PEFT's adapters: on gloo ranks, and rehearsed."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from fsdp_bench.spec.errors import SweepFileError
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.train.recording.main import huggingface
from fsdp_bench.validate import memory, predictable
from tests.on_stand_in.sweep.test_huggingface_trials import ON_GLOO, ON_THE_STAND_IN, QWEN, sweep
from tests.simulate.recorded.recording import record_here
from tests.sweep.config.test_grid import machine

LORA = """
[models.lora]
hf_config = "qwen.json"
lora = "rank=4,targets=q_proj+v_proj"
"""
GLOO = f"""{ON_GLOO}
{LORA}[models.qlora]
hf_config = "qwen.json"
qlora = 4
[grid]
model = ["lora", "qlora"]
world_size = 2
sequence_length = 16
precision = "bf16-mixed"
api = "fsdp2"
strategy = "FULL_SHARD"
[[include]]
model = ["lora", "qlora"]
api = "fsdp1"
strategy = "FULL_SHARD"
wrap = "block-and-adapters"
use_orig_params = false
[[include]]
model = "qlora"
api = "fsdp1"
strategy = "FULL_SHARD"
"""
REHEARSED = f"""{ON_THE_STAND_IN}
{LORA}[grid]
model = "lora"
world_size = 8
sequence_length = 256
precision = "bf16-mixed"
api = "fsdp2"
checkpointing = "none"
[[include]]
model = "lora"
api = "fsdp1"
checkpointing = "none"
wrap = "block-and-adapters"
use_orig_params = false
"""
LOSSES = """
[[include]]
model = "lora"
api = "fsdp2"
checkpointing = "none"
loss = ["chunked", "liger-fused-linear"]
"""
REHEARSED_QLORA = f"""{ON_THE_STAND_IN}
[models.qlora]
hf_config = "qwen.json"
qlora = 4
[grid]
model = "qlora"
world_size = 8
sequence_length = 256
batch = [1, 8]  # fewer and more tokens than bitsandbytes' kernel without unpacked weights takes
checkpointing = "selective"
precision = "bf16-mixed"
api = "fsdp2"
"""
VARIANTS = (
    *("bf16", "bf16 cast at blocks", "bf16-true flat units"),
    *("bf16 adapters apart", "bf16 adapters apart as gathered"),
)
"""The variants of a recording that these setups use. All variants take a minute more."""


@cache
def _recorded(model: ModelCode, sequence_length: int, _offload: bool) -> RecordedModel:
    assert model.config is not None
    return record_here(huggingface, model.config, sequence_length, model.lora, variants=VARIANTS)


class TestOnGlooRanks:
    def test_every_wrapper_trains_the_same_adapters(self, tmp_path: Path) -> None:
        losses = defaultdict(list)
        for record in sweep(tmp_path, GLOO):
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


def assert_peaks_near(records: list[TrialRecord]) -> None:
    """Check that all peaks are within 1 % of the predicted ones."""
    for record in records:
        found = memory.compare_with_record(record)
        assert found.error is None
        assert abs(found.peak.relative) <= 0.01, found


class TestOnTheStandIn:
    @pytest.mark.parametrize("more", ["", pytest.param(LOSSES, marks=pytest.mark.slow)], ids=["own loss", "others"])
    def test_peaks_are_as_predicted(self, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without use_orig_params adapters show what was gathered last, so that PEFT casts nothing."""
        monkeypatch.setattr(predictable, "_recorded", _recorded)
        records = sweep(tmp_path, REHEARSED + more)
        assert len(records) == (4 if more else 2)
        assert_peaks_near(records)

    def test_qlora_keeps_nothing_of_unpacked_products(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Selective checkpointing keeps what aten::mm returns, but does not see those inside bitsandbytes."""
        monkeypatch.setattr(predictable, "_recorded", _recorded)
        records = sweep(tmp_path, REHEARSED_QLORA)
        assert len(records) == 2
        assert_peaks_near(records)


class TestBadInput:
    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ('lora = "rang=4"', "lora: has no field 'rang'"),
            ("lora = 4\nqlora = 4", "lora and qlora: keep one"),
            ("lora = true", "lora: True is not allowed"),
            ('lora = "targets=nothing"', "PEFT refuses it"),
        ],
    )
    def test_bad_adapters_are_one_line(self, line: str, said: str, tmp_path: Path) -> None:
        (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
        (tmp_path / "sweep.toml").write_text(f'[models.m]\nhf_config = "qwen.json"\n{line}\n[grid]\nmodel = "m"\n')
        with pytest.raises(SweepFileError) as raised:
            read_file(tmp_path / "sweep.toml", machine())
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)
