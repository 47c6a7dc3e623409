"""The three dtypes of a setup as bytes an element, and which casts they mean."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_bench.spec.setup import Precision

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def precision_of(weight_dtype: str, precision: Precision) -> Precision:
    """Return the dtypes of a parameter in a unit: the unit's, or of a frozen one that is stored apart its own alone.

    A wrapper casts to the compute dtype, which is that of the base's, or casts nothing (MixedPrecision is None).
    """
    if weight_dtype in ("", precision.store):
        return precision
    return Precision(weight_dtype, weight_dtype, weight_dtype)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one element of stored parameters, in compute, in gradient reduction."""

    store: int
    compute: int
    reduce: int
    casts: bool
    """The compute dtype is not the stored one."""
    reduces_in_other_dtype: bool
    """The reduction dtype is not the compute dtype."""
    casts_back: bool
    """The reduction dtype is not the stored one."""

    @classmethod
    def of(cls, precision: Precision) -> Sizes:
        """Read a precision."""
        return cls(
            store=_BYTES[precision.store],
            compute=_BYTES[precision.compute],
            reduce=_BYTES[precision.reduce],
            casts=precision.compute != precision.store,
            reduces_in_other_dtype=precision.reduce != precision.compute,
            casts_back=precision.reduce != precision.store,
        )
