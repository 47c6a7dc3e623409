"""Steps for tests, as a rehearsal reports them: written by hand."""

from typing import Any

import pytest

from fsdp_bench.spec.codec import from_builtins
from fsdp_bench.spec.subprocesses.issued import IssuedStep

BF16, FP32, INT64 = ("bfloat16", 2), ("float32", 4), ("int64", 8)


class StepWriter:
    """Writes a step's document, and reads it as the tool does."""

    def __init__(self) -> None:
        self._tensors: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.allows_tf32 = False

    def tensor(
        self, *shape: int, dtype: tuple[str, int] = BF16, strides: tuple[int, ...] | None = None, device: str = "cuda"
    ) -> int:
        """Return the number of a contiguous tensor, or of one with the given strides."""
        found, step = [], 1
        for size in reversed(shape):
            found.insert(0, step)
            step *= size
        name, itemsize = dtype
        tensor = {"shape": shape, "strides": strides or found, "dtype": name, "itemsize": itemsize, "device": device}
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def operator(
        self,
        name: str,
        /,
        results: tuple[int, ...] = (),
        written: tuple[str, ...] = (),
        outputs: tuple[str, ...] = (),
        is_recomputed: bool = False,
        stream: int = 0,
        kind: str = "operator",
        is_pointwise: bool = False,
        **arguments: Any,
    ) -> None:
        """Add an operator; a tuple is tensors, a number itself."""
        given = {key: {"tensors": one} if isinstance(one, tuple) else one for key, one in arguments.items()}
        own = {} if kind == "host" else {"is_recomputed": is_recomputed, "is_pointwise": is_pointwise, "stream": stream}
        self.add(kind, name=name, arguments=given, results=results, written=written, outputs=outputs, **own)

    def product(self, m: int, n: int, k: int, dtype: tuple[str, int] = BF16, **more: Any) -> None:
        a, b, out = (self.tensor(*shape, dtype=dtype) for shape in ((m, k), (k, n), (m, n)))
        self.operator("aten::mm", (out,), self=(a,), mat2=(b,), **more)

    def collective(self, name: str, num_bytes: int, ranks: tuple[int, ...] | None, **more: Any) -> None:
        given = {"group": "0", "is_asynchronous": False, "stream": 0} | more
        self.add("collective", name=name, num_bytes=num_bytes, ranks=ranks, **given)

    def add(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def read(self) -> IssuedStep:
        document = {"number": 4, "allows_tf32": self.allows_tf32, "tensors": self._tensors, "events": self.events}
        return from_builtins(document, IssuedStep)


@pytest.fixture
def step() -> StepWriter:
    return StepWriter()
