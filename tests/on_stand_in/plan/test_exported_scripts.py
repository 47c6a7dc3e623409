"""Exported scripts under their real libraries: loaded, run on gloo ranks, and rehearsed against their predictions.

Predictions count what PyTorch's allocator does: bytes rounded up to 512. LoRA and QLoRA are those that come recorded.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.catalog.lookup import server
from fsdp_bench.plan.estimate import read_allocator
from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import write
from fsdp_bench.plan.export.plugin import as_accelerate_shards
from fsdp_bench.plan.question import speed_of
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.lora import LoRA
from tests import one_memory
from tests.on_stand_in.rehearsing import rehearse
from tests.plan.export.settings import CONFIG, chosen, export
from tests.shapes import llama_config


def predicted(one: Chosen) -> dict[str, int]:
    """Return the peaks of allocated bytes by phase, on the stand-in."""
    asked = one.question
    usable = asked.gpu.usable_memory_bytes
    reading = read_allocator(SimulatedSteps(asked.model, one.setup, asked.kernel_set), usable, rank=0)
    return reading.phases


def rehearsed(one: Chosen, kind: str, folder: Path) -> dict[str, int]:
    """Return the same of an exported script, started as the export says: of loading, and of the third step."""
    files = export([kind], one)
    write(files, folder)
    command, *words = str(files[-1].start).split()
    words = words[3:] if command == "torchrun" else words  # the world is the rehearsal's
    given = ("--gpu", "H100-SXM", "--world-size", str(one.setup.world_size), "--steps", "3")
    found = rehearse(*given, "--", *words, command=command, folder=folder)
    spans = [span for span in found.document["spans"] if span["step"] == 3 or span["phase"] == "load"]
    return {span["phase"]: span["allocated_bytes"] for span in spans}


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


SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 3, "vocab_size": 32000}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4}
CODE = {
    "llama": SIZES | HEADS,
    "mistral": SIZES | HEADS | {"sliding_window": None},
    "qwen2": SIZES | HEADS,
    "qwen3": SIZES | HEADS | {"head_dim": 128},
    "phi3": SIZES | HEADS | {"pad_token_id": 0},
    "gpt2": {"n_embd": 2048, "n_layer": 3, "n_head": 16, "vocab_size": 32000, "n_positions": 4096},
}
OF_EIGHT = {"sequence_length": 4096, "micro_batch_size": 2}
OF_SIXTEEN = OF_EIGHT | {"world_size": 16}
SELECTIVE = {"checkpointing": "selective", "checkpointing_policy": "every-second-product"}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", FSDP2 | FULL | OF_EIGHT),
        ("qwen2", FSDP1 | OF_EIGHT),
        ("gpt2", FSDP2 | OF_EIGHT),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("llama", FSDP1 | OF_EIGHT),
                ("mistral", FSDP1 | FULL | OF_EIGHT),
                ("mistral", FSDP2 | SELECTIVE | OF_EIGHT),
                ("qwen3", FSDP2 | OF_SIXTEEN | {"strategy": "HYBRID_SHARD"}),
                ("qwen3", FSDP1 | FULL | OF_EIGHT | {"max_grad_norm": 1.0}),
                ("phi3", FSDP2 | OF_EIGHT | {"optimizer": "adamw-fused"}),
                ("gpt2", FSDP2 | OF_SIXTEEN | {"strategy": "NO_SHARD"}),
            )
        ),
    ],
    ids=str,
)
def test_the_pytorch_script_takes_as_long_as_predicted(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Hugging Face's code, whose operators are recorded and rehearsed apart: within 1 %."""
    cluster = server("p5.48xlarge", fields.get("world_size", 8) // 8)
    one = chosen({"model_type": family, **CODE[family]}, hardware=cluster, **fields)
    files = export(["pytorch"], one)
    write(files, tmp_path)
    words = str(files[-1].start).split()
    given = ("--server", "p5.48xlarge", "--nodes", str(cluster.num_nodes), "--time", "--steps", "3")
    words = words[words.index("train_fsdp.py") :]
    found = rehearse(*given, "--", *words, command="torchrun", folder=tmp_path).document["time"]
    expected = speed_of(one.question).time
    assert found["unknown"] == {}
    assert found["step_seconds"] == pytest.approx(expected.step_seconds, rel=0.01)
    assert found["parts_seconds"]["other_operators"] == pytest.approx(expected.parts["other_operators"], rel=0.02)


OTHERWISE = FULL | {"strategy": "SHARD_GRAD_OP", "offload": "params"}
"""What accelerate's config file says of sharding, checkpoints and offload beside the defaults."""


@pytest.mark.parametrize(
    "fields",
    [FSDP1 | FULL | {"backward_prefetch": "BACKWARD_POST"}, FSDP2, FSDP1 | OTHERWISE, FSDP2 | OTHERWISE],
    ids=str,
)
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


WIDE = llama_config(
    **{"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "vocab_size": 2000},
    **{"num_attention_heads": 16, "num_key_value_heads": 4},
)
LORA, QLORA = (LoRA(rank=16, targets=("q_proj", "v_proj"), base=base) for base in ("bf16", "nf4"))
LONG = {"sequence_length": 2048}
UNITS = FSDP1 | LONG | {"wrap": "block-and-adapters"}
NOT_SPLIT = 2**20
"""kSmallSize in c10/cuda/CUDACachingAllocator.cpp: a remainder up to this stays with a large block."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("lora", "fields"),
    [
        *((LORA, UNITS), (QLORA, FSDP2 | LONG | FULL)),
        pytest.param(LORA, FSDP2 | LONG | FULL, marks=pytest.mark.slow),
        pytest.param(QLORA, UNITS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_script_with_adapters_needs_what_was_predicted(lora: LoRA, fields: dict[str, Any], tmp_path: Path) -> None:
    """But for what the allocator does not split off a block, up to 1 MiB: it depends on what loading left in its cache.

    Under QLoRA each layer has a copy of a table of 256 numbers, of which the recording counts one (bitsandbytes 0.50,
    functional.py, quantize_blockwise: ``code.to(A.device, copy=True)``). A rank has its shards, and one layer at a time
    whole: it needs less to load than all layers take in 4 bits.
    """
    one = chosen(WIDE, lora=lora, **fields)
    expected, found = predicted(one), rehearsed(one, "pytorch", tmp_path)
    copies = 8 * 7 * 256 * 4 if lora.is_quantized else 0  # blocks, their linear layers
    assert found["backward"] == pytest.approx(expected["backward"] + copies, abs=2 * NOT_SPLIT)
    assert found["forward"] == pytest.approx(max(expected["forward"], expected["loss"]) + copies, abs=2 * NOT_SPLIT)
    layers_in_4_bits = 8 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 3584) // 2
    assert found["load"] < layers_in_4_bits or lora is LORA or fields is UNITS


@pytest.mark.parametrize(
    "fields",
    [
        *(FSDP2 | LONG | INSIDE, UNITS | AROUND),
        *(pytest.param(fields, marks=pytest.mark.slow) for fields in (UNITS | INSIDE, FSDP2 | LONG | AROUND)),
        pytest.param(BARE | LONG | INSIDE, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_script_with_adapters_and_reentrant_checkpoints_needs_what_was_predicted(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    """Around units of fsdp1 the frozen blocks' inputs and their gradients stay: one hidden state a layer more.

    That is a tenth of the peak.
    """
    one = chosen(WIDE, lora=LORA, **fields)
    found = rehearsed(one, "pytorch", tmp_path)
    assert found["backward"] == pytest.approx(predicted(one)["backward"], rel=0.005)
    if fields == UNITS | AROUND:
        hidden, blocks = 2048 * WIDE["hidden_size"] * 2, WIDE["num_hidden_layers"]
        usual = predicted(chosen(WIDE, lora=LORA, **{**fields, "reentrant": "no"}))
        assert found["backward"] > usual["backward"] + (blocks - 2) * hidden


@pytest.mark.slow
@pytest.mark.timeout(1800)  # models of full size; adapters are recorded first
@pytest.mark.parametrize("row", one_memory.ROWS, ids=str)
def test_an_exported_script_takes_what_three_commands_said(row: one_memory.Row, tmp_path: Path) -> None:
    """The fourth column of docs/validation/memory.md."""
    found = one_memory.predicted(row, tmp_path)
    both = one_memory.Answers(found.batch, {**found.peaks, "rehearse": one_memory.rehearsed(row, tmp_path)})
    assert both.line(row) == one_memory.table()[one_memory.ROWS.index(row)]
    assert found.apart_gib == 0
    assert both.apart_gib <= one_memory.WITHIN_GIB
