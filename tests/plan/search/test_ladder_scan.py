"""The search's answers against a scan of every model of the size ladder, under setups drawn at random."""

from __future__ import annotations

import os
import random

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.loader import gpu
from fsdp_bench.plan.search.fit import FitCheck
from fsdp_bench.plan.search.quantity import size_ladder
from fsdp_bench.plan.search.search import find_largest
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
from fsdp_bench.spec.units import GIB

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
def test_the_search_finds_what_a_scan_of_every_model_finds(number: int) -> None:
    """The definition, model by model: the last width whose shallowest model fits, then the most layers that fit."""
    draw = random.Random(f"{SEED} {number}")
    setup, family = drawn_setup(draw), draw.choice([Family.LLAMA, Family.LLAMA, Family.GPT2])
    check = FitCheck(expandable_segments=draw.random() < 0.2, headroom_bytes=0)
    quantity = size_ladder(family, setup, GPU)
    needed: list[list[int]] = []  # by width
    for width in quantity.widths:
        needed.append([check.read(quantity[index], is_limited=False).peak_reserved_bytes for index in width])
        if min(needed[-1]) > 2 * GIB * max(CARDS_GIB):
            break
    for gib in CARDS_GIB:
        card_bytes = int(gib * GIB)
        last = max(number for number, sizes in enumerate(needed) if sizes[0] <= card_bytes)
        most = max(layers for layers, size in enumerate(needed[last]) if size <= card_bytes)
        card = replace(GPU, usable_memory_bytes=card_bytes)
        found = find_largest(size_ladder(family, setup, card), check)
        assert found.fits == quantity.widths[last][most], (gib, setup, family, check)
