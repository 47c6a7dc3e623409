"""FLOPs against hand-made sums; the size ladder. Parameters are counted in tests/catalog and tests/train."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.catalog.ladder import LARGEST, SMALLEST, all_sizes, nearest_size
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import TrainSetup
from tests.conftest import message_of
from tests.shapes import shape

FIELDS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def llama(*sizes: int, vocab: int) -> ModelShape:
    return shape(**dict(zip(FIELDS, sizes, strict=True)), vocab_size=vocab, max_position_embeddings=4096)


def test_flops_of_a_model_small_enough_to_count_by_hand() -> None:
    # One layer, hidden 4, 2 heads, 1 key-value head of width 2, feed-forward 8, vocabulary 10, sequence 3.
    shape = llama(1, 4, 2, 1, 8, vocab=10)
    matrices = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 8  # q, k, v, o; gate, up, down
    scores_and_values = 2 * (1 + 2 + 3) / 3 * 4  # two products of hidden width with 1, 2 and 3 visible keys
    forward = 2 * (matrices + scores_and_values + 4 * 10)
    assert shape.forward_flops_per_token(3) == pytest.approx(forward)
    assert shape.model_flops_per_token(3) == pytest.approx(3 * forward)
    not_causal = 2 * (matrices + 2 * 3 * 4 + 4 * 10)
    assert shape.forward_flops_per_token(3, causal=False) == pytest.approx(not_causal)
    recomputed = 2 * (matrices - 4 * 8 + scores_and_values)  # all but the down projection
    full, selective = (TrainSetup(sequence_length=3, checkpointing=each) for each in ("full", "selective"))
    assert shape.hardware_flops_per_token(full) == pytest.approx(3 * forward + recomputed)
    assert shape.hardware_flops_per_token(selective) == shape.model_flops_per_token(3)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_size": 0}, ["hidden_size", "0", "1 or more"]),
        ({"num_attention_heads": 3}, ["hidden_size", "num_attention_heads 3"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
    ],
)
def test_dimensions_that_do_not_fit_name_the_field_and_the_value(changes: dict[str, int], parts: list[str]) -> None:
    message = message_of(lambda: shape(**changes))
    assert all(part in message for part in parts)


@pytest.mark.parametrize("family", list(Family))
def test_the_ladder_rises_by_at_most_one_layer_a_rung_from_10m_to_1t(family: Family) -> None:
    ladder = all_sizes(family)
    counts = [shape.num_parameters for shape in ladder]
    assert counts == sorted(set(counts))
    assert counts[0] <= SMALLEST
    assert counts[-1] <= LARGEST
    assert nearest_size(family, LARGEST) == ladder[-1]
    for lower, upper in pairwise(ladder):
        same_width = lower.hidden_size == upper.hidden_size
        assert upper.num_hidden_layers == lower.num_hidden_layers + 1 if same_width else True
        one_head_wider = upper.num_attention_heads == lower.num_attention_heads + 1
        assert same_width or one_head_wider


@given(st.sampled_from(list(Family)), st.integers(SMALLEST, LARGEST))
def test_a_rung_is_the_nearest_of_all(family: Family, wanted: int) -> None:
    chosen = nearest_size(family, wanted)
    assert abs(chosen.num_parameters - wanted) == min(abs(s.num_parameters - wanted) for s in all_sizes(family))


@given(st.sampled_from(list(Family)), st.integers(SMALLEST, LARGEST // 2))
def test_a_rung_is_within_one_layer_of_what_was_asked(family: Family, wanted: int) -> None:
    chosen = nearest_size(family, wanted)
    first = all_sizes(family)[0]
    if wanted >= first.num_parameters:
        assert abs(chosen.num_parameters - wanted) <= chosen.num_block_parameters


def test_7b_is_always_the_same_shape() -> None:
    shape = nearest_size(Family.LLAMA, 7 * 10**9)
    assert (shape.num_hidden_layers, shape.hidden_size, shape.num_attention_heads) == (33, 4096, 32)
    assert shape.intermediate_size == 11008  # Llama-2-7B's


@pytest.mark.parametrize("count", [SMALLEST - 1, LARGEST + 1])
def test_sizes_off_the_ladder_are_refused(count: int) -> None:
    with pytest.raises(SpecError, match="10M to 1T"):
        nearest_size(Family.LLAMA, count)
