"""Times of kernels that no calibration has: few rows, pointwise chains, both attentions; host time of operators."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

OUT = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}


def seconds(call, rounds=5, target=0.004):
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    n = max(1, min(200, int(target / max(start.elapsed_time(end) / 1e3, 1e-6))))
    best = []
    for _ in range(rounds):
        torch.cuda._sleep(2_000_000)  # the host gets ahead
        start.record()
        for _ in range(n):
            call()
        end.record()
        torch.cuda.synchronize()
        best.append(start.elapsed_time(end) / 1e3 / n)
    return sorted(best)[len(best) // 2]


def host_seconds(call, n=300):
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    begin = time.perf_counter()
    for _ in range(n):
        call()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return took / n


rows = []
for dtype in (torch.bfloat16, torch.float32):
    for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (128256, 4096)):
        if dtype == torch.float32 and n > 20000:
            continue
        for m in (1, 8, 16, 35, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
            if dtype == torch.float32 and m > 1024:
                continue
            x, w = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype)
            g = torch.randn(m, n, device="cuda", dtype=dtype)
            rows.append(
                [
                    str(dtype)[6:],
                    m,
                    n,
                    k,
                    seconds(lambda: x @ w.t()),
                    seconds(lambda: g @ w),
                    seconds(lambda: g.t() @ x),
                ]
            )
OUT["products: dtype, rows, n, k, forward, input's gradient, weight's gradient"] = rows

rows = []
for tokens, dim, heads in ((2048, 2048, 32), (4096, 4096, 32), (8192, 4096, 32), (8192, 8192, 64), (4096, 2048, 16)):
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(1, tokens, dim, device="cuda", dtype=dtype)
        y = torch.randn_like(x)
        xf = x.float()
        var = torch.rand(1, tokens, 1, device="cuda")
        w = torch.randn(dim, device="cuda", dtype=dtype)
        q = torch.randn(1, tokens, heads, dim // heads, device="cuda", dtype=dtype).transpose(1, 2)
        cos = torch.randn(1, 1, tokens, dim // heads, device="cuda", dtype=dtype)
        h = dim // heads // 2
        q1, q2 = q[..., :h], q[..., h:]
        b = {
            "add": lambda: x + y,
            "mul": lambda: x * y,
            "mul_row": lambda: xf * var,
            "mul_weight": lambda: x * w,
            "to_float": lambda: x.float(),
            "to_bf16": lambda: xf.to(torch.bfloat16),
            "pow": lambda: xf.pow(2),
            "mean": lambda: xf.mean(-1, keepdim=True),
            "rsqrt": lambda: torch.rsqrt(var),
            "silu": lambda: F.silu(x),
            "gelu": lambda: F.gelu(x),
            "neg_strided": lambda: -q2,
            "cat_halves": lambda: torch.cat((q2, q1), -1),
            "mul_rotary": lambda: q * cos,
            "add_rotary": lambda: q + q,
            "contiguous_heads": lambda: q.contiguous(),
            "clone": lambda: x.clone(),
            "add_mixed": lambda: x + xf,
            "mul_mixed": lambda: x * xf,
            "sum_tokens": lambda: x.view(-1, dim).sum(0),
            "sum_tokens_of_product": lambda: (xf).view(-1, dim).sum(0),
            "layer_norm": lambda: F.layer_norm(x, (dim,), w, w),
            "rms_norm": lambda: F.rms_norm(x, (dim,), w),
            "softmax": lambda: torch.softmax(x, -1),
            "dropout": lambda: F.dropout(x, 0.1),
            "zero": lambda: x.zero_() if False else torch.zeros_like(x),
            "copy_": lambda: y.copy_(x),
        }
        for name, call in b.items():
            rows.append([name, str(dtype)[6:], tokens, dim, heads, seconds(call)])
OUT["pointwise: operator, dtype, tokens, width, heads, seconds"] = rows

rows = []
for batch, heads, kv, length, head in (
    (1, 32, 8, 4096, 128),
    (2, 32, 8, 4096, 128),
    (2, 32, 32, 2048, 64),
    (8, 16, 16, 1024, 64),
    (1, 32, 8, 8192, 128),
    (1, 32, 8, 16384, 128),
    (4, 16, 16, 512, 64),
    (1, 40, 40, 2048, 128),
):
    for causal in (True, False):
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            try:
                q = (
                    torch.randn(batch, length, heads, head, device="cuda", dtype=torch.bfloat16)
                    .transpose(1, 2)
                    .requires_grad_()
                )
                k = (
                    torch.randn(batch, length, kv, head, device="cuda", dtype=torch.bfloat16)
                    .transpose(1, 2)
                    .requires_grad_()
                )
                v = (
                    torch.randn(batch, length, kv, head, device="cuda", dtype=torch.bfloat16)
                    .transpose(1, 2)
                    .requires_grad_()
                )
                if backend == SDPBackend.EFFICIENT_ATTENTION and kv != heads:
                    continue
                with sdpa_kernel(backend):
                    call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv != heads)
                    forward = seconds(call)
                    before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                    out = call()
                    peak = torch.cuda.max_memory_allocated() - before
                    g = torch.randn_like(out)
                    before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                    torch.autograd.grad(out, (q, k, v), g, retain_graph=True)
                    peak_backward = torch.cuda.max_memory_allocated() - before
                    backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True))
                rows.append(
                    [backend.name, batch, heads, kv, length, head, causal, forward, backward, peak, peak_backward]
                )
            except RuntimeError as error:
                rows.append([backend.name, batch, heads, kv, length, head, causal, str(error)[:200]])
OUT[
    "attention: backend, batch, heads, kv, length, head, causal, forward, backward, bytes at the peak, at the peak of backward"
] = rows

with torch.no_grad():
    pass
x, w = torch.randn(16, 64, device="cuda", requires_grad=True), torch.randn(64, 64, device="cuda", requires_grad=True)
OUT["host seconds: add, mul, mm, linear with grad, layer_norm, sdpa"] = [
    host_seconds(lambda: x.detach() + 1),
    host_seconds(lambda: x * x),
    host_seconds(lambda: x @ w),
    host_seconds(lambda: F.linear(x, w)),
    host_seconds(lambda: F.layer_norm(x, (64,))),
    host_seconds(
        lambda: F.scaled_dot_product_attention(x[None, None].half(), x[None, None].half(), x[None, None].half())
    ),
]
Path(sys.argv[1]).write_text(json.dumps(OUT, indent=0))
