"""The published rates of attention kernels: attention.toml."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path

from fsdp_bench.catalog.user_file import read_entries
from fsdp_bench.spec.checked import Checked, Count, Positive
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Source


class AttentionKernel(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TFLOP/s of one attention kernel on one GPU, by sequence length.

    Raises:
        SpecError: for lists of different lengths, and where the backward's rate does not follow.
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
    text = Path(__file__).with_name("attention.toml").read_text(encoding="utf-8")
    return tuple(
        read_entries([entry], AttentionKernel, "attention.toml: [[kernel]]")[0]
        for entry in tomllib.loads(text)["kernel"]
    )
