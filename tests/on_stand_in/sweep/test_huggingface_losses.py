"""Trials of Hugging Face's causal models with another loss than their own: on gloo ranks, and rehearsed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.validate.memory import compare_with_record
from tests.on_stand_in.rehearsing import STUBS
from tests.on_stand_in.sweep.test_huggingface_trials import ON_GLOO, ON_THE_STAND_IN, QWEN, sweep

GLOO = f"""{ON_GLOO}
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
REHEARSED = f"""{ON_THE_STAND_IN}
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


class TestOnGlooRanks:
    def test_the_chunked_loss_is_the_models_own(self, tmp_path: Path) -> None:
        plain, chunked = sweep(tmp_path, GLOO)
        assert {plain.outcome, chunked.outcome} == {Outcome.OK}
        for own, other in zip(plain.ranks, chunked.ranks, strict=True):
            assert own.losses == pytest.approx(other.losses, rel=1e-5)


class TestOnTheStandIn:
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
    def test_peaks_are_as_predicted(
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
        grid = REHEARSED.replace("PRECISIONS", precisions).replace("APIS", apis)
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
