"""Rates of pointwise kernels, measured on an H100, against kernels of an H200 and of another run on the H100."""

import json
from pathlib import Path
from statistics import median

import pytest

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.rates.collectives import groups_of
from fsdp_bench.rates.datasheet import datasheet
from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import TrainSetup

RESULTS = Path(__file__).parents[2] / "results"
LARGE = 1 << 24
"""Elements of a tensor of which an L2 cache holds little."""
NUM_BYTES = {  # of an element that is written: read and written, with fp32 where the program takes fp32 in both rows
    "vectors": {"add": (6, 12), "mul": (6, 12), "pow": (8, 8), "silu": (4, 8), "gelu": (4, 8), "to_bf16": (6, 6)},
    "strided": {"mul_row": (8, 8), "mul_weight": (4, 8), "mul_rotary": (4, 8), "contiguous_heads": (4, 8)},
    "casting": {"to_float": (6, None), "add_mixed": (10, None), "mul_mixed": (10, None)},
    "norms": {"layer_norm": (4, 8), "rms_norm": (4, 8)},
}
NAMES = {"layer_norm": "aten::native_layer_norm", "rms_norm": "aten::_fused_rms_norm"}


def errors(machine: str, gpu: str, kind: str) -> list[float]:
    document = json.loads((RESULTS / machine / "kernel_times.json").read_text())
    rows = next(rows for title, rows in document.items() if title.startswith("pointwise"))
    hardware, setup = Hardware.of_gpu(BUILT_IN.gpu(gpu)), TrainSetup()
    rates, found = datasheet(hardware, setup, groups_of(hardware, setup)), []
    path = kind if kind in ("strided", "casting") else ""
    for name, dtype, tokens, width, _heads, seconds in rows:
        itemsize = 2 if dtype == "bfloat16" else 4
        num_bytes = NUM_BYTES[kind].get(name, (None, None))[itemsize == 4]
        if num_bytes is not None and tokens * width >= LARGE:
            elements = tokens * width
            work = Work(
                NAMES.get(name, "aten::mul"),
                num_bytes * elements,
                (),
                itemsize,
                path=path,
                elements=elements if path else 0,
            )
            found.append(rates.run(work) / seconds - 1)
    return found


@pytest.mark.parametrize(("kind", "most"), [("vectors", 0.05), ("strided", 0.05), ("casting", 0.15), ("norms", 0.15)])
@pytest.mark.parametrize(("machine", "gpu"), [("nvidia-h200", "H200-SXM"), ("nvidia-h100", "H100-SXM")])
def test_kernels_take_about_what_they_took(machine: str, gpu: str, kind: str, most: float) -> None:
    """The H200 decided none of these rates but a kernel's least time.

    Its memory is 1.43 times as fast, its multiprocessors are an H100's.
    """
    found = errors(machine, gpu, kind)
    assert len(found) >= 8
    assert median(map(abs, found)) < most
