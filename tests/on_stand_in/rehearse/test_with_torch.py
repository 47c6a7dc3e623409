"""PyTorch's CUDA build on the stand-in: what it asks for, what runs, and that noting it changes nothing."""

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from fsdp_bench.rehearse.build import LIBRARY, NEEDS_NO_GPU, build_stand_in, symbols_of
from fsdp_bench.rehearse.find_torch import Torch
from tests.on_stand_in.interpreters import GPU, every_torch, run_on_stand_in
from tests.on_stand_in.rehearsing import SCRIPTS, Rehearsed, rehearse
from tools.validate.observer import SCRIPT, draw

pytestmark = [*every_torch, pytest.mark.timeout(240)]

RECORDED_STUBS = re.compile(
    # batched factorizations, and levels 1 and 2 that only magma and cuSOLVER's callers use
    r"cublas[SDCZ](gels|geqrf|getr[fs])Batched|cublas(I[sdcz]am(ax|in)|[SDCZ]\w*(nrm2|asum|rot\w*|tr[sm]v|her\w*|hem\w)"
    r"|[SDCZ](symv|syr2?)|C[sz]?scal|[CZ](s|d)(scal|rot))\w*|cublas[GS]et(Matrix|Vector)Async"
    # memory pools of the driver, memory shared between processes, peers, libraries of kernels, nodes made by hand
    r"|cuda(Malloc|Free)Async|cudaMemPool\w+|cudaDeviceGetDefaultMemPool|cudaIpc\w+|cudaDeviceEnablePeerAccess"
    r"|cudaLibrary\w+|cudaKernelSetAttributeForDevice|cudaGraph(Add\w*Node|NodeGet\w+|ConditionalHandleCreate)"
    # memory that graphs allocate; what NCCL's backend ties to a graph (torch 2.15), while process groups are fake ones;
    # assertions of kernels, in a torch that is built to keep them
    r"|cudaDevice[GS]etGraphMemAttribute|cudaUserObject\w+|cudaGraphRetainUserObject|cudaMallocManaged"
    # linking of compiled code at run time; GPUDirect Storage
    r"|cuLink\w+|cuFile\w+"
)
"""Symbols that torch refers to and the stand-in only records."""


def test_what_torchs_libraries_ask_for_is_there_or_a_recorded_stub(torch: Torch) -> None:
    asked = set[str]()
    for library in (torch.folder / "lib").glob("lib*.so"):
        asked |= symbols_of(library).undefined
    asked = {name for name in asked if re.match(r"(__)?cuda[A-Z]|cublas|cu[A-Z]|nvml", name)}
    assert len(asked) > 250
    stand_in = symbols_of(build_stand_in(torch) / LIBRARY)
    missing = asked - stand_in.defined
    assert {name for name in missing if not NEEDS_NO_GPU.fullmatch(name) and not name.startswith("cuFile")} == set()
    stubs = asked & stand_in.weak
    assert {name for name in stubs if not RECORDED_STUBS.fullmatch(name)} == set()


@pytest.mark.parametrize("capability", [7.0, 9.0, 12.0])
def test_a_gpu_that_torch_was_not_compiled_for_is_pytorchs_error(torch: Torch, capability: float) -> None:
    script = """
import torch
numbers = [int(name[3:]) for name in torch.cuda.get_arch_list() if name[3:].isdigit()]
runs = any(number // 10 == {capability} // 10 and number <= {capability} for number in numbers)
try:
    torch.ones(1, device="cuda")
except RuntimeError as error:
    assert not runs and "no kernel image is available" in str(error), error
else:
    assert runs
"""
    run_on_stand_in(
        torch, script.format(capability=round(capability * 10)), replace(GPU, compute_capability=capability)
    )


PRINTED: dict[str, tuple[str, str]] = {
    "operators that read are named": (
        """
import ctypes, torch
lib = ctypes.CDLL(None)
reads = []
callback = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_char_p)(lambda size, name: reads.append(name.decode()))
lib.stand_in_on_read(callback)
x = torch.zeros(8, device="cuda")
x[0].item(); float(x[0]); x.tolist(); x.cpu(); x.nonzero(); x.masked_select(x > 0); x[x > 0]; x.unique()
torch.empty(8, pin_memory=True).copy_(x, non_blocking=True)
print(*reads)
""",
        "item item copy copy nonzero masked_select index unique copy",
    ),
    "what is lacking ends with its name": (
        """
import ctypes, torch
try:
    torch.linalg.eigh(torch.eye(3, device="cuda"))
except RuntimeError as error:
    print(type(error).__name__)
text = ctypes.create_string_buffer(1000)
ctypes.CDLL(None).stand_in_unsupported(text, ctypes.c_size_t(1000))
print(text.value.decode())
""",
        "RuntimeError cusolverDnCreate 1",
    ),
    "convolutions run where warnings do": (
        """
import torch
x = torch.ones(2, 3, 224, 224, device="cuda", requires_grad=True)
convolution = torch.nn.Conv2d(3, 64, 16, 16).cuda()
convolution(x).sum().backward()
print(*x.grad.shape, *convolution.weight.grad.shape)
""",
        "2 3 224 224 64 3 16 16",
    ),
    "CUDA graphs capture with a pool of their own": (
        """
import torch
linear, x = torch.nn.Linear(256, 256).cuda(), torch.ones(64, 256, device="cuda")
linear(x)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = linear(x)
graph.replay()
torch.cuda.synchronize()
print(len({segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}))
compiled = torch.compile(linear, mode="reduce-overhead")
for _ in range(4):
    torch.compiler.cudagraph_mark_step_begin()
    compiled(x).sum().backward()
    linear.zero_grad()
from torch._dynamo.utils import counters
print(counters["inductor"]["cudagraph_skips"])
""",
        "2 0",
    ),
}


