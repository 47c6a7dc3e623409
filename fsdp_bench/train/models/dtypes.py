"""torch's dtypes by the names of spec/setup.py."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_names(tensors: object) -> tuple[str, ...]:
    """Return the sorted names of the floating dtypes of tensors. Dtypes without a name there have torch's name."""
    dtypes = {t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()}  # type: ignore[attr-defined]
    return tuple(sorted(NAMES.get(dtype, str(dtype)) for dtype in dtypes))
