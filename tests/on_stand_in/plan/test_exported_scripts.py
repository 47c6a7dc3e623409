"""Exported scripts under their real libraries: loaded, run on gloo ranks, and rehearsed against their predictions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.plan.export.files import write
from fsdp_bench.plan.export.plugin import as_accelerate_shards
from tests.on_stand_in.plan.exporting import predicted, rehearsed
from tests.plan.export.settings import CONFIG, chosen, export

SCALAR = 512
"""Bytes that the allocator hands out for a tensor of one element (kMinBlockSize)."""
INT64 = 8
FSDP1, FSDP2 = {"api": "fsdp1"}, {"api": "fsdp2"}
BARE = FSDP2 | {"strategy": "NO_SHARD", "world_size": 1}
FULL = {"checkpointing": "full"}
INSIDE, AROUND = ({**FULL, "reentrant": kind} for kind in ("inside", "around"))
ACCUMULATED = {"gradient_accumulation_steps": 3, "sync_every_micro_batch": False, "max_grad_norm": 1.0}


@pytest.mark.parametrize(
    "fields",
    [
        FSDP1 | FULL | {"strategy": "HYBRID_SHARD", "shard_size": 4},
        FSDP2 | FULL | {"strategy": "HYBRID_SHARD", "shard_size": 4},
        FSDP2 | {"checkpointing": "selective", "strategy": "SHARD_GRAD_OP", "wrap": "block-and-ends"},
        FSDP1 | ACCUMULATED | {"checkpointing": "selective", "checkpointing_policy": "every-second-product"},
        FSDP2 | ACCUMULATED | {"offload": "params"},
        FSDP2 | {"strategy": "NO_SHARD", "loss": "chunked"},
        BARE | ACCUMULATED | FULL,
        FSDP1 | AROUND,
        pytest.param(FSDP1 | INSIDE, marks=pytest.mark.slow),
        pytest.param(FSDP2 | AROUND, marks=pytest.mark.slow),
        pytest.param(FSDP2 | INSIDE, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_pytorch_script_needs_what_was_predicted_to_the_byte(fields: dict[str, Any], tmp_path: Path) -> None:
    """But for one scalar in forward: the script still holds the loss of the micro-batch before."""
    one = chosen(**fields)
    expected, found = predicted(one), rehearsed(one, "pytorch", tmp_path)
    earlier_loss = SCALAR if one.setup.gradient_accumulation_steps > 1 else 0
    assert found["backward"] == expected["backward"]
    forward = max(expected["forward"], expected["loss"])  # a rehearsal does not see where the loss begins
    assert found["forward"] == forward + earlier_loss


@pytest.mark.parametrize("fields", [FSDP1 | FULL, FSDP2], ids=str)
def test_accelerate_needs_what_was_predicted_and_the_loss_twice(fields: dict[str, Any], tmp_path: Path) -> None:
    """Accelerator.backward divides the loss by the number of micro-batches; its caller holds the undivided one."""
    one = chosen(**fields)
    expected = predicted(as_accelerate_shards(one, "accelerate")[0])
    assert rehearsed(one, "accelerate", tmp_path)["backward"] == expected["backward"] + SCALAR


@pytest.mark.parametrize(
    "fields",
    [
        *(FSDP1, FSDP2 | FULL, FSDP2 | ACCUMULATED, BARE, BARE | FULL, FSDP1 | INSIDE),
        *(pytest.param(fields, marks=pytest.mark.slow) for fields in (FSDP2 | INSIDE, BARE | INSIDE)),
    ],
    ids=str,
)
def test_the_trainer_needs_what_was_predicted_and_a_few_scalars(fields: dict[str, Any], tmp_path: Path) -> None:
    """Trainer keeps sums of losses and numbers of tokens on the GPU (_tr_loss, num_items_in_batch).

    It has the tokens and labels of all micro-batches there from the beginning of a step (get_batch_samples).
    """
    one = chosen(**fields)
    other_batches = (one.setup.gradient_accumulation_steps - 1) * 2 * INT64 * one.setup.sequence_length
    expected = predicted(one if one.setup.is_bare else as_accelerate_shards(one, "huggingface")[0])
    more = rehearsed(one, "huggingface", tmp_path)["backward"] - expected["backward"] - other_batches
    assert more % SCALAR == 0
    assert 0 < more <= 8 * SCALAR


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_accelerate_reads_its_config(api: str, tmp_path: Path) -> None:
    """In a process of its own, as accelerate keeps what it read in environment variables."""
    fields = {"strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_POST" if api == "fsdp1" else "BACKWARD_PRE"}
    write(export(["accelerate"], chosen(api=api, checkpointing="full", offload="params", **fields)), tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_CONFIG], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {
        "num_processes": 8,
        "mixed_precision": "no",
        "version": 1 if api == "fsdp1" else 2,
        "strategy": "ShardingStrategy.SHARD_GRAD_OP" if api == "fsdp1" else "False",
        "prefetch": "BackwardPrefetch.BACKWARD_POST" if api == "fsdp1" else "None",
        "checkpointing": True,
        "offload": "CPUOffload" if api == "fsdp1" else "CPUOffloadPolicy",
        "original": True if api == "fsdp1" else None,
        "block": ["LlamaDecoderLayer"],
    }


READ_CONFIG = """
import json, os
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