@pytest.mark.parametrize(("script", "printed"), PRINTED.values(), ids=PRINTED)
def test_a_script_prints_what_it_does_on_a_gpu(torch: Torch, script: str, printed: str, tmp_path: Path) -> None:
    given = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    if "Conv2d" in script:
        given["STAND_IN_UNSUPPORTED"] = "warn"
    assert run_on_stand_in(torch, script, **given).split() == printed.split()


FLEX = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
attention = torch.compile(flex_attention, dynamic=False)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024)
weight = torch.nn.Parameter(torch.randn(4, 8, 1024, 64, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.SGD([weight])
for _ in range(4):
    for _ in range(10):
        (attention(weight, weight, weight, block_mask=mask) * weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _with_and_without_time(
    torch: Torch, command: str, script: Path, *options: str, words: tuple[str, ...] = (), code: int = 0
) -> tuple[Rehearsed, Rehearsed]:
    program, given = str(Path(torch.python).parent / command), (*options, "--steps", "4", "--", str(script), *words)
    noted, plain = (
        rehearse(*time, *given, folder=script.parent, command=program, code=code) for time in (("--time",), ())
    )
    assert (plain.document["time"], plain.document["why_no_time"]) == (None, None)
    assert noted.document["memory"] == plain.document["memory"]
    assert noted.document["spans"] == plain.document["spans"]
    return noted, plain


def test_compiled_blocks_stay_compiled(torch: Torch) -> None:
    noted, _ = _with_and_without_time(torch, "torchrun", SCRIPTS / "compiled_blocks.py", "--server", "p5.48xlarge")
    time = noted.document["time"]
    assert time["unknown"] == {}
    kernels = sum(part["count"] for part in time["parts"] if part["name"].startswith("triton_"))
    assert kernels >= 4 * 6  # four blocks: norms, SwiGLU and additions, both ways


def test_flex_attention_stays_compiled(torch: Torch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FLEX)
    noted, _ = _with_and_without_time(torch, "python", tmp_path / "train.py", "--gpu", "H100-SXM")
    unknown = noted.document["time"]["unknown"]
    assert sum(unknown.values()) == 20
    assert all(name.startswith("triton_tem") for name in unknown)  # a template whose work nobody knows here


ENDS_WITHOUT_MEMORY = """
import gc, torch, torch.distributed as dist
dist.init_process_group("nccl")
x = torch.nn.Parameter(torch.randn(1 << 24, device="cuda"))
optimizer = torch.optim.SGD([x])
try:
    for step in range(4):
        if step == 2:
            gc.collect()
            cycle = [torch.empty_like(x)]
            cycle.append(cycle)
            del cycle  # lives until the garbage collector runs: after 700 or 2000 new containers
        for _ in range(500):
            x.detach().neg_()
        y = x * 2
        (y * 3 + y * 5 + y * 7).sum().backward()  # autograd adds up three gradients of y, in place
        optimizer.step()
        optimizer.zero_grad()
        assert torch.tensor([-5]).view(torch.uint64).item() == 2**64 - 5
        torch.randint(-(2**63), 2**63 - 1, (1,), device="cuda")  # as torch.compile draws the seeds of dropout
        torch.empty(1 << (step * 20), device="cuda")
finally:
    dist.destroy_process_group()
"""


def test_gradients_add_up_in_place_garbage_stays_and_a_script_may_end_its_process_group(
    torch: Torch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(ENDS_WITHOUT_MEMORY)
    noted, plain = _with_and_without_time(torch, "torchrun", tmp_path / "train.py", "--gpu", "H100-SXM", code=3)
    assert [one.document["outcome"] for one in (noted, plain)] == ["out_of_memory"] * 2
    assert plain.document["num_steps"] == 3


COMPILED_AS_A_WHOLE = {"code": "own", "compile": "whole", "checkpointing": "non-reentrant", "layers": 10, "width": 256}


@pytest.mark.parametrize(
    "drawn",
    [
        {"wrapper": "fsdp2"},
        pytest.param({"wrapper": "fsdp1"}, marks=pytest.mark.slow),
        pytest.param(draw(3, 50), marks=pytest.mark.slow, id="whose graph breaks in FSDP1's hooks"),
    ],
)
def test_blocks_of_a_model_that_is_compiled_as_a_whole_stay_compiled(torch: Torch, drawn: dict[str, object]) -> None:
    words = (json.dumps(draw(1, 1) | COMPILED_AS_A_WHOLE | drawn),)
    noted, _ = _with_and_without_time(torch, "torchrun", SCRIPT, "--server", "p5.48xlarge", words=words)
    assert noted.document["time"]["unknown"] == {}
