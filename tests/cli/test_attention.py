"""``--attention``: transformers' attn_implementation, and what code without fused attention means on older GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.catalog.architectures import NotRecorded, recorded_architecture
from fsdp_bench.catalog.lookup import model
from fsdp_bench.cli.common.options import SetupOptions
from fsdp_bench.cli.common.setups import read_model
from fsdp_bench.plan import recording
from fsdp_bench.spec.errors import MachineError
from tests.cli.test_options import read_setup
from tests.shapes import llama_config

CONFIG = llama_config()


def test_eager_attention_is_recorded_with_its_config_and_sdpa_is_what_comes_with_fsdp_bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []
    like = model("Qwen2.5-0.5B")

    def recorded_config(config: dict[str, Any], *_: Any) -> Any:
        asked.append(config)
        return like.code

    monkeypatch.setattr(recording, "recorded_config", recorded_config)
    read_model(SetupOptions(model="Qwen2.5-0.5B", attention="sdpa"))
    assert asked == []
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "attn_implementation": "eager"}))
    for options in (SetupOptions(model="Llama-3.1-8B", attention="eager"), SetupOptions(hf_config=path)):
        assert "eager" in read_model(options).name or options.hf_config
    read_model(SetupOptions(model="Llama-3.1-8B", attention="Flash_Attention_2"))
    assert [config["attn_implementation"] for config in asked] == ["eager", "eager", "flash_attention_2"]


def test_a_recording_of_sdpa_does_not_hold_for_a_config_with_other_attention() -> None:
    with pytest.raises(NotRecorded, match="attention 'eager' was not recorded"):
        recorded_architecture({**CONFIG, "attn_implementation": "eager"}, 512, "mine")
    assert recorded_architecture({**CONFIG, "attn_implementation": "sdpa"}, 512, "mine").has_fused_attention


@pytest.mark.parametrize(
    ("gpu", "precision", "is_asked"), [("T4", "fp16-mixed", True), ("T4", "fp32", False), ("L4", "bf16", False)]
)
def test_code_is_recorded_without_flash_attention_for_gpus_that_have_none(
    monkeypatch: pytest.MonkeyPatch, gpu: str, precision: str, is_asked: bool
) -> None:
    """Qwen3's does not come with fsdp-bench; where it cannot be recorded, the verdict is unknown."""
    asked: list[dict[str, Any]] = []

    def recorded_config(*_: Any, **how: Any) -> Any:
        asked.append(how)
        raise MachineError("no torch")

    monkeypatch.setattr(recording, "recorded_config", recorded_config)
    found, setup, hardware = read_setup(
        SetupOptions(model="Qwen3-0.6B", code="huggingface", gpu=gpu, step={"precision": precision})
    )
    assert asked == [{"before_sm80": True}] * is_asked
    assert found.knows_attention(hardware.gpu, setup.precision.compute) is not is_asked


def test_what_comes_with_fsdp_bench_for_older_gpus_is_no_other_models() -> None:
    options = SetupOptions(
        model="Llama-3.2-1B", code="huggingface", gpu="V100-SXM2-16GB", step={"precision": "bf16-mixed"}
    )
    found, setup, hardware = read_setup(options)
    assert found.code.origin.before_sm80
    assert found.knows_attention(hardware.gpu, setup.precision.compute)
    assert "aten::_safe_softmax" in found.some_variant.names
    assert not any("flash" in name for name in found.some_variant.names)
