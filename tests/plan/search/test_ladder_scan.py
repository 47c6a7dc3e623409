"""The search's answers against a scan of the whole ladder, under setups drawn at random: what WORSE rests on."""

from __future__ import annotations

import os
import random

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.loader import gpu
from fsdp_bench.plan.search.dials import model_dial
from fsdp_bench.plan.search.judge import Judge
from fsdp_bench.plan.search.search import reach
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import (
    Api,
    Checkpointing,
    Offload,
    Precision,
    ShardingStrategy,
    TrainSetup,
    impossible,
)

SETUPS = int(os.environ.get("FSDP_BENCH_TEST_SCANS", "12"))
SEED = int(os.environ.get("FSDP_BENCH_TEST_SCAN_SEED", "1"))
GPU = gpu("A10G")
PRECISIONS = ["fp32", "bf16-mixed", "bf16-mixed-bf16-reduce", "fp16-mixed", "bf16-true"]
CARDS_GIB = (14.6, 15.8, 22.05, 23.7, 31.7, 39.4, 44.4, 47.5, 79.2, 139.8)


def drawn_setup(draw: random.Random) -> TrainSetup:
    while True:
        try:
            setup = TrainSetup(
                api=draw.choice(list(Api)),
                strategy=draw.choice(list(ShardingStrategy)),
                precision=Precision.parse(draw.choice(PRECISIONS)),
                offload=draw.choice(list(Offload)),
                checkpointing=draw.choice(list(Checkpointing)),
                world_size=draw.choice([8, 64]),
                micro_batch_size=draw.choice([1, 1, 4]),
                sequence_length=draw.choice([512, 2048, 2048, 8192]),
            )
        except SpecError:
            continue
        if impossible(setup, "cuda") is None:
            return setup


@pytest.mark.slow
@pytest.mark.parametrize("number", range(SETUPS))
def test_the_search_finds_the_last_step_below_the_first_failure(number: int) -> None:
    draw = random.Random(f"{SEED} {number}")
    setup, family = drawn_setup(draw), draw.choice([Family.LLAMA, Family.LLAMA, Family.GPT2])
    judge = Judge(expandable_segments=draw.random() < 0.2)
    dial = model_dial(family, setup, GPU)
    needed: list[int] = []
    for gib in CARDS_GIB:
        card_bytes = int(gib * 2**30)
        while len(needed) < len(dial) and max(needed, default=0) <= card_bytes:
            needed.append(judge.replay(judge.program(dial[len(needed)])).until().peak_reserved_bytes)
        first_failure = next((index for index, size in enumerate(needed) if size > card_bytes), len(dial))
        card = replace(GPU, usable_memory_bytes=card_bytes)
        found = reach(model_dial(family, setup, card), judge)
        assert found.fits == first_failure - 1, (gib, setup, family, judge)
