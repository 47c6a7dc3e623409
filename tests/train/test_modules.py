"""The modules have the parameters and the FLOPs that spec/model.py says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fsdp_bench.spec.ladder import rung
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.train.transformer import build, initialize


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    family = draw(st.sampled_from(list(Family)))
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 3)) if family is Family.LLAMA else kv_heads
    return ModelShape(
        name="drawn",
        family=family,
        num_hidden_layers=draw(st.integers(1, 3)),
        hidden_size=heads * 2 * draw(st.integers(1, 9)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=draw(st.integers(1, 300)),
        vocab_size=draw(st.integers(2, 999)),
        max_position_embeddings=draw(st.integers(8, 99)),
        tie_word_embeddings=draw(st.booleans()),
    )


@given(shapes())
@settings(deadline=None, max_examples=60)
def test_counts_equal_those_of_the_modules_on_the_meta_device(shape: ModelShape) -> None:
    model = build(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_parameters
    assert sum(p.numel() for p in model.blocks[0].parameters()) == shape.num_block_parameters
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())


@pytest.mark.parametrize(
    ("family", "count"), [(Family.LLAMA, 7 * 10**9), (Family.GPT2, 1_500_000_000), (Family.LLAMA, 405 * 10**9)]
)
def test_large_rungs_are_what_they_say_too(family: Family, count: int) -> None:
    shape = rung(family, count)
    assert sum(parameter.numel() for parameter in build(shape).parameters()) == shape.num_parameters


@given(shapes(), st.integers(1, 8), st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_forward_flops_equal_torchs_own_count(shape: ModelShape, sequence: int, batch: int) -> None:
    """FlopCounterMode counts attention without the causal mask, and every matrix product."""
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    counter = FlopCounterMode(display=False)
    with counter:
        build(shape)(tokens)
    assert counter.get_total_flops() == pytest.approx(
        batch * sequence * shape.forward_flops_per_token(sequence, causal=False)
    )


@given(shapes())
@settings(deadline=None, max_examples=10)
def test_a_parameters_values_depend_on_its_name_and_the_seed_alone(shape: ModelShape) -> None:
    model = build(shape).to_empty(device="cpu")
    for name, parameter in reversed(list(model.named_parameters())):
        initialize(parameter, name, seed=3)
        again, other = torch.empty_like(parameter), torch.empty_like(parameter)
        initialize(again, name, seed=3)
        initialize(other, name, seed=4)
        assert torch.equal(parameter, again)
        assert parameter.ndim == 1 or not torch.equal(parameter, other)


def test_a_llama_is_causal_and_knows_positions() -> None:
    shape = ModelShape(
        name="x",
        family=Family.LLAMA,
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=50,
        max_position_embeddings=16,
    )
    model = build(shape).to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        initialize(parameter, name, seed=0)
    tokens = torch.randint(50, (1, 8), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 50
    torch.testing.assert_close(model(tokens)[:, :-1], model(changed)[:, :-1])
    swapped = tokens[:, [1, 0, *range(2, 8)]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])
