"""Selective checkpointing of blocks with units inside them: refused where torch fails, by everything that runs it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.setup import TrainSetup
from tests.conftest import json_of, refused
from tests.shapes import shape

MODEL = shape(
    **{"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"intermediate_size": 24, "vocab_size": 31, "max_position_embeddings": 16},
)
FAILS: dict[str, Any] = {"api": "fsdp2", "wrap": "size", "min_num_params": 200, "checkpointing": "selective"}
FAILS |= {"world_size": 2}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"api": "fsdp1", "limit_all_gathers": True},
        {"api": "fsdp1", "limit_all_gathers": False, "forward_prefetch": True, "backward_prefetch": "BACKWARD_POST"},
        {"api": "fsdp1", "limit_all_gathers": False, "offload": "params", "use_orig_params": True},
    ],
)
def test_a_block_with_units_inside_is_refused_with_what_would_work(change: dict[str, Any]) -> None:
    """FSDP1's drawn by tools.validate --seed 20261123, dry run and rehearsal: torch: "not found in storage"."""
    reason = why_impossible(MODEL, TrainSetup(**{**FAILS, **change}), "cuda")
    assert "min_num_params" in str(reason)
    assert "\n" not in str(reason)


@pytest.mark.parametrize(
    "change",
    [
        {"wrap": "block"},
        {"min_num_params": MODEL.num_block_parameters},
        {"checkpointing": "full"},
        {"strategy": "NO_SHARD"},
        {"api": "fsdp1", "limit_all_gathers": False},
        {"api": "fsdp1", "limit_all_gathers": False, "forward_prefetch": True},
        {"api": "fsdp1", "limit_all_gathers": False, "offload": "params", "use_orig_params": False},
    ],
)
def test_the_alternatives_that_a_refusal_names_are_not_refused(change: dict[str, Any]) -> None:
    assert why_impossible(MODEL, TrainSetup(**{**FAILS, **change}), "cuda") is None


WORDS = ("--world-size", 2, "--gpu", "A100-SXM-80GB", "--api", "fsdp2", "--wrap", "size", "--min-num-params", "10k")
WORDS = (*WORDS, "--checkpointing", "selective")


@pytest.mark.parametrize("command", ["predict", "dry-run"])
def test_commands_refuse_it_in_one_line(command: str) -> None:
    assert "profiler annotations" in refused(command, "--params", "10M", *WORDS)


def test_the_rank_is_in_the_document() -> None:
    words = ("--params", "10M", "--world-size", 2, "--gpu", "A100-SXM-80GB", "--seq", 64, "--batch", 1)
    assert isinstance(json_of("predict", *words)["memory"]["peak_rank"], int)


def test_a_tied_head_keeps_both_ends_in_the_root() -> None:
    """FSDPState._validate_no_duplicate_params: a shared parameter is in one unit."""
    setup, tied = TrainSetup(wrap="block-and-ends"), replace(MODEL, tie_word_embeddings=True)
    assert why_impossible(MODEL, setup, "cuda") is None
    assert "tie_word_embeddings" in (why_impossible(tied, setup, "cuda") or "")
    ddp = replace(setup, api="fsdp2", strategy="NO_SHARD")
    assert why_impossible(tied, ddp, "cuda") is None  # DistributedDataParallel has no units
