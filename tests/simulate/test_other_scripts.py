"""What other training scripts do otherwise: their cross-entropy, and their policy of selective checkpointing.

Expected sizes are worked out from shapes: T tokens, V vocabulary, D hidden, K keys and values, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from fsdp_bench.plan.estimate import predict_memory
from fsdp_bench.simulate.events import Event, Work
from fsdp_bench.simulate.operators.kernels import CUDA, CrossEntropy, Kernels
from fsdp_bench.simulate.step import steady_step
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import Checkpointing, Precision, ShardingStrategy, TrainSetup

SHAPE = ModelShape(
    name="wide head",
    family=Family.LLAMA,
    num_hidden_layers=2,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
    vocab_size=32000,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)
TOKENS = 2 * 1024
LOGITS = TOKENS * 32000


def _setup(checkpointing: Checkpointing = Checkpointing.NONE) -> TrainSetup:
    return TrainSetup(
        strategy=ShardingStrategy.FULL_SHARD,
        precision=Precision.parse("bf16-mixed"),
        checkpointing=checkpointing,
        world_size=8,
        micro_batch_size=2,
        sequence_length=1024,
    )


@pytest.mark.parametrize(
    ("which", "bytes_a_logit"),
    [
        # fp32 logarithms, their gradient, and the gradient of the cast's result
        (CrossEntropy.FP32_LOGITS, 4 + 4 + 4),
        # the same three in bf16
        (CrossEntropy.SAME_DTYPE, 2 + 2 + 2),
        # the logits and their gradient in bf16
        (CrossEntropy.FLASH_ATTN, 2 + 2),
    ],
)
def test_logits_at_the_peak_are_those_of_the_scripts_cross_entropy(which: CrossEntropy, bytes_a_logit: int) -> None:
    found = predict_memory(SHAPE, _setup(), replace(CUDA, cross_entropy=which))
    logits = found.breakdown_bytes["logits"]
    assert logits == pytest.approx(bytes_a_logit * LOGITS, rel=0.001)  # and vectors of one number a token


def test_the_fused_loss_reads_the_logits_twice_and_writes_their_gradient() -> None:
    kernels = replace(CUDA, cross_entropy=CrossEntropy.FLASH_ATTN)
    sent = {work.name: work.num_bytes for work in _works(steady_step(SHAPE, _setup(), kernels).last_step())}
    # bf16 logits, targets in int64, losses and sums of rows in fp32
    assert sent["xentropy_cuda_lib::forward"] == 2 * LOGITS + (8 + 4 + 4) * TOKENS
    assert sent["xentropy_cuda_lib::backward"] == 2 * LOGITS + 2 * LOGITS + 4 * TOKENS
    assert not [name for name in sent if "softmax" in name or "nll" in name]


def _works(events: Iterable[Event]) -> list[Work]:
    return [event.work for event in events if event.work is not None]


def _products(kernels: Kernels, checkpointing: Checkpointing) -> list[tuple[int, ...]]:
    works = _works(steady_step(SHAPE, _setup(checkpointing), kernels).last_step())
    return [work.dims for work in works if work.name == "aten::mm nt"]  # forward's


def test_every_second_product_is_computed_again() -> None:
    """Of wq, wk, wv, wo, w1, w3, w2 these are wk, wo and w3, in each of two blocks."""
    again = replace(CUDA, recomputes_every_second_product=True)
    kept = _products(CUDA, Checkpointing.SELECTIVE)
    assert len(kept) == 2 * 7 + 1
    found = _products(again, Checkpointing.SELECTIVE)
    for one in kept:
        found.remove(one)
    assert sorted(found) == sorted([(TOKENS, 128, 256), (TOKENS, 256, 256), (TOKENS, 512, 256)] * 2)


def test_products_that_are_computed_again_are_not_kept() -> None:
    # 2 (K + D + F) bytes a token and block less where forward has ended, at the loss.
    again = replace(CUDA, recomputes_every_second_product=True)
    kept = predict_memory(SHAPE, _setup(Checkpointing.SELECTIVE), CUDA)
    less = predict_memory(SHAPE, _setup(Checkpointing.SELECTIVE), again)
    assert kept.peak_operator == less.peak_operator == "aten::_log_softmax_backward_data"
    assert kept.peak_allocated_bytes - less.peak_allocated_bytes == 2 * TOKENS * (128 + 256 + 512) * 2


def test_other_kinds_of_checkpointing_know_no_policy() -> None:
    again = replace(CUDA, recomputes_every_second_product=True)
    for kind in (Checkpointing.NONE, Checkpointing.FULL):
        assert _products(again, kind) == _products(CUDA, kind)
        assert predict_memory(SHAPE, _setup(kind), again) == predict_memory(SHAPE, _setup(kind), CUDA)