config = load_config_from_file("accelerate.yaml")
words = ["--config_file", "accelerate.yaml", "train_accelerate.py"]
arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
os.environ.update(prepare_multi_gpu_env(arguments))
plugin = FullyShardedDataParallelPlugin()
one = plugin.fsdp_version == 1
print(json.dumps({
    "num_processes": config.num_processes,
    "mixed_precision": config.mixed_precision,
    "version": plugin.fsdp_version,
    "strategy": str(plugin.sharding_strategy if one else plugin.reshard_after_forward),
    "prefetch": str(plugin.backward_prefetch),
    "checkpointing": plugin.activation_checkpointing,
    "offload": type(plugin.cpu_offload).__name__,
    "original": plugin.use_orig_params,
    "block": plugin.transformer_cls_names_to_wrap,
}))
"""


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_the_trainers_arguments_are_made(api: str, tmp_path: Path) -> None:
    from fsdp_bench.plan.export import huggingface

    one = chosen(api=api, wrap="block-and-ends" if api == "fsdp2" else "block", gradient_accumulation_steps=2)
    (tmp_path / "arguments.json").write_text(json.dumps(huggingface.arguments(one)))
    code = "import json; from transformers import TrainingArguments as T; a = T(**json.load(open('arguments.json')));"
    code += " print(json.dumps([a.fsdp_plugin_args, a.gradient_accumulation_steps, a.mixed_precision]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    plugin, steps, precision = json.loads(done.stdout.splitlines()[-1])
    assert plugin["fsdp_version"] == (1 if api == "fsdp1" else 2)
    assert plugin["reshard_after_forward"] in ("full_shard", True)
    assert plugin["transformer_cls_names_to_wrap"] == "LlamaDecoderLayer"
    assert (steps, precision) == (2, "no")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(FSDP1 | {"checkpointing": "selective"}, marks=pytest.mark.slow),
        FSDP2 | FULL | ACCUMULATED | {"loss": "chunked"},
    ],
    ids=str,
)
def test_the_pytorch_script_trains_on_two_cpu_ranks(fields: dict[str, Any], tmp_path: Path) -> None:
    (file,) = export(["pytorch"], chosen(**{**fields, "world_size": 2, "sequence_length": 64}))
    write([file], tmp_path)
    command, *words = str(file.start).split()
    done = subprocess.run(
        [str(Path(sys.executable).parent / command), *words],
        cwd=tmp_path,
        env={**os.environ, "STEPS": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    # The loss of random weights of small norm is about that of a guess, ln 1024 = 6.93.
    assert losses == [pytest.approx(6.93, abs=0.3)] * 2
    assert CONFIG["vocab_size"] == 1024
