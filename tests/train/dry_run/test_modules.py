"""The modules have the parameters and the FLOPs that spec/model.py says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fsdp_bench.spec.checkpointing_policy import read_policy
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import Checkpointing, Reentrant, TrainSetup
from fsdp_bench.train.models.transformer import build, initialize
from fsdp_bench.train.wrapping.activation_checkpointing import checkpoint_blocks
from tests.profiles import share_of_examples
from tests.shapes import shape as small


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
@share_of_examples(5)
def test_counts_equal_those_of_the_modules_on_the_meta_device(shape: ModelShape) -> None:
    model = build(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_parameters
    assert sum(p.numel() for p in model.blocks[0].parameters()) == shape.num_block_parameters
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())


@given(shapes(), st.integers(1, 8), st.integers(1, 3))
@share_of_examples(5)
def test_forward_flops_equal_torchs_own_count(shape: ModelShape, sequence: int, batch: int) -> None:
    """FlopCounterMode counts attention without the causal mask, and every matrix product."""
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    counter = FlopCounterMode(display=False)
    with counter:
        build(shape)(tokens)
    assert counter.get_total_flops() == pytest.approx(
        batch * sequence * shape.forward_flops_per_token(sequence, causal=False)
    )


_SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 50}
SMALL = {
    Family.LLAMA: small(**_SIZES, num_key_value_heads=2, intermediate_size=48),
    Family.GPT2: small(**_SIZES, family=Family.GPT2, tie_word_embeddings=True),
}


def initialized(shape: ModelShape) -> torch.nn.Module:
    """Return the model with real parameters."""
    model = build(shape).to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        initialize(parameter, name, seed=0)
    return model


def flops_of_a_step(shape: ModelShape, checkpointing: Checkpointing, policy: str | None, reentrant: Reentrant) -> int:
    """Return what FlopCounterMode counts in forward and backward of a real model, 3 sequences of 10 tokens.

    Attention is run by its unfused kernel, whose two products FlopCounterMode counts in every pass; it does not know
    the CPU's fused kernel. It counts the products whole, 4 x sequence x hidden_size a token and layer: the causal
    half, which spec/model.py takes by default, is what fused kernels skip.
    """
    model = initialized(shape)
    checkpoint_blocks(model, list(model.blocks), checkpointing, read_policy(policy), reentrant)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        model(torch.zeros(3, 10, dtype=torch.long)).sum().backward()
    return counter.get_total_flops()


OF_OPERATORS = ("aten.mm", "aten.addmm,aten.silu")
"""Policies that do not save attention: its unfused kernel, which is counted here, is an aten.bmm."""


@pytest.mark.parametrize(
    ("checkpointing", "policy", "reentrant"),
    [
        *((kind, None, Reentrant.NO) for kind in Checkpointing),
        *((Checkpointing.SELECTIVE, policy, Reentrant.NO) for policy in OF_OPERATORS),
        (Checkpointing.FULL, "every-2-blocks", Reentrant.NO),
        (Checkpointing.FULL, None, Reentrant.INSIDE),
    ],
)
@pytest.mark.parametrize("family", list(Family))
def test_flops_of_a_whole_step_equal_torchs_own_count(
    family: Family, checkpointing: Checkpointing, policy: str | None, reentrant: Reentrant
) -> None:
    """Forward, backward, and what checkpointing recomputes: full, all of a block but its last product.

    Reentrant checkpointing recomputes whole blocks.
    """
    shape = SMALL[family]
    fields = {"checkpointing": checkpointing, "checkpointing_policy": policy, "reentrant": reentrant}
    setup = TrainSetup(sequence_length=10, **fields)
    expected = shape.hardware_flops_per_token(setup, causal=False)
    assert flops_of_a_step(shape, checkpointing, policy, reentrant) == 3 * 10 * expected
    if checkpointing is not Checkpointing.FULL and policy is None:
        assert shape.hardware_flops_per_token(setup) == shape.model_flops_per_token(10)


@given(shapes())
@share_of_examples(5)
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
    shape = SMALL[Family.LLAMA]
    model = initialized(shape)
    tokens = torch.randint(50, (1, 8), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 50
    torch.testing.assert_close(model(tokens)[:, :-1], model(changed)[:, :-1])
    swapped = tokens[:, [1, 0, *range(2, 8)]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])
