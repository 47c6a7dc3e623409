"""Rates of a datasheet: copies to and from the host, the slowest of several GPUs against drawn ones, and attention.

Attention's are those of attention.toml, between its lengths, and beyond them.
"""

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest

from fsdp_bench.catalog.loader import gpu, server, servers
from fsdp_bench.rates.attention_time import (
    CUDNN,
    FLASH_ATTENTION_2,
    MEMORY_EFFICIENT,
    attention_kernels,
    attention_seconds,
    fraction_of_peak,
    kernel_of,
)
from fsdp_bench.rates.datasheet import COPY_EFFICIENCY, SMALL_COPY_BYTES, SPREAD, datasheet, slowest_of
from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import TrainSetup

ALONE = datasheet(Hardware.of_gpu(gpu("H100-SXM")), TrainSetup(world_size=1, sequence_length=2048))


def test_without_a_known_link_a_small_copy_takes_as_long_as_on_the_slowest_and_a_large_one_is_unknown() -> None:
    links = [link for one in servers() if (link := one.host_link) is not None]
    rates = (
        COPY_EFFICIENCY * (link.bandwidth_bytes_per_second or 1e12) / (link.gpus_per_uplink or 1) for link in links
    )
    assert ALONE.copy(Work("to_host", SMALL_COPY_BYTES)) == SMALL_COPY_BYTES / min(rates)
    assert ALONE.copy(Work("to_host", SMALL_COPY_BYTES + 1)) is None


def test_a_known_link_decides_about_small_copies_too() -> None:
    linked = replace(ALONE, copy_bandwidth=1e9)
    assert linked.copy(Work("to_host", 4)) == 4e-9


@pytest.mark.parametrize(("num_gpus", "sharing"), [(1, 1), (2, 2), (8, 2)])
def test_only_gpus_that_are_used_share_an_uplink(num_gpus: int, sharing: int) -> None:
    """Two GPUs of a p4d share each uplink of 16 GB/s (servers.toml), of which copies reach 80 %."""
    cluster = Hardware(server=server("p4d.24xlarge"), gpu=gpu("A100-SXM-40GB"), num_nodes=1, gpus_per_node=num_gpus)
    rates = datasheet(cluster, TrainSetup(world_size=num_gpus, sequence_length=2048))
    assert rates.copy(Work("to_host", 2**30)) == pytest.approx(2**30 / (0.8 * 16e9 / sharing))


@pytest.mark.parametrize("count", [2, 8, 64, 512])
def test_the_slowest_gpu_is_the_mean_of_the_slowest_of_drawn_ones(count: int) -> None:
    draw = random.Random(7)
    drawn = fmean(min(draw.gauss(1.0, SPREAD) for _ in range(count)) for _ in range(2000))
    assert slowest_of(count) == pytest.approx(drawn, abs=0.001)


def test_one_gpu_waits_for_nobody_and_more_never_wait_less() -> None:
    rates = [slowest_of(count) for count in range(1, 200)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)


H100 = 989.4e12


@pytest.mark.parametrize(
    "kernel", attention_kernels(), ids=lambda one: f"{one.name} {one.compute_capability} {one.head_dim}"
)
def test_forward_and_backward_together_are_what_was_published(kernel) -> None:
    """The directions that were derived give the published rate of both again, at every length."""
    for place, length in enumerate(kernel.lengths):
        forward, backward = (
            kernel.peak_tflops
            * fraction_of_peak(
                kernel.name, float(kernel.compute_capability), kernel.head_dim, kernel.is_causal, length, is_backward
            )
            for is_backward in (False, True)
        )
        if kernel.forward_and_backward:
            both = 3.5 / (1 / forward + 2.5 / backward)
            assert both == pytest.approx(kernel.forward_and_backward[place])
        if kernel.forward:
            assert forward == pytest.approx(kernel.forward[place])
        if kernel.backward:
            assert backward == pytest.approx(kernel.backward[place])


def test_flash_attention_2_on_an_h100_agrees_with_another_source() -> None:
    """284 TFLOP/s forward and 287 backward at 8192 tokens (flash-attention pull request 1791, Meta): within 10 %."""
    forward, backward = (
        989.4 * fraction_of_peak(FLASH_ATTENTION_2, 9.0, 128, True, 8192, is_backward) for is_backward in (False, True)
    )
    assert 3.5 / (1 / forward + 2.5 / backward) == pytest.approx(3.5 / (1 / 284.1 + 2.5 / 287.1), rel=0.1)


def test_seconds_by_hand() -> None:
    """4 x 2 x 8 x 4096^2 x 128 / 2 FLOPs, at 319 TFLOP/s forward."""
    seconds = attention_seconds(FLASH_ATTENTION_2, 9.0, H100, (2, 8, 8, 4096, 128), False)
    assert seconds == pytest.approx(4 * 2 * 8 * 4096**2 * 128 / 2 / 319e12)


def test_a_causal_mask_costs_less_the_longer_the_sequence_is() -> None:
    """Beyond what was published the rate rises towards that without a mask, and never beyond it."""
    rates = [
        fraction_of_peak(FLASH_ATTENTION_2, 8.0, 128, True, length, False) for length in (2**14, 2**15, 2**17, 2**20)
    ]
    whole = fraction_of_peak(FLASH_ATTENTION_2, 8.0, 128, False, 2**14, False)
    assert None not in rates
    assert rates == sorted(rates)
    assert rates[-1] < whole
    assert rates[-1] == pytest.approx(whole, rel=0.01)


