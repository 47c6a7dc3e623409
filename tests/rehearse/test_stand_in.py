"""The stand-in's functions, called as PyTorch calls them, without PyTorch: by ctypes, in a process each."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_bench.catalog import loader
from fsdp_bench.rehearse.build import COMPILERS, LIBRARY, stand_in_environment
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from tests.rehearse.conftest import gpu_of

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")


A100 = gpu_of(8.0)

PRELUDE = """
import ctypes, os, sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p, create_string_buffer
lib = ctypes.CDLL(os.environ["LIBRARY"])
for name in ("stand_in_used_bytes", "stand_in_peak_bytes", "stand_in_unsupported"):
    getattr(lib, name).restype = c_size_t
lib.cudaGetErrorString.restype = lib.stand_in_version.restype = c_char_p
GIB = 1 << 30

class Properties(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location_type", c_int), ("device", c_int), ("rest", c_int * 8)]

def malloc(size):
    address = c_void_p()
    return lib.cudaMalloc(byref(address), c_size_t(size)), address

def created(function, *arguments):
    handle = c_void_p()
    assert function(byref(handle), *arguments) == 0
    return handle

def unsupported():
    size = lib.stand_in_unsupported(None, c_size_t(0))
    text = create_string_buffer(size)
    lib.stand_in_unsupported(text, c_size_t(size))
    return text.value.decode()
"""


@pytest.fixture(scope="module", params=[12040, 13000])
def folder(compiled: Callable[[int], Path], request: pytest.FixtureRequest) -> Path:
    return compiled(request.param)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(folder: Path) -> Run:
    """Runs a script with the stand-in loaded as ``lib``; its assertions are the test's."""

    def run_script(script: str, gpu: RehearsedGpu = A100, **variables: str) -> subprocess.CompletedProcess[str]:
        settings = {**stand_in_environment(folder, gpu, count=4), "LD_PRELOAD": "", "LIBRARY": str(folder / LIBRARY)}
        environment = {**os.environ, **settings, **variables}
        done = subprocess.run([sys.executable, "-c", PRELUDE + script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    return run_script


CALLS = {
    "the version names the build": "assert lib.stand_in_version().startswith(b'cuda-1')",
    "memory is counted per device and ends": """
assert lib.cudaSetDevice(2) == 0
error, address = malloc(10 * GIB + 1)
assert error == 0
assert lib.stand_in_used_bytes(2) == 10 * GIB + (2 << 20) + GIB // 2  # whole pages of 2 MiB, and the context
assert lib.stand_in_used_bytes(1) == 0  # no context yet
assert malloc(70 * GIB)[0] == 2
assert lib.cudaGetErrorString(2) == b"out of memory"
assert lib.cudaGetLastError() == 2 and lib.cudaGetLastError() == 0
assert lib.cudaFree(address) == 0
assert lib.stand_in_used_bytes(2) == GIB // 2
assert lib.stand_in_peak_bytes(2) == 10 * GIB + (2 << 20) + GIB // 2
free, total = c_size_t(), c_size_t()
lib.cudaMemGetInfo(byref(free), byref(total))
assert (free.value, total.value) == (79 * GIB + GIB // 2, 80 * GIB)
assert lib.cudaFree(c_void_p(4096)) == 1
""",
    "the current device is the thread's own": """
import threading
def current():
    device = c_int()
    lib.cudaGetDevice(byref(device))
    return device.value
lib.cudaSetDevice(3)
seen = []
thread = threading.Thread(target=lambda: seen.append(current()))
thread.start(); thread.join()
assert (current(), seen) == (3, [0])
""",
    "capture spreads to streams that wait": """
def capturing(stream):
    status = c_int()
    lib.cudaStreamIsCapturing(stream, byref(status))
    return status.value
first, second, event = created(lib.cudaStreamCreate), created(lib.cudaStreamCreate), created(lib.cudaEventCreate)
assert lib.cudaStreamBeginCapture(None, 0) == 900  # the default stream
assert lib.cudaStreamBeginCapture(first, 0) == 0
assert (capturing(first), capturing(second)) == (1, 0)
lib.cudaEventRecord(event, first)
assert lib.cudaStreamWaitEvent(second, event, 0) == 0
assert capturing(second) == 1
error, memory = malloc(1024)
assert error == 0
for stream in (first, second):
    assert lib.cudaMemsetAsync(memory, 0, c_size_t(1024), stream) == 0
assert lib.cudaStreamSynchronize(second) == 900 and lib.cudaDeviceSynchronize() == 900
assert lib.cudaEventQuery(event) == 907
graph = c_void_p()
assert lib.cudaStreamEndCapture(second, byref(graph)) == 903
assert lib.cudaStreamEndCapture(first, byref(graph)) == 0
assert (capturing(first), capturing(second)) == (0, 0)
count = c_size_t()
assert lib.cudaGraphGetNodes(graph, None, byref(count)) == 0 and count.value == 2
executable = created(lib.cudaGraphInstantiate, graph, c_ulonglong(0))
assert lib.cudaGraphLaunch(executable, first) == 0 and lib.cudaDeviceSynchronize() == 0
""",
    "reads of the host are told": """
reads = []
callback = ctypes.CFUNCTYPE(None, c_size_t, c_char_p)(lambda size, operator: reads.append((size, operator)))
lib.stand_in_on_read(callback)
device, host, pinned = malloc(1 << 22)[1], create_string_buffer(b"\\1" * (1 << 22)), c_void_p()
assert lib.cudaHostAlloc(byref(pinned), c_size_t(1 << 22), 0) == 0
lib.cudaMemcpyAsync(device, host, c_size_t(100), 1, None)
lib.cudaMemcpyAsync(device, device, c_size_t(100), 3, None)
assert reads == []
lib.cudaMemcpyAsync(host, device, c_size_t(8), 2, None)
lib.cudaMemcpyAsync(pinned, device, c_size_t(100), 2, None)
lib.cudaMemcpy(host, device, c_size_t(1 << 22), 2)
assert reads == [(8, b"copy"), (100, b"copy"), (1 << 22, b"copy")]
assert host.raw == bytes((1 << 22) + 1)  # what no kernel wrote is zeros
assert ctypes.string_at(pinned, 100) == b"\\1" * 100  # small copies are real
""",
    "driver functions are found in their newest version": """
for name, defined in {"cuMemAlloc": "cuMemAlloc_v2", "cuMemCreate": "cuMemCreate", "cuInit": "cuInit"}.items():
    for find in (lib.cuGetProcAddress_v2, lib.cudaGetDriverEntryPointByVersion):
        function, status = c_void_p(), c_int(7)
        if find is lib.cuGetProcAddress_v2:
            find(name.encode(), byref(function), 13000, c_ulonglong(0), byref(status))
        else:
            find(name.encode(), byref(function), c_uint(13000), c_ulonglong(0), byref(status))
        assert function.value == ctypes.cast(getattr(lib, defined), c_void_p).value and status.value == 0, name
""",
    "virtual memory takes pages, not addresses": """
address, pages = c_void_p(), c_void_p()
assert lib.cuMemAddressReserve(byref(address), c_size_t(200 * GIB), c_size_t(0), None, c_ulonglong(0)) == 0
assert lib.stand_in_used_bytes(1) == 0
properties = Properties(1, 0, 1, 1)
assert lib.cuMemCreate(byref(pages), c_size_t(20 * GIB), byref(properties), c_ulonglong(0)) == 0
assert lib.cuMemMap(address, c_size_t(20 * GIB), c_size_t(0), pages, c_ulonglong(0)) == 0
assert lib.stand_in_used_bytes(1) == 20 * GIB + GIB // 2
assert lib.cuMemCreate(byref(c_void_p()), c_size_t(60 * GIB), byref(properties), c_ulonglong(0)) == 2
assert lib.cuMemUnmap(address, c_size_t(20 * GIB)) == 0 and lib.cuMemRelease(pages) == 0
assert lib.stand_in_used_bytes(1) == GIB // 2
""",
    "pages stay taken while they are mapped": """
address, pages, properties, none = c_void_p(), c_void_p(), Properties(1, 0, 1, 0), c_ulonglong(0)
assert lib.cuMemAddressReserve(byref(address), c_size_t(8 * GIB), c_size_t(0), None, none) == 0
for number in range(2):
    assert lib.cuMemCreate(byref(pages), c_size_t(GIB), byref(properties), none) == 0
    assert lib.cuMemMap(c_void_p(address.value + number * GIB), c_size_t(GIB), c_size_t(0), pages, none) == 0
    assert lib.cuMemRelease(pages) == 0
assert lib.stand_in_used_bytes(0) == 2 * GIB + GIB // 2
ctypes.memset(address, 1, 100)
assert lib.cuMemUnmap(address, c_size_t(2 * GIB)) == 0  # both
assert lib.stand_in_used_bytes(0) == GIB // 2
assert ctypes.string_at(address, 100) == bytes(100)  # and what was in them is gone
assert lib.cuMemUnmap(address, c_size_t(GIB)) == 1
assert lib.cuMemCreate(byref(pages), c_size_t(4096), byref(properties), none) == 1  # not whole pages
""",
    # 64 TiB of addresses hold 79 GiB some 830 times
    "addresses are used again when all have been": """
kept = malloc(1)[1]
for _ in range(2000):
    error, address = malloc(79 * GIB)
    assert error == 0 and lib.cudaFree(address) == 0
    assert lib.cuMemAddressReserve(byref(address), c_size_t(90 * GIB), c_size_t(0), None, c_ulonglong(0)) == 0
    assert lib.cuMemAddressFree(address, c_size_t(90 * GIB)) == 0
assert lib.cudaFree(kept) == 0
""",
    "streams end with a name": """
streams = [created(lib.cudaStreamCreate) for _ in range(4032)]
assert len({stream.value for stream in streams}) == 4032
assert lib.cudaStreamCreate(byref(c_void_p())) == 801 and "cudaStreamCreate" in unsupported()
assert lib.cudaStreamDestroy(streams[7]) == 0 and lib.cudaStreamCreate(byref(c_void_p())) == 0
""",
    "time between events needs both recorded": """
first, second, milliseconds = created(lib.cudaEventCreate), created(lib.cudaEventCreate), ctypes.c_float()
lib.cudaEventRecord(first, None)
assert lib.cudaEventElapsedTime(byref(milliseconds), first, second) == 400
lib.cudaEventRecord(second, None)
assert lib.cudaEventElapsedTime(byref(milliseconds), first, second) == 0 and milliseconds.value > 0
""",
    "contexts are pushed and popped": """
context, device = c_void_p(), c_int(-1)
assert lib.cuDevicePrimaryCtxRetain(byref(context), 2) == 0
assert lib.cuCtxPushCurrent_v2(context) == 0 and lib.cuCtxGetDevice(byref(device)) == 0 and device.value == 2
assert lib.cuCtxPopCurrent_v2(None) == 0 and lib.cuCtxGetDevice(byref(device)) == 0 and device.value == 0
""",
    "a kernel gets no more shared memory than a block may have": """
for function in (lib.cudaFuncSetAttribute, lib.cuFuncSetAttribute):
    assert function(c_void_p(4096), 8, 163 << 10) == 0 and function(c_void_p(4096), 8, (163 << 10) + 1) == 1
""",
    "running processes fit the caller's version": """
malloc(GIB)
device, count = c_void_p(), c_uint(1)
lib.nvmlDeviceGetHandleByIndex_v2(0, byref(device))
entries = (c_ulonglong * 3)(7, 7, 7)
assert lib.nvmlDeviceGetComputeRunningProcesses(device, byref(count), entries) == 0
assert list(entries)[1:] == [GIB + GIB // 2, 7]  # 16 bytes in the first version
assert lib.nvmlDeviceGetComputeRunningProcesses_v3(device, byref(count), (c_ulonglong * 3)()) == 0
""",
    "what is issued is noted in order, when somebody asks": """
class Entry(ctypes.Structure):
    _fields_ = [("kind", c_int), ("stream", c_int), ("value", c_ulonglong), ("name", c_char_p)]
LAUNCH, TO_DEVICE, TO_HOST, RECORD, STREAM_WAIT, HOST_EVENT, HOST_STREAM, HOST_DEVICE = range(8)
lib.stand_in_traced.restype, lib.stand_in_trace_entries.restype = c_size_t, c_void_p
status, address = malloc(GIB)
stream, event = created(lib.cudaStreamCreate), created(lib.cudaEventCreate)
host = create_string_buffer(64)
lib.cudaMemsetAsync(address, 0, c_size_t(64), stream)
assert lib.stand_in_traced() == 0  # nobody has asked
lib.stand_in_trace(1)
function = c_void_p()
lib.cuModuleGetFunction(byref(function), None, b"triton_poi_fused_add_0")
lib.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream)
lib.cudaEventRecord(event, stream)
lib.cudaStreamWaitEvent(None, event, 0)
lib.cudaMemcpyAsync(address, host, c_size_t(64), 1, None)
lib.cudaEventSynchronize(event)
lib.cudaMemcpyAsync(host, address, c_size_t(32), 2, None)
lib.cudaDeviceSynchronize()
lib.stand_in_trace(0)
lib.cudaMemsetAsync(address, 0, c_size_t(64), stream)
index = lib.stand_in_stream_index(stream)
found = (Entry * lib.stand_in_traced()).from_address(lib.stand_in_trace_entries())
assert [(one.kind, one.stream, one.value, one.name) for one in found] == [
    (LAUNCH, index, 0, b"triton_poi_fused_add_0"),
    (RECORD, index, event.value, None),
    (STREAM_WAIT, 0, event.value, None),
    (TO_DEVICE, 0, 64, None),
    (HOST_STREAM, 0, 0, None),  # a copy from pageable memory
    (HOST_EVENT, -1, event.value, None),
    (TO_HOST, 0, 32, None),
    (HOST_STREAM, 0, 0, None),
    (HOST_DEVICE, -1, 0, None),
]
lib.stand_in_trace(1)
assert lib.stand_in_traced() == 0
""",
}
"""Scripts, by what they show."""


@pytest.mark.parametrize("script", CALLS.values(), ids=CALLS)
def test_calls_return_and_do_what_cudas_do(run: Run, script: str) -> None:
    run(script)


def test_devices_that_are_not_there(run: Run) -> None:
    script = """
count, device = c_int(), c_int()
assert lib.cudaGetDeviceCount(byref(count)) == 0 and count.value == {count}
assert lib.cudaSetDevice({count}) == 101
assert lib.cudaGetErrorString(101) == b"invalid device ordinal"
assert lib.nvmlInit_v2() == 0 and lib.nvmlDeviceGetCount_v2(byref(count)) == 0 and count.value == 4
"""
    run(script.format(count=4))
    run(script.format(count=2), CUDA_VISIBLE_DEVICES="3,1")
    none = "count = c_int()\nassert lib.cudaGetDeviceCount(byref(count)) == 100 and malloc(1)[0] == 100"
    run(none, CUDA_VISIBLE_DEVICES="")


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory of a multiprocessor and
# of a block that opts in, in KiB; threads and blocks of a multiprocessor.
SPECIFICATIONS = {
    7.0: (96, 96, 2048, 32),
    7.5: (64, 64, 1024, 16),
    8.0: (164, 163, 2048, 32),
    8.6: (100, 99, 1536, 16),
    8.9: (100, 99, 1536, 24),
    9.0: (228, 227, 2048, 32),
    10.0: (228, 227, 2048, 32),
    12.0: (100, 99, 1536, 24),
}


def assert_attributes(run: Run, gpu: RehearsedGpu, expected: dict[int, int]) -> None:
    script = f"""
for attribute, value in {expected}.items():
    for function in (lib.cudaDeviceGetAttribute, lib.cuDeviceGetAttribute):
        answer = c_int()
        assert function(byref(answer), attribute, 0) == 0
        assert answer.value == value, (attribute, answer.value)
"""
    run(script, gpu)


@pytest.mark.parametrize("capability", SPECIFICATIONS)
def test_attributes_are_those_of_the_compute_capability(run: Run, capability: float) -> None:
    shared, opt_in, threads, blocks = SPECIFICATIONS[capability]
    expected = {75: int(capability), 76: round(capability * 10) % 10, 81: shared << 10, 97: opt_in << 10}
    expected |= {39: threads, 106: blocks, 16: 108, 10: 32, 1: 1024, 102: 1}
    assert_attributes(run, gpu_of(capability), expected)


KINDS_OF_L2 = {(gpu.compute_capability, gpu.l2_cache_mib): gpu.name for gpu in loader.gpus() if gpu.l2_cache_mib}


@pytest.mark.parametrize("name", KINDS_OF_L2.values())
def test_the_l2_cache_is_that_of_the_catalogue(run: Run, name: str) -> None:
    gpu = loader.gpu(name)
    rehearsed = gpu_of(gpu.compute_capability, next(iter(gpu.product_names), gpu.name))
    assert_attributes(run, rehearsed, {38: gpu.l2_cache_mib << 20})


EVENT_AFTER_WAITING_FOR_ANOTHER_STREAM = """
first, second = created(lib.cudaStreamCreate), created(lib.cudaStreamCreate)
event, later = created(lib.cudaEventCreate), created(lib.cudaEventCreate)
lib.cudaEventRecord(event, first)
assert lib.cudaEventQuery(event) == {before}
lib.cudaEventRecord(later, second)
lib.cudaStreamSynchronize(second)
assert lib.cudaEventQuery(event) == {after}
lib.cudaEventSynchronize(event)
assert lib.cudaEventQuery(event) == 0
"""


@pytest.mark.parametrize(
    ("progress", "before", "after"), [("behind", 600, 600), ("pace", 600, 0), ("idle", 0, 0), ("", 600, 0)]
)
def test_how_far_the_gpu_is(run: Run, progress: str, before: int, after: int) -> None:
    script = EVENT_AFTER_WAITING_FOR_ANOTHER_STREAM.format(before=before, after=after)
    run(script, STAND_IN_PROGRESS=progress)


@pytest.mark.parametrize("progress", ["behind", "pace"])
def test_the_host_is_at_most_a_thousand_launches_ahead(run: Run, progress: str) -> None:
    script = """
event, memory = created(lib.cudaEventCreate), malloc(1024)[1]
lib.cudaEventRecord(event, None)
for _ in range(1025):  # the allocator asks at each allocation; that is not waiting
    assert lib.cudaEventQuery(event) == 600
    assert lib.cudaMemsetAsync(memory, 0, c_size_t(1024), None) == 0
assert lib.cudaEventQuery(event) == 0
"""
    run(script, STAND_IN_PROGRESS=progress)


def test_what_is_lacking_is_recorded_and_fails(run: Run) -> None:
    script = """
assert unsupported() == ""
assert lib.cudaNewestFunction() == 801 and lib.cublasNewestFunction() == 15
handle = c_void_p()
assert lib.cudnnCreate(byref(handle)) == 3000 and lib.cudnnCreate(byref(handle)) == 3000
assert lib.ncclGetUniqueId(byref(handle)) == 5
assert lib.cuMulticastCreate() == 801
function, status = c_void_p(), c_int()
assert lib.cuGetProcAddress_v2(b"cuOfNextYear", byref(function), 13000, c_ulonglong(0), byref(status)) == 0
assert ctypes.CFUNCTYPE(c_int)(function.value)() == 801
expected = {"cudaNewestFunction": 1, "cublasNewestFunction": 1, "cudnnCreate": 2, "ncclGetUniqueId": 1}
expected |= {"cuMulticastCreate": 1, "cuOfNextYear": 1}
assert unsupported() == "".join(f"{name} {count}\\n" for name, count in expected.items())
"""
    said = run(script).stderr.splitlines()
    assert len(said) == 6
    assert said[2] == (
        "fsdp-bench rehearse: cudnnCreate was called, which this stand-in for NVIDIA's libraries lacks; it fails"
    )


def test_warnings_let_only_work_without_results_pass(run: Run) -> None:
    script = """
handle = c_void_p()
assert lib.cublasNewestFunction() == 0 and lib.cudaNewestFunction() == 801
assert lib.ncclGetUniqueId(byref(handle)) == 5 and lib.cudnnCreate(byref(handle)) == 0 and handle.value
assert unsupported() == "cublasNewestFunction 1\\ncudaNewestFunction 1\\nncclGetUniqueId 1\\ncudnnCreate 1\\n"
"""
    assert "it does nothing" in run(script, STAND_IN_UNSUPPORTED="warn").stderr


CUDNN = r"""
#include <stdio.h>
#include <stdlib.h>
static char made;
int cudnnBackendCreateDescriptor(int type, void **descriptor) {
    return *descriptor = &made, type == 38 && getenv("IS_OLD") ? 2000 : 0; /* CUDNN_STATUS_BAD_PARAM */
}
int cudnnBackendDestroyDescriptor(void *descriptor) { return 0; }
int cudnnBackendFinalize(void *descriptor) { return 0; }
int cudnnBackendSetAttribute(void *descriptor, int name, int type, long long count, const char *elements) {
    if (name == 2702) printf("%.*s\n", (int)count, elements);
    else printf("%d %d %d\n", name, type, *(char **)elements == &made);
    return fflush(stdout), 0;
}
int cudnnBackendGetAttribute(void) { return 0; }
"""
"""A cuDNN that prints what is said to it."""


def test_cudnn_compiles_for_the_gpu_and_without_handles(run: Run, tmp_path: Path) -> None:
    library, source = tmp_path / "libcudnn.so.9", tmp_path / "cudnn.c"
    source.write_text(CUDNN)
    compiler = next(filter(shutil.which, COMPILERS))
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname," + library.name, source, "-o", library], check=True)
    script = f"""
cudnn, handle = ctypes.CDLL({str(library)!r}), c_void_p()
if os.environ.get("IS_OLD"):
    assert lib.cudnnCreate(byref(handle)) == 3000 and unsupported() == "cudnnCreate 1\\n"
    sys.exit()
assert lib.cudnnCreate(byref(handle)) == 0 and unsupported() == ""
for kind in (2, 4, 5, 15):  # an engine, a heuristic, a plan, a graph
    descriptor = created(lambda found: lib.cudnnBackendCreateDescriptor(kind, found))
    assert lib.cudnnBackendSetAttribute(descriptor, 800, 0, c_ulonglong(1), byref(handle)) == 0
assert lib.cudnnBackendExecute(handle, descriptor, descriptor) == 0
"""
    said, *attributes = run(script).stdout.splitlines()
    assert attributes == ["1307 15 1", "204 15 1", "407 15 1"]  # CUDNN_ATTR_..._DEVICEPROP, a descriptor; no handle
    gpu = json.loads(said)
    assert (gpu["deviceName"], gpu["deviceVer"], gpu["multiProcessorCount"]) == (A100.product_name, 800, 108)
    assert (gpu["maxSharedMemoryPerBlockOptin"], gpu["l2CacheSize"]) == (163 << 10, 40 << 20)  # NVIDIA's whitepaper
    assert "it fails" in run(script, IS_OLD="1").stderr


def test_a_machine_without_addresses_is_not_a_full_gpu(run: Run) -> None:
    script = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))
assert malloc(GIB)[0] == 999
assert lib.stand_in_used_bytes(0) == GIB // 2  # the context alone
"""
    assert "no addresses for 1073741824 bytes" in run(script).stderr


@pytest.mark.parametrize("progress", ["behind", "pace", "idle"])
def test_a_program_that_polls_gets_there(run: Run, progress: str) -> None:
    script = """
stream, event = created(lib.cudaStreamCreate), created(lib.cudaEventCreate)
memory = malloc(1024)[1]
assert lib.cudaStreamQuery(stream) == 0
assert lib.cudaMemsetAsync(memory, 0, c_size_t(1024), stream) == 0
before = lib.cudaStreamQuery(stream)
assert before == (0 if os.environ["STAND_IN_PROGRESS"] == "idle" else 600)
while lib.cudaStreamQuery(stream): pass
lib.cudaEventRecord(event, stream)
while lib.cudaEventQuery(event): pass
assert lib.cudaStreamQuery(stream) == 0
"""
    run(script, STAND_IN_PROGRESS=progress)


def test_a_forked_process_cannot_use_the_parents_gpus(run: Run) -> None:
    script = """
{before}
process = os.fork()
if not process:
    os._exit(malloc(1)[0])
assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == {error}  # cudaErrorInitializationError
"""
    run(script.format(before="malloc(1)", error=3))
    run(script.format(before="", error=0))


KERNEL_FOR = """
import struct
class Dim(ctypes.Structure):
    _fields_ = [("x", c_uint), ("y", c_uint), ("z", c_uint)]
def kernel_for(architectures, kind=2):
    # one header and nothing else for each binary, as architectures.c reads them
    entries = b"".join(struct.pack("<HHIQIIHHI", kind, 0, 32, 0, 0, 0, 0, 0, number) for number in architectures)
    container = create_string_buffer(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries)
    wrapper = create_string_buffer(struct.pack("<IIQ", 0, 0, ctypes.addressof(container)))
    lib.__cudaRegisterFatBinary.restype = c_void_p
    kernel = create_string_buffer(64)
    lib.__cudaRegisterFunction(c_void_p(lib.__cudaRegisterFatBinary(wrapper)), kernel)
    kept.extend([container, wrapper, kernel])
    return kernel
kept, one = [], Dim(1, 1, 1)
def launch(*arguments):
    return lib.cudaLaunchKernel(kernel_for(*arguments), one, one, None, c_size_t(0), None)
"""


def test_a_kernel_for_other_gpus_cannot_be_launched(run: Run) -> None:
    # CUDA C++ Programming Guide, "Binary Compatibility": the same generation, not newer; "PTX Compatibility": not newer
    run(
        KERNEL_FOR
        + """
assert launch([75, 80]) == 0 and launch([75], 1) == 0
assert launch([75, 86, 90]) == 209 and launch([90], 1) == 209
assert launch([]) == 0 and launch([90], 77) == 0  # of an unknown format
attributes = create_string_buffer(1024)
assert lib.cudaFuncGetAttributes(attributes, kernel_for([90])) == 209
assert lib.cudaGetErrorString(209) == b"no kernel image is available for execution on the device"
"""
    )


def test_of_several_binaries_the_gpu_runs_the_newest_of_its_generation(run: Run) -> None:
    """An L4 (8.9) runs what was compiled for 8.6, in whichever order nvcc wrote the binaries; of PTX the newest, too.

    NVIDIA CUDA Compiler Driver, "Fatbinaries": the driver selects the most appropriate translation.
    """
    run(
        KERNEL_FOR
        + """
def version(*arguments):
    attributes = create_string_buffer(1024)
    assert lib.cudaFuncGetAttributes(attributes, kernel_for(*arguments)) == 0
    return c_int.from_buffer(attributes, 36).value  # binaryVersion, behind three size_t and three int
assert version([75, 80, 86, 90]) == version([90, 86, 80, 75]) == 86
assert version([50, 75, 90], 1) == version([90, 75, 50], 1) == 75
""",
        gpu_of(8.9),
    )
