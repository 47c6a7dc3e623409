"""The time that attention takes: its kernel's published rates (catalog/attention.toml), by GPU, head size, length."""

import math
import tomllib
from functools import lru_cache
from importlib.resources import files

from fsdp_bench.catalog.user_file import read_entries
from fsdp_bench.simulate.operators.kernels import runs_cudnn
from fsdp_bench.spec.checked import Checked, Count, Positive
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu, Source


class AttentionKernel(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TFLOP/s of one attention kernel on one GPU, by sequence length.

    Raises SpecError for lists of different lengths, and where the backward's rate does not follow.
    """

    name: str
    compute_capability: Count
    """The major number."""
    peak_tflops: Positive
    """The dense 16-bit peak of the GPU on which it was measured."""
    head_dim: Count
    is_causal: bool
    lengths: tuple[Count, ...]
    forward: tuple[Positive, ...] = ()
    backward: tuple[Positive, ...] = ()
    forward_and_backward: tuple[Positive, ...] = ()
    """Both, one after the other."""
    source: Source

    def _check(self) -> None:
        given = [rates for rates in (self.forward, self.backward, self.forward_and_backward) if rates]
        if any(len(rates) != len(self.lengths) for rates in given) or list(self.lengths) != sorted(self.lengths):
            raise SpecError("lengths: one rate for each, in increasing order")
        if not self.forward_and_backward and not (self.forward and self.backward):
            raise SpecError("forward and backward, or forward_and_backward: one of them is needed")


@lru_cache(maxsize=1)
def attention_kernels() -> tuple[AttentionKernel, ...]:
    """Return every kernel of attention.toml."""
    text = files("fsdp_bench.catalog").joinpath("attention.toml").read_text(encoding="utf-8")
    return tuple(
        read_entries([entry], AttentionKernel, "attention.toml: [[kernel]]")[0]
        for entry in tomllib.loads(text)["kernel"]
    )


FLASH_ATTENTION_2 = "flash-attention-2"
TRITON = "flash-attention-triton"
CUDNN = "cudnn"
MEMORY_EFFICIENT = "memory-efficient"
"""torch uses this kernel for masks and for fp32."""

_SLOWER_THAN_FLASH_ATTENTION_2 = {TRITON: (1.4, 2.0)}
"""Forward and backward. FlashAttention-2 is "1.3-1.5x faster in the forward pass and around 2x faster in the backward
pass" than FlashAttention in Triton on an A100 (arXiv 2307.08691, section 4.1). Nothing is published for other GPUs: the
kernel's own file says that it was tested on A100 alone. Assumed: the same on an H100, where both kernels use the A100's
instructions."""

_FORWARD_OVER_BACKWARD = 0.73 / 0.63
"""FlashAttention-2 reaches "up to 73 %" of an A100's peak forward and "up to 63 %" backward (arXiv 2307.08691, section
4). It divides rates that were published for both together."""
_BACKWARD_FLOPS = 2.5
"""FLOPs of the backward, by the forward's."""


def kernel_of(gpu: Gpu) -> str:
    """Return the name of the kernel that torch 2.13 chooses in 16 bits: cuDNN's on Hopper and Blackwell."""
    return CUDNN if runs_cudnn(gpu) else FLASH_ATTENTION_2


