"""Hardware as facts: each with its source and date. A value that nobody documents is absent (None)."""

from __future__ import annotations

import msgspec

from fsdp_bench.spec.errors import SpecError


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a fact was read."""

    title: str
    date: str
    """Year, month or day of the document (ISO 8601)."""
    note: str | None = None
    """What had to be derived, and how."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU as torch sees one device."""

    name: str
    product_names: tuple[str, ...]
    """Exactly what NVML and torch.cuda.get_device_name report for it."""
    memory_gib: float
    """Nominal memory, as sold."""
    source: Source
    dense_flops_per_second: dict[str, float]
    """Peak FLOP/s without sparsity by dtype: bf16, fp16, tf32, fp32; a missing dtype is unknown or unsupported."""
    native_bf16: bool
    memory_bandwidth_bytes_per_second: float | None = None
    nvml_total_bytes: int | None = None

    def peak_flops_per_second(self, dtype: str) -> float | None:
        """Dense peak for ``fp32``, ``bf16`` or ``fp16``, or None when it is not documented.

        torch computes float32 matrix products in float32 by default (torch.backends.cuda.matmul.allow_tf32 is
        False), so fp32 stands for the plain fp32 rate, not for tf32.

        Raises:
            SpecError: for a dtype that is not one of those.
        """
        if dtype not in ("fp32", "bf16", "fp16", "tf32"):
            raise SpecError(f"dtype: {dtype!r} is not allowed; one of fp32, tf32, bf16, fp16")
        return self.dense_flops_per_second.get(dtype)
