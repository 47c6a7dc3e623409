"""Other training scripts: their cross-entropy, and their policy of checkpointing.

Expected sizes are worked out from shapes: T tokens, V vocabulary, D hidden, K keys and values, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pytest

from fsdp_bench.simulate.events import Event, Kind, Work
from fsdp_bench.simulate.operators.kernels import CUDA, CrossEntropy
from fsdp_bench.simulate.repeat import Log
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.setup import Loss, TrainSetup
from tests.predicted import memory_of
from tests.shapes import shape

SHAPE = shape(
    **{"num_hidden_layers": 2, "hidden_size": 256, "num_key_value_heads": 2, "intermediate_size": 512},
    **{"vocab_size": 32000, "max_position_embeddings": 1024},
)
TOKENS = 2 * 1024
LOGITS = TOKENS * 32000


def _setup(checkpointing: str = "none", policy: str | None = None) -> TrainSetup:
    given = {"precision": "bf16-mixed", "checkpointing": checkpointing, "checkpointing_policy": policy}
    return TrainSetup(world_size=8, micro_batch_size=2, sequence_length=1024, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("which", "bytes_a_logit"),
    [
        # fp32 logarithms, their gradient, and the gradient of the cast's result
        (CrossEntropy.FP32_LOGITS, 4 + 4 + 4),
        # the same three in bf16
        (CrossEntropy.SAME_DTYPE, 2 + 2 + 2),
    ],
)
def test_logits_at_the_peak_are_those_of_the_scripts_cross_entropy(which: CrossEntropy, bytes_a_logit: int) -> None:
    found = memory_of(SHAPE, _setup(), replace(CUDA, cross_entropy=which))
    logits = found.breakdown_bytes["logits"]
    assert logits == pytest.approx(bytes_a_logit * LOGITS, rel=0.001)  # and vectors of one number a token


def test_metrics_on_logits_are_further_cross_entropies_in_fp32_and_keep_the_logits() -> None:
    """Each reads the 16-bit logits, writes them in fp32, reads those, and writes their logarithms."""
    setup = msgspec.structs.replace(_setup(), loss=Loss.FLASH_ATTN)
    without, logged = (SimulatedSteps(SHAPE, setup, replace(CUDA, metrics_on_logits=count)).step() for count in (0, 2))
    more = _bytes_of_operators(logged) - _bytes_of_operators(without)
    assert more == pytest.approx(2 * (2 + 4 + 4 + 4) * LOGITS, rel=0.001)  # and numbers of each token
    assert _left_behind(logged) - _left_behind(without) == 2 * LOGITS


def test_metrics_on_logits_are_the_peak_where_logits_outweigh_activations() -> None:
    """Kept logits in bf16, the same in fp32, and their logarithms: more than blocks that are computed again."""
    setup = msgspec.structs.replace(_setup("full"), loss=Loss.FLASH_ATTN)
    logged = memory_of(SHAPE, setup, replace(CUDA, metrics_on_logits=1))
    assert (logged.peak_phase, logged.peak_operator) == ("loss", "aten::nll_loss_forward")
    assert logged.breakdown_bytes["logits"] >= (2 + 4 + 4) * LOGITS


def _bytes_of_operators(log: Log) -> int:
    """Bytes that a step's operators read and write."""
    return sum(work.num_bytes for work in _works(log.last_step()))


def _left_behind(log: Log) -> int:
    """Bytes that are alive at the end of the log."""
    sizes = {event.number: event.num_bytes for event in log.events if event.kind is Kind.ALLOCATE}
    for event in log.events:
        if event.kind is Kind.FREE:
            del sizes[event.number]
    return sum(sizes.values())


def _works(events: Iterable[Event]) -> list[Work]:
    return [event.work for event in events if event.work is not None]


def _products(setup: TrainSetup) -> list[tuple[int, ...]]:
    works = _works(SimulatedSteps(SHAPE, setup, CUDA).step().last_step())
    return [work.dims for work in works if work.name == "aten::mm nt"]  # forward's


def _again(setup: TrainSetup) -> list[tuple[int, ...]]:
    """The products that are computed a second time."""
    found = _products(setup)
    for one in _products(_setup()):
        found.remove(one)
    return sorted(found)


SELECTIVE = _setup("selective")
EVERY_SECOND = _setup("selective", "every-second-product")


def test_every_second_product_is_computed_again() -> None:
    """wk, wo and w3 of wq, wk, wv, wo, w1, w3 and w2, in each of two blocks."""
    assert len(_products(SELECTIVE)) == 2 * 7 + 1
    assert not _again(SELECTIVE)
    assert _again(EVERY_SECOND) == sorted([(TOKENS, 128, 256), (TOKENS, 256, 256), (TOKENS, 512, 256)] * 2)


def test_an_operator_that_is_saved_costs_its_output() -> None:
    # silu's is 2 F bytes a token and block.
    silu = _setup("selective", f"aten.silu,{','.join(SELECTIVE.policy.saved)}")
    kept, more = (memory_of(SHAPE, setup, CUDA) for setup in (SELECTIVE, silu))
    assert more.peak_allocated_bytes - kept.peak_allocated_bytes == 2 * TOKENS * 512 * 2


def test_every_second_block_recomputes_all_products_but_its_last() -> None:
    full, second = _again(_setup("full")), _again(_setup("full", "every-2-blocks"))
    assert len(full) == 2 * 6
    assert sorted(second * 2) == full