def test_which_kernel_torch_takes() -> None:
    """cuDNN's on Hopper and Blackwell; from wheels of CUDA 12, whose cuDNN is older, FlashAttention-2 there, too."""
    assert kernel_of(gpu("A100-SXM-80GB")) == FLASH_ATTENTION_2
    assert kernel_of(gpu("H100-SXM")) == kernel_of(gpu("B200")) == CUDNN
    for version, kernel in (("12.1", FLASH_ATTENTION_2), ("12.8", FLASH_ATTENTION_2), ("13.0", CUDNN)):
        assert kernel_of(gpu("H100-SXM").with_cuda(version)) == kernel
    assert fraction_of_peak(FLASH_ATTENTION_2, 7.0, 128, True, 4096, False) is None


def test_blackwell_loses_as_much_as_hopper_on_short_sequences_and_small_heads() -> None:
    """What was published for Hopper alone is taken relative to the nearest that was published for both."""
    for head_dim, length in ((64, 4096), (128, 1024), (64, 512)):
        near = max(length, 2048)
        ratios = [
            fraction_of_peak(CUDNN, capability, head_dim, True, length, False)
            / fraction_of_peak(CUDNN, capability, 128, True, near, False)
            for capability in (9.0, 10.0)
        ]
        assert ratios[0] == pytest.approx(ratios[1])
        assert ratios[0] < 1


def test_a_head_size_between_two_published_ones_counts_as_the_nearer_one() -> None:
    assert fraction_of_peak(CUDNN, 9.0, 80, False, 2048, True) == pytest.approx(395 / 989.4)


def test_memory_efficient_attention_is_as_slow_by_flash_attention_2_on_an_h100_as_on_an_a100() -> None:
    """Published for an A100 alone. On Blackwell, for which FlashAttention-2 is not published either, it is unknown."""
    for is_backward in (False, True):
        efficient, flash = (
            [fraction_of_peak(name, capability, 128, True, 4096, is_backward) for capability in (8.0, 9.0)]
            for name in (MEMORY_EFFICIENT, FLASH_ATTENTION_2)
        )
        assert efficient[0] / flash[0] == pytest.approx(efficient[1] / flash[1])
        assert efficient[0] < flash[0]
    assert fraction_of_peak(MEMORY_EFFICIENT, 10.0, 128, True, 4096, False) is None


_MM, _ROUNDED = "scaled_mm__to_copy", "clamp_exp2_floor_log2_mul"
_UP, _X, _GATE = 14336 * 4096, 8192 * 4096, 8192 * 14336


@pytest.mark.parametrize(
    ("kernel", "elements", "bytes_of_each", "seconds"),
    [
        ("triton_red_fused_abs_max_t", _UP, 2, 47.2e-6),
        (f"triton_poi_fused__fused_rms_norm__{_MM}_add_clamp_mul_reciprocal_t_view", _UP, 3, 59e-6),
        (f"triton_poi_fused__{_MM}_clamp_clone_mul_reciprocal_silu_t_view", _X, 4, 73.8e-6),
        (f"triton_red_fused__{_MM}_abs_amax_{_ROUNDED}_reciprocal_silu_t_view", _GATE, 5, 316e-6),
        (f"triton_red_fused__{_MM}_abs_amax_clamp_clone_exp2_floor_log2_mul_new_ones_t_view", _X, 4, 122e-6),
        (f"triton_poi_fused__to_copy_{_ROUNDED}_reciprocal_t", _UP, 4, 328.2e-6),
    ],
)
def test_kernels_around_products_in_float8_take_what_they_took_on_an_h100(
    kernel: str, elements: int, bytes_of_each: int, seconds: float
) -> None:
    """In the profile of a step of Llama-3.1-8B's blocks with 8192 tokens (results/nvidia-h100)."""
    assert ALONE.run(Work(kernel, elements * bytes_of_each, itemsize=1)) == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("layout", "dims", "tflops"),
    [
        ("nt", (8192, 14336, 4096), 1299),
        ("nt-fast", (8192, 14336, 4096), 1335),
        ("nt-fast-rows", (8192, 14336, 4096), 1381),
        ("nt", (8192, 4096, 14336), 1385),
        ("nt-fast", (8192, 4096, 14336), 1450),
        ("nt-fast-rows", (8192, 4096, 14336), 1392),
    ],
)
def test_products_in_float8_take_what_they_took_on_an_h100(
    layout: str, dims: tuple[int, int, int], tflops: float
) -> None:
    """torch._scaled_mm of random numbers (results/nvidia-h100); shapes differ by up to 11 % from the median."""
    seconds = 2 * math.prod(dims) / (tflops * 1e12)
    assert ALONE.run(Work(f"aten::mm {layout}", 0, dims, 1)) == pytest.approx(seconds, rel=0.08)
    assert (ALONE.run(Work("aten::mm nt-fast", 0, dims, 1)) or 0) < (ALONE.run(Work("aten::mm nt", 0, dims, 1)) or 0)
