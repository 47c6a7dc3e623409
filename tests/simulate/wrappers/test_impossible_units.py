"""Selective checkpointing of blocks with units inside them: refused where torch fails, by everything that runs it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import (
    Api,
    BackwardPrefetch,
    Checkpointing,
    Offload,
    ShardingStrategy,
    TrainSetup,
    Wrap,
)
from tests.conftest import run_command

MODEL = ModelShape(
    name="small",
    family=Family.LLAMA,
    num_hidden_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=24,
    vocab_size=31,
    max_position_embeddings=16,
)
FAILS: dict[str, Any] = {
    "api": Api.FSDP2,
    "wrap": Wrap.SIZE,
    "min_num_params": 200,
    "checkpointing": Checkpointing.SELECTIVE,
    "world_size": 2,
}


def test_a_block_with_units_inside_is_refused_with_what_would_work() -> None:
    reason = why_impossible(MODEL, TrainSetup(**FAILS), "cuda")
    assert reason is not None
    assert "min_num_params" in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    "change",
    [
        {"limit_all_gathers": True},
        {"limit_all_gathers": False, "forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        {"limit_all_gathers": False, "offload": Offload.PARAMS, "use_orig_params": True},
    ],
)
def test_fsdp1_may_recompute_more_too(change: dict[str, Any]) -> None:
    """Drawn by tools.validate --seed 20261123, dry run and rehearsal: torch ended all with "not found in storage"."""
    assert why_impossible(MODEL, TrainSetup(**{**FAILS, "api": Api.FSDP1, **change}), "cuda") is not None


@pytest.mark.parametrize(
    "change",
    [
        {"wrap": Wrap.BLOCK},
        {"min_num_params": MODEL.num_block_parameters},
        {"checkpointing": Checkpointing.FULL},
        {"strategy": ShardingStrategy.NO_SHARD},
        {"api": Api.FSDP1, "limit_all_gathers": False},
        {"api": Api.FSDP1, "limit_all_gathers": False, "forward_prefetch": True},
        {"api": Api.FSDP1, "limit_all_gathers": False, "offload": Offload.PARAMS, "use_orig_params": False},
    ],
)
def test_the_alternatives_that_a_refusal_names_are_not_refused(change: dict[str, Any]) -> None:
    assert why_impossible(MODEL, TrainSetup(**{**FAILS, **change}), "cuda") is None


WORDS = ("--world-size", 2, "--gpu", "A100-SXM-80GB", "--api", "fsdp2", "--wrap", "size", "--min-num-params", "10k")
WORDS = (*WORDS, "--checkpointing", "selective")


@pytest.mark.parametrize(
    "command",
    [("predict", "--params", "10M"), ("dry-run", "--params", "10M")],
    ids=lambda command: command[0],
)
def test_verbs_refuse_it_in_one_line(command: tuple[str, ...]) -> None:
    done = run_command(*command, *WORDS)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "profiler annotations" in done.stderr


def test_the_rank_is_in_the_document() -> None:
    words = ("--world-size", 2, "--gpu", "A100-SXM-80GB", "--seq", 64, "--batch", 1)
    done = run_command("predict", "--params", "10M", *words, "--json")
    assert isinstance(json.loads(done.stdout)["memory"]["peak_rank"], int)


def test_a_tied_head_keeps_both_ends_in_the_root() -> None:
    """FSDPState._validate_no_duplicate_params: a shared parameter is in one unit."""
    setup, tied = TrainSetup(wrap=Wrap.BLOCK_AND_ENDS), replace(MODEL, tie_word_embeddings=True)
    assert why_impossible(MODEL, setup, "cuda") is None
    assert "tie_word_embeddings" in (why_impossible(tied, setup, "cuda") or "")
    ddp = replace(setup, api=Api.FSDP2, strategy=ShardingStrategy.NO_SHARD)
    assert why_impossible(tied, ddp, "cuda") is None  # DistributedDataParallel has no units
