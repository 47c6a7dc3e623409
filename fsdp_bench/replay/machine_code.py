"""The allocator's replay in machine code: made by numba and LLVM in seconds, loaded in milliseconds without numba.

The functions are those of heap.py, segments.py and malloc.py as they stand, on plain pointers: for its own arrays numba
counts references and looks at the sign of every index, which takes as long again.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

import llvmlite.binding as llvm

from fsdp_bench.replay import heap, malloc, segments

MODULES = (heap, segments, malloc)

_NAME = "run"
_POINTER = ctypes.c_void_p
_INTEGER = ctypes.c_int64
_CALL = ctypes.CFUNCTYPE(ctypes.c_int32, _POINTER, _POINTER, _POINTER, _POINTER, _INTEGER, _INTEGER, _POINTER)
"""malloc.run behind the two arguments that numba puts before a function's own: where it leaves a result, and where an
exception (CPUCallConv in numba/core/callconv.py)."""


def compile_run() -> bytes:
    """Return an object file with malloc.run and all that it calls."""
    from numba import cfunc, int64, types, void

    pointer_to: Any = types.CPointer
    integers = pointer_to(int64)
    compiled: Any = cfunc(void(integers, pointer_to(integers), int64, int64, integers))(_linked()["run"])
    module = llvm.parse_assembly(compiled.inspect_llvm())
    for function in module.functions:
        if not function.is_declaration:
            function.linkage = "internal"
    run = module.get_function(compiled.native_name.removeprefix("cfunc."))
    run.linkage, run.name = "external", _NAME
    machine = _machine()
    # What is internal and not called goes: numba's own way into the function, which needs numba to be loaded.
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return bytes(machine.emit_object(module))


def _linked() -> dict[str, FunctionType]:
    """Return copies of the functions that see each other compiled; the originals stay as they are."""
    from numba import njit

    names: dict[str, object] = {}
    for module in MODULES:
        names.update(vars(module))
    copies = {
        function.__name__: FunctionType(function.__code__, names, function.__name__)
        for module in MODULES
        for function in _functions(module)
    }
    names.update({name: njit(copy) for name, copy in copies.items()})
    return copies


def _functions(module: ModuleType) -> list[FunctionType]:
    in_python = heap.fresh_heap, malloc.hand_over
    own = (value for value in vars(module).values() if isinstance(value, FunctionType) and value not in in_python)
    return [function for function in own if function.__module__ == module.__name__]


class MachineCode:
    """malloc.run from an object file; called like it."""

    def __init__(self, content: bytes) -> None:
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(content))
        self._engine.finalize_object()
        self._call = _CALL(self._engine.get_function_address(_NAME))

    def __call__(
        self, heap: array[int], code: Sequence[array[int]], first_part: int, last_part: int, at: array[int]
    ) -> None:
        """Replay; see malloc.run."""
        columns, result = array("q", map(_address, code)), array("q", [0, 0])
        places = _address(result), _address(result) + result.itemsize
        self._call(*places, _address(heap), _address(columns), first_part, last_part, _address(at))
        if at[malloc.STATUS] == malloc.RUNNING:  # it raised
            raise KeyError("a tensor that is not alive")


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def _machine() -> Any:
    """Return this processor as LLVM sees it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(llvm.get_host_cpu_name(), features, opt=3, jit=True)


def processor() -> str:
    """Return what machine code depends on besides its source."""
    return f"{llvm.get_process_triple()} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
