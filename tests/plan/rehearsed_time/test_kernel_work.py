"""Bytes that Triton's kernels move. Expected values are counted by hand from shapes."""

from __future__ import annotations

from typing import Any

from fsdp_bench.plan.rehearsed_time.events import work_of_kernel
from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.subprocesses.issued import TritonKernel
from tests.plan.rehearsed_time.steps import FP32, INT64, StepWriter


def kernel(step: StepWriter, name: str = "triton_poi_fused_add_0", **more: Any) -> Work | None:
    fields = {"changed": (), "sizes": (1024,), "is_inductors": True, "module": "", "stream": 0} | more
    step.add("triton", name=name, **fields)
    read = step.read()
    (event,) = read.events
    assert isinstance(event, TritonKernel)
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


def test_templates_and_kernels_of_others_are_unknown() -> None:
    for name, is_inductors in (("triton_tem_fused_mm_0", True), ("_flash_kernel", False), ("_flash_kernel", True)):
        step = StepWriter()
        assert kernel(step, name, names=("x",), arguments=(step.tensor(10),), is_inductors=is_inductors) is None


def test_ligers_kernels_are_known_by_name_and_module() -> None:
    """Cross entropy reads every logit twice and overwrites it with its gradient."""
    for module, expected in (("liger_kernel.ops.cross_entropy", 3 * 2000 + 80), ("mine", None)):
        step = StepWriter()
        names, arguments = ("X_ptr", "X_stride", "Y_ptr"), (step.tensor(10, 100), None, step.tensor(10, dtype=INT64))
        more = {"is_inductors": False, "module": module, "sizes": ()}
        found = kernel(step, "liger_cross_entropy_kernel", names=names, arguments=arguments, **more)
        assert (None if found is None else found.num_bytes) == expected
