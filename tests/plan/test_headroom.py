"""Memory that is kept free on a GPU: the known parts of context and NCCL, and an assumption for the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.ladder import nearest_size
from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.search.fit import FitCheck
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import TrainSetup
from tests.predicted import estimate_of

GIB, MIB = 2**30, 2**20
MODEL = nearest_size(Family.LLAMA, 100_000_000)
MOST_OF_NCCL_ON_P5 = 614 * MIB  # by hand in tests/rates/test_communicators.py


def cluster(name: str, card_bytes: int | None = None, context_bytes: int | None = None) -> Hardware:
    server = BUILT_IN.server(name)
    gpu = BUILT_IN.gpu(server.gpu)
    gpu = replace(gpu, context_bytes=context_bytes, usable_memory_bytes=card_bytes or gpu.usable_memory_bytes)
    return Hardware(server=server, gpu=gpu, gpus_per_node=8)


def on(where: Hardware, headroom_bytes: int | None = None) -> Prediction:
    setup = TrainSetup(world_size=8, sequence_length=512)
    return estimate_of(MODEL, setup, where, headroom_bytes=headroom_bytes)


@pytest.mark.parametrize(
    ("server", "context", "stated", "kept"),
    [
        ("g6e.48xlarge", None, None, 2 * GIB),  # NCCL over PCIe is not known: the whole assumption
        ("g6e.48xlarge", 600 * MIB, None, 2 * GIB - 600 * MIB),
        ("p5.48xlarge", None, None, 3 * GIB // 2 + MOST_OF_NCCL_ON_P5),  # without the least of a communicator
        ("p5.48xlarge", 600 * MIB, None, MOST_OF_NCCL_ON_P5),  # nothing is assumed
        ("p5.48xlarge", None, GIB, GIB),
        ("p5.48xlarge", 600 * MIB, GIB, GIB - 600 * MIB),  # the card is without the context already
        ("p5.48xlarge", None, 0, 0),
    ],
)
def test_known_context_and_communicators_replace_the_assumption(
    server: str, context: int | None, stated: int | None, kept: int
) -> None:
    found = on(cluster(server, context_bytes=context), stated)
    assert found.required_headroom.num_bytes == kept
    assert found.available_bytes == found.gpu_bytes - kept


@pytest.mark.parametrize("server", ["p5.48xlarge", "g6e.48xlarge"])
def test_a_setup_fits_exactly_when_the_headroom_is_left(server: str) -> None:
    """One byte less than reserved memory and headroom does not fit; without headroom it does."""
    reserved = on(cluster(server)).allocator.peak_reserved_bytes
    kept = on(cluster(server)).required_headroom.num_bytes
    assert on(cluster(server, reserved + kept)).verdict is Verdict.FITS
    assert on(cluster(server, reserved + kept - 1)).fits is False
    assert on(cluster(server, reserved + kept - 1), headroom_bytes=0).fits is True


@pytest.mark.parametrize("server", ["p5.48xlarge", "g6e.48xlarge"])
@pytest.mark.parametrize("stated", [None, 0, 5 * GIB])
def test_a_search_checks_as_a_prediction_does(server: str, stated: int | None) -> None:
    found = on(cluster(server), stated)
    checked = FitCheck(headroom_bytes=stated).on(found.question)
    assert checked.limit_bytes == found.available_bytes
    assert checked.prediction.required_headroom == found.required_headroom


def shrunk_until(fails: Callable[[Prediction], bool]) -> Prediction:
    """Return the first prediction on smaller and smaller cards of which something holds."""
    setup = TrainSetup(world_size=8, sequence_length=512, micro_batch_size=4)
    card = estimate_of(MODEL, setup, cluster("p5.48xlarge")).allocator.peak_reserved_bytes
    for size in range(card, 0, -8 * MIB):
        found = estimate_of(MODEL, setup, cluster("p5.48xlarge", size), headroom_bytes=0)
        if fails(found):
            return found
    raise AssertionError("never")


def test_between_what_fits_and_what_does_not_a_setup_runs_with_retries() -> None:
    """On a card somewhat too small an allocation fails, the cache is flushed, and the step goes on to its end."""
    retried = shrunk_until(lambda found: found.fits is False)
    assert retried.allocator.num_alloc_retries > 0
    assert retried.allocator.out_of_memory is None
    assert retried.verdict is Verdict.RUNS_WITH_RETRIES
    full = shrunk_until(lambda found: found.allocator.out_of_memory is not None)
    assert full.verdict is Verdict.DOES_NOT_FIT
    assert full.gpu_bytes < retried.gpu_bytes
