"""The reader of functions as Inductor of torch 2.13 writes them, and the formulas for what it wrote at a few sizes."""

import pytest

pytest.importorskip("torch")

from fractions import Fraction
from math import prod

from msgspec.structs import replace

from fsdp_bench.spec.recording.compiled import symbols_of_block
from fsdp_bench.spec.recording.formula import parse, to_text
from fsdp_bench.spec.recording.steps import Operator
from tools.compiled.formulas import merge, most_common
from tools.compiled.wrapper_code import Compiled, Dropped, Function, Made, Run, TritonKernel, UnknownCode, read_function

MODULE = """
def call(self, args):
    primals_1, primals_2 = args
    args.clear()
    assert_size_stride(primals_1, (4, 8), (8, 1), 'input')
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        primals_1 = copy_if_misaligned(primals_1)
        buf0 = empty_strided_cuda((4, 16), (16, 1), torch.bfloat16)
        extern_kernels.mm(primals_1, reinterpret_tensor(primals_2, (8, 16), (1, 8), 0), out=buf0)
        del primals_1
        buf1 = reinterpret_tensor(buf0, (2, 2, 16), (32, 16, 1), 0); del buf0  # reuse
        raw_stream0 = get_raw_stream(0)
        triton_poi_fused_silu_3.run(buf1, 64, stream=raw_stream0)
        buf2 = empty_strided_cuda((4, 16), (16, 1), torch.float32)
        triton_poi_fused_mul_4.run(buf1, buf2, 64, stream=raw_stream0)
        {statement}
        del buf1
    return (buf2, primals_2, None)

def get_args():
    primals_1 = rand_strided((4, 8), (8, 1), device='cuda:0', dtype=torch.bfloat16)
    primals_2 = rand_strided((16, 8), (8, 1), device='cuda:0', dtype=torch.bfloat16)
    return [primals_1, primals_2]
"""
SOURCES = """
triton_poi_fused_silu_3 = async_compile.triton('triton_poi_fused_silu_3', 'the source of silu', device_str='cuda')
triton_poi_fused_mul_4 = async_compile.triton('triton_poi_fused_mul_4', 'the source of mul', device_str='cuda')
"""


KERNELS = {
    "the source of silu": TritonKernel(changed=(0,), is_tuned=True),
    "the source of mul": TritonKernel(changed=(), is_tuned=False),
}
"""silu_3 changes its only argument in place; mul_4 has one configuration."""


def read(statement: str) -> Function:
    return read_function(SOURCES + MODULE.format(statement=statement), lambda name, source: KERNELS[source])


def test_a_buffer_that_is_reused_is_one_storage_until_its_last_name_is_deleted() -> None:
    function = read("")
    assert function.num_inputs == 2
    assert function.returns == [3, 1, None]
    assert [one.number for one in function.steps if isinstance(one, Dropped)] == [0, 2]
    assert isinstance(function.steps[-1], Dropped)
    made = [one.makes for one in function.steps if isinstance(one, Run) and one.makes]
    assert made == [(Made(2, 4 * 16 * 2),), (Made(3, 4 * 16 * 4),)]


def test_a_kernel_has_the_bytes_that_it_touches_and_a_product_its_sizes() -> None:
    function = read("")
    product, silu, mul = [one for one in function.steps if isinstance(one, Run) and not one.makes]
    assert (product.name, product.dims) == ("aten::mm nt", (4, 16, 8))
    assert (silu.name, sum(silu.touched_bytes)) == ("triton_poi_fused_silu", 128)
    assert (silu.changed, silu.changed_bytes, mul.changed_bytes) == ((0,), (128,), ())
    assert (mul.name, sum(mul.touched_bytes)) == ("triton_poi_fused_mul", 128 + 256)


