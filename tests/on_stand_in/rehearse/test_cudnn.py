"""NVIDIA's own cuDNN on the stand-in: the memory of its convolutions and attention, and scripts that use them."""

import json
from pathlib import Path

import pytest

from fsdp_bench.catalog.loader import gpu
from fsdp_bench.simulate.operators.kernel_workspaces import workspace_of
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from tests.on_stand_in.interpreters import allocations_on_gpu, run_on_gpu
from tests.on_stand_in.rehearsing import rehearse_script

MEASURED = Path(__file__).parents[3] / "results/nvidia-h100/kernel_times.json"

CONVOLUTIONS = """
print(torch.backends.cudnn.version())
for dtype, memory_format, (batch, channels, size, out, kernel, stride, padding) in json.load(sys.stdin):
    given = {"dtype": getattr(torch, dtype), "device": "cuda", "memory_format": getattr(torch, memory_format)}
    x = torch.empty(batch, channels, size, size, **given)
    w = torch.empty(out, channels, kernel, kernel, **given)
    rest = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    y = torch.ops.aten.convolution(x, w, None, *rest)
    allocated(lambda: torch.ops.aten.convolution(x, w, None, *rest))
    for mask in ([True, False, False], [False, True, False]):
        allocated(lambda: torch.ops.aten.convolution_backward(y, x, w, None, *rest, mask))
"""
KINDS = (("bfloat16", "channels_last"), ("bfloat16", "contiguous_format"), ("float32", "contiguous_format"))
WORKSPACES = {  # batch, channels, size, output channels, kernel, stride, padding
    (32, 3, 224, 1024, 14, 14, 0): (
        (28901392, 27615248, 48169104), (45678608, 0, 64946320), (55230480, 0, 62455952)),
    (32, 3, 224, 64, 7, 2, 3): (
        (25740304, 25943696, 31761552), (77120528, 77323920, 83242128), (122065680, 0, 134522000)),
    (32, 64, 56, 64, 3, 1, 1): (
        (131, 131, 295107), (25763987, 25763987, 26058963), (25837584, 51527696, 51822803)),
    (32, 256, 14, 256, 3, 1, 1): (
        (131, 131, 131), (7602323, 7602323, 7602323), (16253139, 15204499, 15204368)),
    (4, 320, 64, 320, 3, 1, 1): (
        (131, 131, 131), (22814867, 22814867, 22814867), (45629587, 45629587, 45629587)),
    (32, 1024, 14, 2048, 1, 2, 0): (
        (131, 131, 131), (19267731, 19267731, 19267731), (38535315, 38535315, 39452907)),
}  # fmt: skip
"""Bytes of workspace on an H100, forward, for the input's gradient, for the weight's: cuDNN 9.20's answers to another
program, which described the GPU to it in the same way. 28901392 is the input and the weight with 3 channels padded to
8, and 16 bytes: 2 * 8 * (32 * 224 * 224 + 1024 * 14 * 14) + 16."""


def test_convolutions_take_the_workspaces_that_cudnn_asks_for() -> None:
    cases = [(*kind, shape) for shape in WORKSPACES for kind in KINDS]
    version, *allocations = allocations_on_gpu("H100-SXM", CONVOLUTIONS, cases)
    if version != 92000:
        pytest.skip("these are the answers of cuDNN 9.20")
    found = iter(allocations)
    for dtype, memory_format, shape in cases:
        batch, channels, size, out, kernel, stride, padding = shape
        after = (size + 2 * padding - kernel) // stride + 1
        elements = batch * out * after * after, batch * channels * size * size, out * channels * kernel * kernel
        expected = WORKSPACES[shape][KINDS.index((dtype, memory_format))]
        for count, workspace in zip(elements, expected, strict=True):
            result = count * (2 if dtype == "bfloat16" else 4)
            assert sorted(next(found)) == sorted(filter(None, (result, workspace))), (dtype, memory_format, shape)


