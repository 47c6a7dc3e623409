"""NVIDIA's other libraries in a rehearsal: they run or are refused by name; what asks about the GPU does no harm."""

import json
from pathlib import Path

from tests.on_stand_in.interpreters import run_on_gpu
from tests.on_stand_in.rehearsing import rehearse_script

CALLS = """
import ctypes, json, sys, torch
import torch.distributed._symmetric_memory as symmetric

x, batch = torch.zeros(8, 8, device="cuda"), torch.zeros(64, 8, 8, device="cuda")
table = torch.nn.Embedding(10, 8, sparse=True).cuda()

def sparse_step():
    table(torch.zeros(4, dtype=torch.long, device="cuda")).sum().backward()
    torch.optim.SparseAdam(table.parameters()).step()

def called():
    text = ctypes.create_string_buffer(4000)
    ctypes.CDLL(None).stand_in_unsupported(text, ctypes.c_size_t(4000))
    return {line.split()[0] for line in text.value.decode().splitlines()}

CALLS = {
    "fft": lambda: torch.fft.rfft(x),
    "stft": lambda: torch.stft(x.flatten(), 16, window=x[0].repeat(2), return_complex=True),
    "svd": lambda: torch.linalg.svd(x),
    "orthogonal": lambda: torch.nn.init.orthogonal_(x),
    "batched inverse": lambda: torch.linalg.inv(batch),
    "csr": lambda: torch.eye(8).to_sparse_csr().cuda() @ x,
    "semi-structured": lambda: torch._cslt_compress(torch.zeros(128, 128, device="cuda", dtype=torch.half)),
    "lstm": lambda: torch.nn.LSTM(8, 8).cuda(),
    "nvshmem": lambda: symmetric.is_nvshmem_available() and ctypes.CDLL("libtorch_nvshmem.so"),
    "nvjpeg": lambda: ctypes.CDLL(None).nvjpegCreateSimple(None),
    "newer names": lambda: ctypes.CDLL("libcuda.so.1").cuCtxGetDevice_v2(ctypes.byref(ctypes.c_int())),  # Numba
    "triangular": lambda: torch.linalg.solve_triangular(x, x, upper=True),
    "random": lambda: (torch.randn_like(x), torch.multinomial(x.abs() + 1, 2), torch.nn.functional.dropout(x)),
    "sparse gradients": sparse_step,
    "nvtx": lambda: (torch.cuda.nvtx.range_push("a"), torch.cuda.nvtx.range_pop()),
    "ctc": lambda: torch.nn.functional.ctc_loss(
        torch.zeros(50, 4, 20, device="cuda"), torch.ones(4, 9, dtype=torch.long, device="cuda"), (50,) * 4, (9,) * 4
    ),
}
for name, call in CALLS.items():
    before = called()
    try:
        call()
    except RuntimeError:
        pass
    print(json.dumps([name, sorted(called() - before)]))
"""
REFUSED = {
    "fft": ["cufftCreate"],
    "stft": ["cufftCreate"],
    "svd": ["cusolverDnCreate"],
    "orthogonal": ["cusolverDnCreate"],
    "batched inverse": ["cublasSgetrfBatched"],
    "csr": ["cusparseCreate"],
    "semi-structured": ["cusparseLtInit"],
    "lstm": ["cudnnCreateDropoutDescriptor"],
    "nvjpeg": ["nvjpegCreateSimple"],
}
"""The table of docs/reference/rehearsals.md; what is not here runs."""


def test_each_library_runs_or_is_refused_by_name() -> None:
    known = set[str]()
    for line in run_on_gpu("H100-SXM", CALLS, "").splitlines():
        name, called = json.loads(line)
        assert called == [one for one in REFUSED.get(name, []) if one not in known], name
        known |= set(called)
    assert known == {one for names in REFUSED.values() for one in names}


MONITORED = """
import subprocess, sys, tempfile, torch, pynvml

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for name in ("utilization", "temperature", "power_draw", "clock_rate", "memory_usage", "mem_get_info", "memory_summary",
             "device_memory_used", "list_gpu_processes", "get_device_properties", "is_bf16_supported"):
    getattr(torch.cuda, name)()
print("uuid", torch.cuda.get_device_properties(0).uuid, torch.cuda.get_device_properties(0).pci_bus_id)

pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(3)
for name, *words in (("UtilizationRates",), ("Temperature", 0), ("PowerUsage",), ("TotalEnergyConsumption",),
                     ("ClockInfo", 0), ("MaxClockInfo", 0), ("MemoryInfo",), ("Name",), ("MinorNumber",),
                     ("ComputeRunningProcesses",), ("GraphicsRunningProcesses",), ("CudaComputeCapability",)):
    getattr(pynvml, f"nvmlDeviceGet{name}")(gpu, *words)
print("bus", pynvml.nvmlDeviceGetPciInfo(gpu).busId, pynvml.nvmlDeviceGetUUID(gpu))
try:  # what a GPU may lack raises an NVMLError, which monitors expect
    pynvml.nvmlDeviceGetFanSpeed(gpu)
except pynvml.NVMLError as error:
    print("no fan", type(error).__name__)
with torch.profiler.profile() as profile:
    for _ in range(2):  # a third one would end the rehearsal
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print("profiled", any(event.key == "aten::linear" for event in profile.key_averages()))
try:
    from torch.utils.tensorboard import SummaryWriter
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        writer.add_scalar("loss", 1.0, 0)
except ImportError:
    pass
try:
    subprocess.run(["nvidia-smi"], capture_output=True)
except FileNotFoundError:
    pass
print("the end")
"""


def test_what_asks_about_the_gpu_does_no_harm(tmp_path: Path) -> None:
    found = rehearse_script(tmp_path, MONITORED)
    assert found.document["fits"] is True
    assert found.document["unsupported"] == {}
    for line in (
        "uuid 00010203-0405-0607-0809-0a0b0c0d0e0f 1",
        "bus 00000000:04:00.0 GPU-03010203-0405-0607-0809-0a0b0c0d0e0f",
        "no fan NVMLError_FunctionNotFound",
        "profiled True",
        "the end",
    ):
        assert line in found.output


def test_a_library_with_a_cuda_runtime_of_its_own_is_named(tmp_path: Path) -> None:
    """As cupy and DALI fail, whose runtime asks for a table that NVIDIA does not document."""
    (tmp_path / "library.c").write_text(
        "int cuGetExportTable(const void **, const void *); int start(void) { const void *t;"
        ' return cuGetExportTable(&t, "0123456789abcdef"); }'
    )
    script = """
    import ctypes, subprocess, torch
    torch.ones(1, device="cuda")
    subprocess.run(["cc", "-shared", "-fPIC", "library.c", "-o", "libother.so"], check=True)
    assert ctypes.CDLL("./libother.so").start() == 0, "named symbol not found"
    """
    found = rehearse_script(tmp_path, script, code=1)
    assert [name.split("/")[-1] for name in found.document["unsupported"]] == ["libother.so"]
    assert next(iter(found.document["unsupported"])).startswith("cuGetExportTable for ")