def test_a_product_in_float8_has_the_sizes_of_its_factors_and_touches_their_scales() -> None:
    scaled = """buf3 = empty_strided_cuda((32, 16), (1, 32), torch.float8_e4m3fn)
        buf4 = empty_strided_cuda((64, 32), (32, 1), torch.float8_e5m2)
        buf5 = empty_strided_cuda((64, 1), (1, 1), torch.float32)
        buf6 = empty_strided_cuda((64, 16), (16, 1), torch.bfloat16)
        extern_kernels._scaled_mm(buf4, buf3, buf5, buf2, out_dtype=torch.bfloat16, use_fast_accum=True, out=buf6)"""
    product = [one for one in read(scaled).steps if isinstance(one, Run)][-1]
    assert (product.name, product.dims, product.itemsize) == ("aten::_scaled_mm nt-fast-rows", (64, 16, 32), 1)
    assert product.touched_bytes == (64 * 32, 32 * 16, 64 * 4, 4 * 16 * 4, 64 * 16 * 2)
    without = scaled.replace("use_fast_accum=True", "use_fast_accum=False").replace("(64, 1), (1, 1)", "(), ()")
    assert [one.name for one in read(without).steps if isinstance(one, Run)][-1] == "aten::_scaled_mm nt"


@pytest.mark.parametrize(
    "statement",
    [
        "buf3 = torch.ops.aten.sort.default(buf1)",
        "extern_kernels.convolution(buf1, buf2)",
        "some_function(buf1)",
        "buf3 = empty_strided_cuda((4, 16), (16, 1), torch.float4_e2m1fn_x2)",
        "for each in buf1: pass",
    ],
)
def test_what_is_not_known_is_refused(statement: str) -> None:
    with pytest.raises(UnknownCode):
        read(statement)


def test_a_kernel_with_several_configurations_is_tuned_when_it_first_runs() -> None:
    function = read("triton_poi_fused_silu_3.run(buf1, 64, stream=raw_stream0)")
    kernels = [one for one in function.steps if isinstance(one, Run) and one.name.startswith("triton")]
    assert [one.is_tuned for one in kernels] == [True, False, False]


_COMMON = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 96, "intermediate_size": 2560}
SIZES = [
    symbols_of_block({"B": batch, "S": length, "hidden_size": 1152, **_COMMON}, 132, 2048)
    for batch, length in ((2, 640), (3, 512), (5, 1344))
]
TOKENS = [sizes["B"] * sizes["S"] for sizes in SIZES]


def block(num_bytes: int, changed: tuple[int, ...] = (), touched: tuple[int, ...] | None = None) -> Compiled:
    """A block whose forward makes one tensor, and whose backward returns what it is given."""
    run = Run("triton_poi_fused_mul", (), touched or (num_bytes,), 2, (Made(1, num_bytes),), changed)
    return Compiled(("i:0",), Function(1, [run], [1]), Function(1, [], [0]))


def formulas(*blocks: Compiled) -> tuple[str, str]:
    """Return what the kernel moves, and what it makes."""
    code = merge(list(zip(SIZES, blocks, strict=False)))
    (run,) = code.forward
    assert isinstance(run, Operator)
    return code.formulas[run.num_bytes], code.formulas[run.makes[0].num_bytes]


def value(formula: str, sizes: dict[str, int]) -> Fraction:
    return sum((ratio * prod(sizes[factor] for factor in factors) for ratio, factors in parse(formula)), Fraction(0))


def test_what_is_changed_in_place_is_moved_twice() -> None:
    moved, made = formulas(*(block(2 * tokens, changed=(0,)) for tokens in TOKENS))
    assert [value(made, sizes) for sizes in SIZES] == [2 * tokens for tokens in TOKENS]
    assert [value(moved, sizes) for sizes in SIZES] == [4 * tokens for tokens in TOKENS]


def test_sizes_that_differ_in_what_is_changed_in_place_are_alike_unless_one_asks() -> None:
    in_place = block(2 * TOKENS[0], changed=(0,))
    apart = block(2 * TOKENS[1], touched=2 * (2 * TOKENS[1],))
    points = list(zip(SIZES, (in_place, apart), strict=False))
    assert len(most_common(points)) == 2
    assert len(most_common(points, with_in_place=True)) == 1


def test_of_two_sizes_the_product_of_another_recording_is_right() -> None:
    """For these two sizes, several products of symbols have the same values."""
    points = [(sizes, block(2 * tokens)) for sizes, tokens in zip(SIZES[:2], TOKENS[:2], strict=True)]
    text = to_text([(Fraction(2), ("B", "S"))])
    alone = merge(points)
    assert alone.formulas[0] != text
    assert merge(points, [replace(alone, formulas=(text,))]).formulas[0] == text


def test_a_number_without_a_formula_is_refused() -> None:
    with pytest.raises(UnknownCode, match="no formula"):
        formulas(block(2 * TOKENS[0]), block(2 * TOKENS[1] + 1))