ATTENTION = """
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

def peak(run):
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return run(), torch.cuda.max_memory_allocated() - before

torch.empty(1 << 32, dtype=torch.int8, device="cuda")  # blocks are split off a larger one, as where it was measured
for batch, heads, groups, length, head, causal in json.load(sys.stdin):
    sizes = [(batch, length, count, head) for count in (heads, groups, groups)]
    q, k, v = (torch.empty(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for size in sizes)
    [x.requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=groups != heads)
        out, forward = peak(call)
        gradient = torch.empty_like(out)
        _, backward = peak(lambda: torch.autograd.grad(out, (q, k, v), gradient))
    print(json.dumps([forward, backward]))
"""
ROWS = next(rows for name, rows in json.loads(MEASURED.read_text()).items() if name.startswith("attention"))
SHAPES = [row[1:] for row in ROWS if row[0] == "CUDNN_ATTENTION"]


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_attention_takes_what_it_took_on_an_h100(every: int) -> None:
    shapes = SHAPES[::every]
    found = allocations_on_gpu("H100-SXM", ATTENTION, [shape[:6] for shape in shapes])
    assert found == [shape[8:] for shape in shapes]


BACKWARD = """
import torch.nn.functional as F

for batch, heads, groups, length, head in json.load(sys.stdin):
    sizes = [(batch, length, count, head) for count in (heads, groups, groups)]
    q, k, v = (torch.empty(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for size in sizes)
    [x.requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups != heads)
    gradient = torch.empty_like(out)
    allocated(lambda: torch.autograd.grad(out, (q, k, v), gradient))
"""
KINDS_OF_SHAPES = [(1, 4, 4, 512, 64), (2, 4, 2, 333, 128), (1, 4, 4, 512, 192), (1, 4, 2, 512, 80), (3, 4, 1, 1, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["H100-SXM", "B200", "A100-SXM-80GB"])
def test_attentions_workspace_is_predicted_where_pytorch_chooses_the_kernel(name: str) -> None:
    kernels = kernels_on(CUDA, gpu(name))
    for shape, found in zip(KINDS_OF_SHAPES, allocations_on_gpu(name, BACKWARD, KINDS_OF_SHAPES), strict=True):
        batch, heads, groups, length, head = shape
        dims = batch, heads, groups, length, length, head, 1
        predicted = workspace_of("aten::_scaled_dot_product_flash_attention_backward", dims, 2, kernels).after
        results = [2 * batch * count * length * head for count in (heads, groups, groups)]
        assert sorted(found) == sorted([*results, *predicted]), shape


VISION = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(1024, 3072), nn.Linear(1024, 1024)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 16, 64)).permute(2, 0, 3, 1, 4)
        print("fused kernel", torch._fused_sdp_choice(q, k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

patches, blocks = nn.Conv2d(3, 1024, 14, 14, device="cuda"), nn.Sequential(Block(), Block()).cuda()
for module in (patches, *blocks, blocks):
    fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
optimizer = torch.optim.AdamW([*patches.parameters(), *blocks.parameters()])
for _ in range(3):
    images = torch.randn(32, 3, 224, 224, device="cuda")
    blocks(patches(images).flatten(2).transpose(1, 2)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CUDNN_ATTENTION = 3
"""torch.nn.attention.SDPBackend.CUDNN_ATTENTION, which PyTorch prefers on an H100 from cuDNN 9.15.1 on."""


def test_a_vision_transformer_is_rehearsed_with_cudnn_and_twice_the_same(tmp_path: Path) -> None:
    first, second = (rehearse_script(tmp_path, VISION) for _ in range(2))
    assert first.document["memory"] == second.document["memory"]
    assert first.document["fits"] is True
    assert first.document["unsupported"] == {}
    assert f"fused kernel {CUDNN_ATTENTION}" in first.output


SINGLE_OPERATORS = """
import ctypes, torch
from torch import nn

x = torch.empty(4, 8, 16, 16, device="cuda")
for module in (nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)):
    module.cuda()(x.clone().requires_grad_()).sum().backward()
print(ctypes.CDLL(None).stand_in_pointwise_convolutions())
channels_last = x.half().to(memory_format=torch.channels_last)
for run in (lambda: nn.BatchNorm2d(8).cuda()(channels_last), lambda: nn.LSTM(8, 8).cuda()):
    try:
        run()
    except RuntimeError:
        pass
text = ctypes.create_string_buffer(1000)
ctypes.CDLL(None).stand_in_unsupported(text, ctypes.c_size_t(1000))
print(text.value.decode())
"""


def test_batch_normalization_runs_and_what_is_unknown_is_refused_by_name() -> None:
    printed = run_on_gpu("H100-SXM", SINGLE_OPERATORS, "").split()
    refused = ("cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize", "cudnnCreateDropoutDescriptor")
    # one convolution of 1x1: forward, and backward for its input and its weight
    assert printed == ["3", *(word for name in refused for word in (name, "1"))]
