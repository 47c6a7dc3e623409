"""The search's answers against a scan of every model of the size ladder, under setups drawn at random."""

from __future__ import annotations

import math
import random

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.loader import gpu
from fsdp_bench.plan.estimate import read_allocator
from fsdp_bench.plan.search.fit import FitCheck
from fsdp_bench.plan.search.quantity import Quantity, size_ladder
from fsdp_bench.plan.search.search import find_largest
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Api, Checkpointing, Offload, Precision, ShardingStrategy, TrainSetup
from fsdp_bench.spec.units import GIB
from tests.profiles import draws

SETUPS = draws(6, 24)
SEED = 1
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
    # An expandable segment has as many addresses as the GPU has bytes, so each size of GPU is scanned on its own.
    for gib in CARDS_GIB[::5] if check.expandable_segments else CARDS_GIB:
        quantity = size_ladder(family, setup, Hardware.of_gpu(replace(GPU, usable_memory_bytes=int(gib * GIB))))
        scanned = -1
        for width in quantity.widths:
            if check.on(quantity[width[0]]).fullness <= 1 and needs(check, quantity, width[0]) <= gib * GIB:
                scanned = max(index for index in width if needs(check, quantity, index) <= gib * GIB)
        assert find_largest(quantity, check).fits == scanned, (gib, setup, family, check)


_needed: dict[tuple[object, ...], float] = {}


def needs(check: FitCheck, quantity: Quantity, index: int) -> float:
    """Return the bytes that a candidate reserves; infinity if it would retry an allocation."""
    candidate = quantity[index]
    checked = check.on(candidate)
    gpu_bytes = checked.limit_bytes if check.expandable_segments else None
    key = candidate.model, candidate.setup, check, gpu_bytes
    if key not in _needed:
        reading = read_allocator(checked.simulated, gpu_bytes, check.expandable_segments)
        is_retried = reading.num_alloc_retries or reading.out_of_memory
        _needed[key] = math.inf if is_retried else reading.peak_reserved_bytes
    return _needed[key]
