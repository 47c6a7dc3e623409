"""Bytes that operators and Triton's kernels move, and products. Expected values are counted by hand from shapes."""

from typing import Any

import pytest

from fsdp_bench.plan.rehearsed_time.events import work_of_kernel
from fsdp_bench.plan.rehearsed_time.operator_work import work_of_host, work_of_operator
from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.subprocesses.issued import HostOperator
from tests.plan.rehearsed_time.conftest import FP32, INT64, StepWriter

ADAMW = ("self", "grads", "exp_avgs", "exp_avg_sqs")


def work(writer: StepWriter) -> Work | None:
    step = writer.read()
    (event,) = step.events
    return work_of_operator(event, step.tensors)


def bf16(*shape: int, **more: Any) -> tuple[Any, ...]:
    return shape, more


def fp32(*shape: int, **more: Any) -> tuple[Any, ...]:
    return shape, {"dtype": FP32, **more}


WORK: dict[str, tuple[str, dict[str, Any], dict[str, Any], Work]] = {
    "a linear layer is a product with a transposed weight": (
        "aten::mm",
        {"": bf16(512, 128), "self": bf16(512, 64), "mat2": bf16(64, 128, strides=(1, 64))}, {},
        Work("aten::mm nt", 2 * (512 * 64 + 64 * 128 + 512 * 128), (512, 128, 64), 2),
    ),
    "a product with a bias is a product": (
        "aten::addmm",
        {"": bf16(512, 128), "self": bf16(128), "mat1": bf16(512, 64), "mat2": bf16(64, 128)}, {},
        Work("aten::mm nn", 2 * (128 + 512 * 64 + 64 * 128 + 512 * 128), (512, 128, 64), 2),
    ),
    "several products are one with more rows": (
        "aten::bmm",
        {"": bf16(4, 8, 16), "self": bf16(4, 8, 32), "mat2": bf16(4, 32, 16)}, {},
        Work("aten::mm nn", 2 * 4 * (8 * 32 + 32 * 16 + 8 * 16), (32, 16, 32), 2),
    ),
    "an elementwise operator moves its arguments and its result": (
        "aten::add",
        {"": fp32(10), "self": fp32(10), "other": bf16(10)}, {}, Work("aten::add", 40 + 20 + 40, (), 4),
    ),
    "an operand changed in place is read and written": (
        "aten::mul_",
        {"self": fp32(10), "other": fp32(10)}, {"written": ("self",)}, Work("aten::mul_", 3 * 40, (), 4),
    ),
    "an overwritten operand is not read": (
        "aten::copy_",
        {"self": fp32(10), "src": bf16(10)}, {"written": ("self",)},
        Work("aten::copy_", 40 + 20, (), 4, path="casting", elements=10),
    ),
    "a tensor made from another's shape does not read it": (
        "aten::new_zeros",
        {"": fp32(10), "self": fp32(1000)}, {}, Work("aten::new_zeros", 40, (), 4),
    ),
    "an out argument is written alone": (
        "aten::neg",
        {"self": bf16(10), "out": bf16(10)}, {"outputs": ("out",)}, Work("aten::neg", 40, (), 2),
    ),
    "an expanded tensor is read once": (
        "aten::clone",
        {"": bf16(4, 10), "self": bf16(4, 10, strides=(0, 1))}, {},
        Work("aten::clone", 20 + 80, (), 2, path="strided", elements=40),
    ),
    "an embedding reads only the rows that it looks up": (
        "aten::embedding",
        {"": bf16(4, 16), "weight": bf16(1000, 16), "indices": bf16(4, dtype=INT64)}, {},
        Work("aten::embedding", 2 * (4 * 16 * 2) + 4 * 8, (), 2),
    ),
    # seven times the elements, as predict counts: simulate/optimizers/dispatch.py, _PASSES
    "a fused optimizer reads gradients and changes parameters and moments": (
        "aten::_fused_adamw_",
        dict.fromkeys(ADAMW, fp32(150)), {"written": ADAMW}, Work("aten::_fused_adamw_", 7 * 150 * 4, (), 4),
    ),
    "copies of the host are no bytes of the GPU": (
        "aten::_to_copy",
        {"": bf16(10), "self": fp32(10, device="cpu")}, {}, Work("aten::_to_copy", 20, (), 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "tensors", "more", "expected"), WORK.values(), ids=WORK.keys())
def test_an_operator_moves_and_computes_what_its_shapes_say(
    step: StepWriter, name: str, tensors: dict[str, Any], more: dict[str, Any], expected: Work
) -> None:
    """The tensor without a name is the result."""
    numbers = {key: (step.tensor(*shape, **given),) for key, (shape, given) in tensors.items()}
    step.operator(name, numbers.pop("", ()), **more, **numbers)
    assert work(step) == expected


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


def test_an_optimizer_of_separate_operators_moves_what_predict_counts(step: StepWriter) -> None:
    """Twenty-one times the elements: simulate/optimizers/dispatch.py, _PASSES."""
    x = (step.tensor(100, dtype=FP32),)
    names = {"mul_": 0, "lerp_": 1, "mul_ ": 0, "addcmul_": 2, "div_": 0, "add_": 0, "addcdiv_": 2}
    for name, others in names.items():
        more = {f"tensor{place}": x for place in range(others)}
        step.operator(f"aten::_foreach_{name.strip()}", written=("self",), self=x, **more)
    step.operator("aten::_foreach_sqrt", x, self=x)
    read = step.read()
    assert sum(work_of_operator(event, read.tensors).num_bytes for event in read.events) == 21 * 100 * 4


NOT_BOUND_BY_MEMORY = (
    *("mylib::kernel", "flash_attn::_flash_attn_forward", "aten::_flash_attention_forward", "aten::linalg_qr"),
    *("aten::_scaled_mm", "aten::convolution_backward", "higher_order::flex_attention"),
)
BOUND_BY_MEMORY = ("aten::_foreach_sqrt", "aten::linalg_vector_norm", "fsdp::chunk_cat", "aten::sum")


@pytest.mark.parametrize("name", [*NOT_BOUND_BY_MEMORY, *BOUND_BY_MEMORY])
def test_operators_that_are_not_bound_by_memory_are_unknown(step: StepWriter, name: str) -> None:
    step.operator(name, (step.tensor(10),), self=(step.tensor(10),))
    assert work(step) == (Work(name, 40, (), 2) if name in BOUND_BY_MEMORY else None)


@pytest.mark.parametrize(
    ("rows", "is_fast", "layout"), [(1, False, "nt"), (1, True, "nt-fast"), (16, True, "nt-fast-rows")]
)
def test_a_product_in_float8_says_how_it_accumulates_and_scales(
    step: StepWriter, rows: int, is_fast: bool, layout: str
) -> None:
    factor, scale = ("float8_e4m3fn", 1), step.tensor(rows, 1, dtype=FP32)
    a, b = step.tensor(16, 64, dtype=factor), step.tensor(64, 32, strides=(1, 64), dtype=factor)
    given = {"self": (a,), "mat2": (b,), "scale_a": (scale,), "scale_b": (scale,), "use_fast_accum": is_fast}
    step.operator("aten::_scaled_mm", (step.tensor(16, 32),), **given)
    found = work(step)
    assert (found.name, found.dims, found.itemsize) == (f"aten::mm {layout}", (16, 32, 64), 1)


PATHS: dict[str, tuple[str, dict[str, Any], tuple[str, int]]] = {
    "tensors that lie alike": ("aten::mul", {"": bf16(4, 8), "self": bf16(4, 8), "other": bf16(4, 8)}, ("", 0)),
    "heads that lie token by token alike": (
        "aten::add",
        dict.fromkeys(("", "self", "other"), bf16(2, 4, 8, 16, strides=(512, 16, 64, 1))), ("", 0),
    ),
    "a row that is broadcast": ("aten::mul", {"": bf16(4, 8), "self": bf16(4, 8), "other": bf16(8)}, ("strided", 32)),
    "a half of each row": ("aten::neg", {"": bf16(4, 8), "self": bf16(4, 8, strides=(16, 1))}, ("strided", 32)),
    "two dtypes": ("aten::mul", {"": fp32(4, 8), "self": bf16(4, 8), "other": fp32(4, 8)}, ("casting", 32)),
    "both": ("aten::mul", {"": fp32(4, 8), "self": bf16(4, 8), "other": fp32(8)}, ("strided casting", 32)),
    "a copy to float32": ("aten::_to_copy", {"": fp32(4, 8), "self": bf16(4, 8)}, ("casting", 32)),
    "a copy to 16 bits": ("aten::_to_copy", {"": bf16(4, 8), "self": fp32(4, 8)}, ("", 0)),
    "a comparison": ("aten::lt", {"": bf16(8, dtype=("bool", 1)), "self": bf16(8), "other": bf16(8)}, ("", 0)),
    "whole rows one after another": ("aten::cat", {"": bf16(8, 8), "tensors": bf16(4, 8)}, ("", 0)),
    "halves of rows": ("aten::cat", {"": bf16(4, 16), "tensors": bf16(4, 8, strides=(16, 1))}, ("strided", 64)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "tensors", "expected"), PATHS.values(), ids=PATHS.keys())
def test_a_pointwise_kernel_reads_vectors_where_all_its_tensors_lie_alike(
    step: StepWriter, name: str, tensors: dict[str, Any], expected: tuple[str, int]
) -> None:
    """CUDALoops.cuh, gpu_kernel_impl; Shape.cu, CatArrayBatchedCopy; kernels' names on an H100 agree."""
    numbers = {key: (step.tensor(*shape, **given),) for key, (shape, given) in tensors.items()}
    step.operator(name, numbers.pop("", ()), is_pointwise=True, **numbers)
    found = work(step)
    assert (found.path, found.elements) == expected


@pytest.mark.parametrize("dtype", [("float64", 8), ("float8_e4m3fn", 1), ("int8", 1)])
def test_products_of_dtypes_without_a_documented_peak_are_unknown(step: StepWriter, dtype: tuple[str, int]) -> None:
    step.product(16, 16, 16, dtype)
    assert work(step) is None


@pytest.mark.parametrize(("count", "is_known"), [(1000, True), (1 << 20, False)])
def test_a_sort_is_known_where_it_is_small(step: StepWriter, count: int, is_known: bool) -> None:
    """A mixture of experts sorts a few thousand numbers; what a sort of millions takes nobody documents."""
    step.operator("aten::sort", (step.tensor(count), step.tensor(count, dtype=INT64)), self=(step.tensor(count),))
    assert (work(step) is not None) == is_known


def test_an_optimizer_in_host_memory_is_the_hosts_work(step: StepWriter) -> None:
    x = (step.tensor(1 << 20, dtype=FP32, device="cpu"),)
    step.operator("aten::add_", kind="host", written=("self",), self=x, other=x)
    step.product(8, 8, 8)
    read = step.read()
    assert isinstance(read.events[0], HostOperator)
    assert work_of_host(read.events[0], read.tensors) == Work("optimizer aten::add_", 3 * 4 << 20)


@pytest.mark.parametrize("ending", ["", "_backward"])
def test_memory_efficient_attention_has_a_name_of_its_own(step: StepWriter, ending: str) -> None:
    """It is slower than the kernel that torch takes without a mask."""
    q, k, v, out = (step.tensor(2, 8, 128, 64) for _ in range(4))
    step.operator(f"aten::_scaled_dot_product_efficient_attention{ending}", (out,), query=(q,), key=(k,), value=(v,))
    found = work(step)
    assert (found.is_attention, found.is_efficient_attention, found.is_backward) == (True, True, bool(ending))


# -- bytes that Triton's kernels move ----------------------------------------------------------------------------------


def kernel(step: StepWriter, name: str = "triton_poi_fused_add_0", **more: Any) -> Work | None:
    fields = {"changed": (), "sizes": (1024,), "is_inductors": True, "module": "", "stream": 0} | more
    step.add("triton", name=name, **fields)
    read = step.read()
    (event,) = read.events
    return work_of_kernel(event, read.tensors)


def test_inputs_are_read_outputs_written_and_both_of_what_changes_in_place(step: StepWriter) -> None:
    arguments = step.tensor(1000), step.tensor(1000, dtype=FP32), step.tensor(1000, dtype=FP32), None
    names = ("in_ptr0", "out_ptr0", "in_out_ptr0", "xnumel")
    found = kernel(step, names=names, arguments=arguments, changed=("in_out_ptr0",))
    assert found == Work("triton_poi_fused_add_0", 2000 + 4000 + 2 * 4000, (), 2)


def test_no_more_of_an_input_is_read_than_the_kernel_has_points(step: StepWriter) -> None:
    """An embedding's weight: of a million elements a kernel of 1024 points reads 1024."""
    found = kernel(step, names=("in_ptr0", "out_ptr0"), arguments=(step.tensor(10**6), step.tensor(1024)))
    assert found.num_bytes == 2048 + 2048


def test_kernels_of_liger_and_trl_are_known_by_name_and_module_and_others_and_templates_are_not() -> None:
    """Liger reads every logit twice and overwrites it with its gradient; TRL after it has read it again."""
    for module, name, expected in (
        ("liger_kernel.ops.cross_entropy", "liger_cross_entropy_kernel", 3 * 2000 + 80),
        ("trl.kernels.chunked_logprob", "_forward_kernel", 2000 + 80),
        ("trl.kernels.chunked_logprob", "_backward_kernel", 2 * 2000 + 80),
        ("liger_kernel.ops.cross_entropy", "_forward_kernel", None),
        ("mine", "liger_cross_entropy_kernel", None),
        ("", "triton_tem_fused_mm_0", None),
        ("", "_flash_kernel", None),
    ):
        step, logits = StepWriter(), "X_ptr" if "liger" in name else "mm_ptr"
        names, arguments = (logits, "stride", "targets"), (step.tensor(10, 100), None, step.tensor(10, dtype=INT64))
        found = kernel(step, name, names=names, arguments=arguments, is_inductors=not module, module=module, sizes=())
        assert (None if found is None else found.num_bytes) == expected
