"""Bytes that operators move, and their products. Expected values are counted by hand from shapes."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_bench.plan.rehearsed_time.operator_work import work_of_host, work_of_operator
from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.subprocesses.issued import HostOperator, IssuedOperator
from tests.plan.rehearsed_time.steps import BF16, FP32, INT64, StepWriter


def work(writer: StepWriter) -> Work | None:
    step = writer.read()
    (event,) = step.events
    assert isinstance(event, IssuedOperator)
    return work_of_operator(event, step.tensors)


def test_a_linear_layer_is_a_product_with_a_transposed_weight(step: StepWriter) -> None:
    x, out = step.tensor(512, 64), step.tensor(512, 128)
    weight = step.tensor(64, 128, strides=(1, 64))
    step.operator("aten::mm", (out,), self=(x,), mat2=(weight,))
    assert work(step) == Work("aten::mm nt", 2 * (512 * 64 + 64 * 128 + 512 * 128), (512, 128, 64), 2)


def test_a_product_with_a_bias_is_a_product(step: StepWriter) -> None:
    bias, x, weight, out = step.tensor(128), step.tensor(512, 64), step.tensor(64, 128), step.tensor(512, 128)
    step.operator("aten::addmm", (out,), self=(bias,), mat1=(x,), mat2=(weight,))
    found = work(step)
    assert (found.name, found.dims) == ("aten::mm nn", (512, 128, 64))


def test_several_products_are_one_with_more_rows(step: StepWriter) -> None:
    step.operator("aten::bmm", (step.tensor(4, 8, 16),), self=(step.tensor(4, 8, 32),), mat2=(step.tensor(4, 32, 16),))
    found = work(step)
    assert found.dims == (32, 16, 32)


@pytest.mark.parametrize(("given", "is_causal"), [(True, 1), (False, 0), (None, 0)])
def test_attention_has_its_heads_its_lengths_and_whether_it_is_causal(
    step: StepWriter, given: bool | None, is_causal: int
) -> None:
    q, out = step.tensor(2, 8, 128, 64), step.tensor(2, 8, 128, 64)
    k, v = step.tensor(2, 2, 256, 64), step.tensor(2, 2, 256, 64)
    more: dict[str, Any] = {} if given is None else {"is_causal": given}
    name = "aten::_scaled_dot_product_flash_attention"
    step.operator(name, (out,), query=(q,), key=(k,), value=(v,), **more)
    found = work(step)
    # batch, heads, key-value heads, length, head size, keys, causal: simulate/recorded/bind.py, work_of
    assert (found.name, found.dims) == ("aten::scaled_dot_product_attention", (2, 8, 4, 128, 64, 256, is_causal))


def test_an_elementwise_operator_moves_its_arguments_and_its_result(step: StepWriter) -> None:
    x, y = step.tensor(10, dtype=FP32), step.tensor(10, dtype=BF16)
    step.operator("aten::add", (step.tensor(10, dtype=FP32),), self=(x,), other=(y,))
    assert work(step) == Work("aten::add", 40 + 20 + 40, (), 4)


def test_an_operand_changed_in_place_is_read_and_written(step: StepWriter) -> None:
    x = step.tensor(10, dtype=FP32)
    step.operator("aten::mul_", written=("self",), self=(x,), other=(x,))
    assert work(step) == Work("aten::mul_", 3 * 40, (), 4)


def test_an_overwritten_operand_is_not_read(step: StepWriter) -> None:
    x, y = step.tensor(10, dtype=FP32), step.tensor(10, dtype=BF16)
    step.operator("aten::copy_", written=("self",), self=(x,), src=(y,))
    assert work(step) == Work("aten::copy_", 40 + 20, (), 4)


def test_a_tensor_made_from_anothers_shape_does_not_read_it(step: StepWriter) -> None:
    x, zeros = step.tensor(1000, dtype=FP32), step.tensor(10, dtype=FP32)
    step.operator("aten::new_zeros", (zeros,), self=(x,))
    assert work(step) == Work("aten::new_zeros", 40, (), 4)


def test_an_out_argument_is_written_alone(step: StepWriter) -> None:
    x, out = step.tensor(10), step.tensor(10)
    step.operator("aten::neg", outputs=("out",), self=(x,), out=(out,))
    assert work(step) == Work("aten::neg", 40, (), 2)


def test_an_expanded_tensor_is_read_once(step: StepWriter) -> None:
    step.operator("aten::clone", (step.tensor(4, 10),), self=(step.tensor(4, 10, strides=(0, 1)),))
    assert work(step) == Work("aten::clone", 20 + 80, (), 2)


def test_an_embedding_reads_only_the_rows_that_it_looks_up(step: StepWriter) -> None:
    weight, indices, out = step.tensor(1000, 16), step.tensor(4, dtype=INT64), step.tensor(4, 16)
    step.operator("aten::embedding", (out,), weight=(weight,), indices=(indices,))
    assert work(step) == Work("aten::embedding", 2 * (4 * 16 * 2) + 4 * 8, (), 2)


def test_a_fused_optimizer_reads_gradients_and_changes_parameters_and_moments(step: StepWriter) -> None:
    """Seven times the elements, as predict counts: simulate/optimizers/dispatch.py, _PASSES."""
    of = (step.tensor(100, dtype=FP32), step.tensor(50, dtype=FP32))
    names = ("self", "grads", "exp_avgs", "exp_avg_sqs")
    step.operator("aten::_fused_adamw_", written=names, **dict.fromkeys(names, of))
    assert work(step) == Work("aten::_fused_adamw_", 7 * 150 * 4, (), 4)


def test_an_optimizer_of_separate_operators_moves_what_predict_counts() -> None:
    """Twenty-one times the elements: simulate/optimizers/dispatch.py, _PASSES."""
    step, total = StepWriter(), 0
    x = (step.tensor(100, dtype=FP32),)
    for name, others in (
        ("mul_", 0),
        ("lerp_", 1),
        ("mul_", 0),
        ("addcmul_", 2),
        ("div_", 0),
        ("add_", 0),
        ("addcdiv_", 2),
    ):
        more = {f"tensor{place}": x for place in range(others)}
        step.operator(f"aten::_foreach_{name}", written=("self",), self=x, **more)
    step.operator("aten::_foreach_sqrt", x, self=x)
    read = step.read()
    for event in read.events:
        assert isinstance(event, IssuedOperator)
        found = work_of_operator(event, read.tensors)
        total += found.num_bytes
    assert total == 21 * 100 * 4


def test_copies_of_the_host_are_no_bytes_of_the_gpu(step: StepWriter) -> None:
    step.operator("aten::_to_copy", (step.tensor(10),), self=(step.tensor(10, dtype=FP32, device="cpu"),))
    assert work(step) == Work("aten::_to_copy", 20, (), 4)


@pytest.mark.parametrize(
    "name", ["mylib::kernel", "flash_attn::_flash_attn_forward", "aten::_flash_attention_forward",
             "aten::linalg_qr", "aten::_scaled_mm", "aten::convolution_backward", "higher_order::flex_attention"],
)  # fmt: skip
def test_operators_that_are_not_bound_by_memory_are_unknown(step: StepWriter, name: str) -> None:
    step.operator(name, (step.tensor(10),), self=(step.tensor(10),))
    assert work(step) is None


@pytest.mark.parametrize("name", ["aten::_foreach_sqrt", "aten::linalg_vector_norm", "fsdp::chunk_cat", "aten::sum"])
def test_operators_that_are_bound_by_memory_are_known(step: StepWriter, name: str) -> None:
    step.operator(name, (step.tensor(10),), self=(step.tensor(10),))
    assert work(step) == Work(name, 40, (), 2)


@pytest.mark.parametrize("dtype", [("float64", 8), ("float8_e4m3fn", 1), ("int8", 1)])
def test_products_of_dtypes_without_a_documented_peak_are_unknown(step: StepWriter, dtype: tuple[str, int]) -> None:
    step.product(16, 16, 16, dtype)
    assert work(step) is None


def test_an_optimizer_in_host_memory_is_the_hosts_work(step: StepWriter) -> None:
    x = (step.tensor(1 << 20, dtype=FP32, device="cpu"),)
    step.operator("aten::add_", kind="host", written=("self",), self=x, other=x)
    step.product(8, 8, 8)
    read = step.read()
    assert isinstance(read.events[0], HostOperator)
    assert work_of_host(read.events[0], read.tensors) == Work("optimizer aten::add_", 3 * 4 << 20)


def test_a_sort_is_known_where_it_is_small() -> None:
    """A mixture of experts sorts a few thousand numbers; what a sort of millions takes nobody documents."""
    for count, is_known in ((1000, True), (1 << 20, False)):
        step = StepWriter()
        step.operator("aten::sort", (step.tensor(count), step.tensor(count, dtype=INT64)), self=(step.tensor(count),))
        assert (work(step) is not None) == is_known


@pytest.mark.parametrize("ending", ["", "_backward"])
def test_memory_efficient_attention_has_a_name_of_its_own(step: StepWriter, ending: str) -> None:
    """It is slower than the kernel that torch takes without a mask."""
    q, k, v, out = (step.tensor(2, 8, 128, 64) for _ in range(4))
    step.operator(f"aten::_scaled_dot_product_efficient_attention{ending}", (out,), query=(q,), key=(k,), value=(v,))
    found = work(step)
    assert (found.is_attention, found.is_efficient_attention, found.is_backward) == (True, True, bool(ending))