@lru_cache(maxsize=1024)
def fraction_of_peak(
    name: str, capability: float | None, head_dim: int, is_causal: bool, length: int, is_backward: bool
) -> float | None:
    """Return the fraction of the 16-bit peak that a kernel reaches. None if no rate is published.

    Between published lengths it is interpolated over the logarithm of the length. Beyond the longest, what a causal
    mask costs falls with the length, because it costs time at the diagonal alone. The nearest published
    head sizes and masks count. Shorter sequences and other head sizes than published for Blackwell are assumed to
    lose as much there as on Hopper. Memory-efficient attention was published for A100 alone: by FlashAttention-2 it is
    taken to be as slow on newer GPUs, where both use the A100's instructions.
    """
    if name in _SLOWER_THAN_FLASH_ATTENTION_2:
        faster = fraction_of_peak(FLASH_ATTENTION_2, capability, head_dim, is_causal, length, is_backward)
        return None if faster is None else faster / _SLOWER_THAN_FLASH_ATTENTION_2[name][is_backward]
    if name == MEMORY_EFFICIENT and capability is not None and capability >= 9:
        own, slow = (
            fraction_of_peak(one, 8.0, head_dim, is_causal, length, is_backward) for one in (name, FLASH_ATTENTION_2)
        )
        fast = fraction_of_peak(FLASH_ATTENTION_2, capability, head_dim, is_causal, length, is_backward)
        return None if own is None or slow is None or fast is None else fast * own / slow
    kernel = _nearest(name, capability, head_dim, is_causal)
    if kernel is None:
        return None
    shortest = kernel.lengths[0]
    if capability is not None and capability >= 10 and (head_dim != kernel.head_dim or length < shortest):
        nearest = fraction_of_peak(name, capability, kernel.head_dim, is_causal, max(length, shortest), is_backward)
        hopper = fraction_of_peak(name, 9.0, head_dim, is_causal, length, is_backward)
        like = fraction_of_peak(name, 9.0, kernel.head_dim, is_causal, max(length, shortest), is_backward)
        return None if nearest is None or hopper is None or like is None else nearest * hopper / like
    rate = _interpolated(kernel.lengths, _rates(kernel, is_backward), length)
    whole = _nearest(name, capability, head_dim, False)
    longest = kernel.lengths[-1]
    if length > longest and whole is not None and whole.head_dim == kernel.head_dim:
        bound = _interpolated(whole.lengths, _rates(whole, is_backward), longest)
        lost = max(1 / rate - 1 / bound, 0.0) * longest / length
        rate = max(1 / (1 / bound + lost), rate)
    return rate / kernel.peak_tflops


def _nearest(name: str, capability: float | None, head_dim: int, is_causal: bool) -> AttentionKernel | None:
    """Return what is published of a kernel for the nearest head size, and of it for the mask if there is any."""
    found = [one for one in attention_kernels() if one.name == name and one.compute_capability == int(capability or 0)]

    def distance(one: AttentionKernel) -> tuple[float, bool]:
        return abs(math.log(one.head_dim / head_dim)), one.is_causal is not is_causal

    return min(found, key=distance, default=None)


def attention_seconds(
    name: str, capability: float | None, peak: float, dims: tuple[int, ...], is_backward: bool
) -> float | None:
    """Return the seconds of attention on a GPU with this 16-bit peak in FLOP/s. None if no rate is published.

    ``dims`` are those of simulate.events.Work: batch, heads, key-value heads, length, head size and, for attention
    that is not causal among equally many queries and keys, the number of keys and whether it is causal.
    """
    batch, heads, _, length, head_dim, *rest = dims
    keys, is_causal = rest or (length, True)
    fraction = fraction_of_peak(name, capability, head_dim, bool(is_causal), max(length, keys), is_backward)
    if fraction is None:
        return None
    flops = 4.0 * batch * heads * length * keys * head_dim * (0.5 if is_causal else 1.0)
    return flops * (_BACKWARD_FLOPS if is_backward else 1.0) / (peak * fraction)


def _rates(kernel: AttentionKernel, is_backward: bool) -> tuple[float, ...]:
    """Return a kernel's rates in one direction; what is published for both together is divided between them."""
    given = kernel.backward if is_backward else kernel.forward
    if given:
        return given
    both, forward = kernel.forward_and_backward, kernel.forward
    if not forward:
        share = (1 + _BACKWARD_FLOPS * _FORWARD_OVER_BACKWARD) / (1 + _BACKWARD_FLOPS)
        forward = tuple(rate * share for rate in both)
    if not is_backward:
        return forward
    return tuple(
        _BACKWARD_FLOPS / ((1 + _BACKWARD_FLOPS) / rate - 1 / one) for rate, one in zip(both, forward, strict=True)
    )


def _interpolated(lengths: tuple[int, ...], rates: tuple[float, ...], length: int) -> float:
    if length <= lengths[0]:
        return rates[0] * length / lengths[0]
    for (low, slow), (high, fast) in zip(
        zip(lengths, rates, strict=True), zip(lengths[1:], rates[1:], strict=True), strict=False
    ):
        if length <= high:
            return slow + (fast - slow) * math.log(length / low) / math.log(high / low)
    return rates[-1]
