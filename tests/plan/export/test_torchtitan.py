"""The exported config, parsed by torchtitan's own ConfigManager."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install '.[torchtitan]'")
pytest.importorskip("tyro", reason="torchtitan's ConfigManager needs tyro")

from fsdp_bench.plan.export import torchtitan
from tests.plan.export.settings import CONFIG, chosen, export

pytestmark = pytest.mark.filterwarnings("ignore")  # torchtitan's imports use what torch calls deprecated

QWEN3 = {**CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 64}


def _parsed(folder: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any] | None = None, **fields: Any) -> Any:
    from torchtitan.config import ConfigManager

    (file,) = export(["torchtitan"], chosen(config, api="fsdp2", wrap="block-and-ends", **fields))
    (folder / file.name).write_text(file.text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "torchtitan_config", raising=False)
    words = str(file.start).split()
    return ConfigManager().parse_args(words[words.index("--module") :])


def test_it_is_written_for_the_version_that_is_tested() -> None:
    assert version("torchtitan") == torchtitan.VERSION


def test_torchtitan_reads_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _parsed(
        tmp_path,
        monkeypatch,
        strategy="HYBRID_SHARD",
        shard_size=4,
        checkpointing="selective",
        checkpointing_policy="every-second-product",
        loss="compiled",
        optimizer="adamw-foreach",
        micro_batch_size=2,
        gradient_accumulation_steps=3,
        max_grad_norm=0.5,
        offload="params",
    )
    parallel, training = found.parallelism, found.training
    assert (parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree) == (2, 4)
    assert parallel.fsdp_reshard_after_forward == "default"
    assert (training.local_batch_size, training.global_batch_size, training.seq_len) == (2, 2 * 3 * 8, 256)
    assert (training.dtype, training.mixed_precision_param) == ("float32", "bfloat16")
    assert (training.mixed_precision_reduce, training.max_norm) == ("float32", 0.5)
    assert training.enable_cpu_offload
    assert training.disable_cuda_graphs
    assert type(found.activation_checkpoint).__qualname__ == "SelectiveAC.Config"
    assert (found.compile.enable, found.compile.components) == (True, ["loss"])
    assert found.optimizer.implementation == "foreach"


@pytest.mark.parametrize("config", [CONFIG, QWEN3], ids=lambda config: config["model_type"])
def test_torchtitan_builds_the_model_in_its_sizes(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    found = _parsed(tmp_path, monkeypatch, config, strategy="SHARD_GRAD_OP")
    assert found.parallelism.fsdp_reshard_after_forward == "never"
    assert found.activation_checkpoint is None
    with torch.device("meta"):
        model = found.model_spec.model.build()
    predicted = chosen(config, api="fsdp2").question.model.num_parameters
    assert sum(parameter.numel() for parameter in model.parameters()) == predicted
