"""Times of single operators, float8 products, power under load, allocation retries, and the host, on one GPU.

python rates.py OUT.json
"""

import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F

OUT = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
BEGIN = time.time()


def save(key, value):
    OUT[key] = value
    Path(sys.argv[1]).write_text(json.dumps(OUT, indent=0))
    print(key.split(":")[0], round(time.time() - BEGIN, 1), flush=True)


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
    found = []
    for _ in range(rounds):
        torch.cuda._sleep(2_000_000)  # the host gets ahead
        start.record()
        for _ in range(n):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / n)
    return statistics.median(found)


def operators():
    """[name, dtype, elements of the largest tensor, seconds, kernels]"""
    rows = []

    def add(name, dtype, numel, call):
        try:
            took = seconds(call)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                call()
                torch.cuda.synchronize()
            kernels = [f"{e.name[:160]} x{e.device_time_total:.1f}us" for e in profile.events()][:4]
            rows.append([name, str(dtype)[6:], numel, took, kernels])
        except Exception as error:
            rows.append([name, str(dtype)[6:], numel, None, [repr(error)[:200]]])

    for B, S, D, H in ((2, 4096, 4096, 32), (1, 2048, 2048, 16)):
        T, d = B * S, D // H
        for dtype in (torch.bfloat16, torch.float32):
            make = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)
            x, y, g = make(B, S, D), make(B, S, D), make(B, S, D)
            xf = x.float()
            w, wf, var = make(D), torch.randn(D, device="cuda"), torch.rand(B, S, 1, device="cuda")
            q, cos = make(B, S, H, d).transpose(1, 2), make(1, 1, S, d)
            cosf = cos.float()
            qf = q.float()
            half = q[..., d // 2 :]
            kv = make(B, S, H // 4, d).transpose(1, 2)
            wide = make(B, S, 3 * D)
            mask = torch.rand(S, S, device="cuda") > 0.5
            n = T * D
            calls = {
                "neg": lambda: -x,
                "add": lambda: x + y,
                "add_": lambda: x.add_(1.0),
                "mul scalar": lambda: x * 0.5,
                "mul gpu scalar": lambda: x * var[0, 0, 0],
                "sub": lambda: x - y,
                "silu": lambda: F.silu(x),
                "silu_backward": lambda: torch.ops.aten.silu_backward(g, x),
                "gelu": lambda: F.gelu(x),
                "gelu tanh": lambda: F.gelu(x, approximate="tanh"),
                "gelu_backward": lambda: torch.ops.aten.gelu_backward(g, x),
                "gelu_backward tanh": lambda: torch.ops.aten.gelu_backward(g, x, approximate="tanh"),
                "tanh": lambda: torch.tanh(x),
                "pow 2": lambda: x.pow(2),
                "pow 3": lambda: x.pow(3.0),
                "rsqrt": lambda: torch.rsqrt(x),
                "sigmoid": lambda: torch.sigmoid(x),
                "mul by column": lambda: xf * var,
                "mul by row": lambda: x * w,
                "mul bf16 by fp32 row": lambda: x * wf,
                "mul bf16 by fp32": lambda: x * xf,
                "add to fp32": lambda: xf + x,
                "add_ bf16 to fp32": lambda: xf.add_(x),
                "to fp32": lambda: x.to(torch.float32, copy=True),
                "to bf16": lambda: xf.to(torch.bfloat16),
                "to fp16": lambda: xf.to(torch.float16),
                "fp16 to fp32": lambda: xf.to(torch.float16).float(),
                "copy_ bf16 to fp32": lambda: xf.copy_(x),
                "to fp32 strided": lambda: q.to(torch.float32),
                "rotary mul": lambda: q * cos,
                "rotary mul fp32": lambda: qf * cosf,
                "rotary mul bf16 by fp32": lambda: q * cosf,
                "rotary neg half": lambda: -half,
                "rotary cat": lambda: torch.cat((half, q[..., : d // 2]), -1),
                "rotary cat contiguous": lambda: torch.cat((half.contiguous(), half.contiguous()), -1),
                "rotary add same strides": lambda: q + q,
                "add strided to contiguous": lambda: q + torch.empty_like(q, memory_format=torch.contiguous_format),
                "heads contiguous": lambda: q.contiguous(),
                "chunk contiguous": lambda: wide[..., :D].contiguous(),
                "silu of chunk": lambda: F.silu(wide[..., :D]),
                "mul of chunks": lambda: wide[..., :D] * wide[..., D : 2 * D],
                "repeat_kv": lambda: kv[:, :, None].expand(B, H // 4, 4, S, d).reshape(B, H, S, d),
                "cat rows": lambda: torch.cat((x, y), 0),
                "cat columns": lambda: torch.cat((x, y), -1),
                "cat 3 columns": lambda: torch.cat((x, y, g), -1),
                "split backward cat heads": lambda: torch.cat((q, q, q), -1),
                "slice_backward": lambda: torch.ops.aten.slice_backward(half, q.shape, 3, d // 2, d, 1),
                "zeros_like": lambda: torch.zeros_like(x),
                "fill_": lambda: x.zero_(),
                "mean -1": lambda: xf.mean(-1, keepdim=True),
                "sum -1 fp32": lambda: xf.sum(-1, keepdim=True),
                "sum rows": lambda: x.view(T, D).sum(0),
                "sum rows 3d": lambda: x.sum((0, 1)),
                "sum all": lambda: x.sum(),
                "sum batch": lambda: x.sum(0),
                "amax": lambda: x.abs().max(),
                "dropout": lambda: F.dropout(x, 0.1),
                "native_dropout_backward": lambda: torch.ops.aten.native_dropout_backward(g, x > 0, 1.1),
                "masked_fill": lambda: x.masked_fill(x > 1, 0.0),
                "where": lambda: torch.where(mask, 0.0, 1.0),
                "embedding": lambda: F.embedding(ids, table),
                "embedding_backward": lambda: torch.ops.aten.embedding_dense_backward(
                    g.view(T, D), ids, 32000, -1, False
                ),
                "index rows": lambda: x.view(T, D)[ids % T],
                "index_select": lambda: x.view(T, D).index_select(0, ids % T),
                "layer_norm": lambda: F.layer_norm(x, (D,), w, w),
                "layer_norm_backward": lambda: torch.ops.aten.native_layer_norm_backward(
                    g, x, [D], mean, rstd, w, w, [True, True, True]
                ),
                "rms_norm": lambda: torch.ops.aten._fused_rms_norm(x, [D], w, 1e-5),
                "rms_norm_backward": lambda: torch.ops.aten._fused_rms_norm_backward(g, x, [D], rstd, w, [True, True]),
                "softmax": lambda: torch.softmax(x, -1),
                "softmax backward": lambda: torch.ops.aten._softmax_backward_data(g, y, -1, dtype),
                "softmax bf16 to fp32": lambda: torch.softmax(x, -1, dtype=torch.float32),
            }
            ids, table = torch.randint(32000, (T,), device="cuda"), make(32000, D)
            _, mean, rstd = torch.ops.aten.native_layer_norm(x, [D], w, w, 1e-5)
            for name, call in calls.items():
                add(name, dtype, n, call)
            x = y = g = xf = q = qf = wide = half = None
    for rows_, V in ((4096, 32000), (4096, 50257), (4096, 128256)):
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.randn(rows_, V, device="cuda", dtype=dtype)
            labels = torch.randint(V, (rows_,), device="cuda")
            lp = torch.log_softmax(logits, -1)
            total = torch.tensor(1.0, device="cuda", dtype=dtype)
            for name, call in {
                "log_softmax": lambda: torch.log_softmax(logits, -1),
                "log_softmax_backward": lambda: torch.ops.aten._log_softmax_backward_data(lp, lp, -1, dtype),
                "nll_forward": lambda: torch.ops.aten.nll_loss_forward(lp, labels, None, 1, -100),
                "nll_backward": lambda: torch.ops.aten.nll_loss_backward(
                    total, lp, labels, None, 1, -100, torch.tensor(float(rows_), device="cuda", dtype=dtype)
                ),
                "to fp32": lambda: logits.to(torch.float32, copy=True),
                "to bf16": lambda: logits.to(torch.bfloat16, copy=True),
                "contiguous shifted": lambda: logits.view(2, -1, V)[:, :-1].contiguous(),
            }.items():
                add(f"{name} {V}", dtype, rows_ * V, call)
            logits = lp = None
    for count, numel in ((256, 1 << 20), (32, 1 << 24)):
        p = [torch.randn(numel, device="cuda") for _ in range(count)]
        g = [torch.randn(numel, device="cuda") for _ in range(count)]
        a, b = [torch.zeros_like(t) for t in p], [torch.zeros_like(t) for t in p]
        half = [t.bfloat16() for t in g]
        steps = [torch.ones((), device="cuda") for _ in range(count)]
        for name, call in {
            "_foreach_norm": lambda: torch._foreach_norm(g),
            "_foreach_mul_": lambda: torch._foreach_mul_(g, 1.0),
            "_foreach_mul_ tensor": lambda: torch._foreach_mul_(g, steps[0]),
            "_foreach_add": lambda: torch._foreach_add_(p, g),
            "_foreach_addcdiv_": lambda: torch._foreach_addcdiv_(p, a, g, -0.1),
            "_foreach_sqrt": lambda: torch._foreach_sqrt(b),
            "_foreach_lerp_": lambda: torch._foreach_lerp_(a, g, 0.1),
            "_foreach_copy_ bf16 to fp32": lambda: torch._foreach_copy_(g, half),
            "_foreach_copy_ fp32 to bf16": lambda: torch._foreach_copy_(half, g),
            "_fused_adamw_": lambda: torch._fused_adamw_(
                p,
                g,
                a,
                b,
                [],
                steps,
                lr=0.0,
                beta1=0.9,
                beta2=0.95,
                weight_decay=0.1,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            ),
        }.items():
            add(f"{name} {count}", torch.float32, count * numel, call)
        p = g = a = b = half = None
    save("operators: name, dtype, elements, seconds, kernels", rows)


def products():
    """[kind, m, n, k, seconds]"""
    rows = []
    e4 = torch.float8_e4m3fn
    for m in (4096, 8192, 16384):
        for n, k in ((4096, 4096), (6144, 4096), (14336, 4096), (28672, 4096), (4096, 14336), (8192, 8192)):
            a, b = (
                torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
                torch.randn(n, k, device="cuda", dtype=torch.bfloat16),
            )
            one = torch.tensor(1.0, device="cuda")
            ra, rb = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
            a8, b8 = a.to(e4), b.to(e4)
            for name, call in {
                "bf16": lambda: a @ b.t(),
                "tensorwise fast": lambda: torch._scaled_mm(
                    a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
                ),
                "tensorwise": lambda: torch._scaled_mm(
                    a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=False
                ),
                "rowwise fast": lambda: torch._scaled_mm(
                    a8, b8.t(), ra, rb, out_dtype=torch.bfloat16, use_fast_accum=True
                ),
                "rowwise": lambda: torch._scaled_mm(a8, b8.t(), ra, rb, out_dtype=torch.bfloat16, use_fast_accum=False),
            }.items():
                try:
                    rows.append([name, m, n, k, seconds(call, 3, 0.01)])
                except Exception as error:
                    rows.append([name, m, n, k, repr(error)[:200]])
    save("products: kind, m, n, k, seconds", rows)


def power():
    """Samples of power, clocks and reasons of the clock while one kernel repeats, with its rate."""
    import pynvml as nv

    nv.nvmlInit()
    handle = nv.nvmlDeviceGetHandleByIndex(0)
    found = {"limit_w": nv.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3}
    try:
        found["limits_w"] = [one / 1e3 for one in nv.nvmlDeviceGetPowerManagementLimitConstraints(handle)]
    except Exception as error:
        found["limits_w"] = repr(error)
    sides = 8192
    dense = lambda dtype: torch.randn(sides, sides, device="cuda").to(dtype)
    kinds = {
        "zeros": lambda x: x.zero_(),
        "random": lambda x: x,
        "ones": lambda x: x.fill_(1.0),
        "few bits": lambda x: x.copy_((x > 0).to(x.dtype)),
        "half zeros": lambda x: x.mul_((torch.rand_like(x.float()) > 0.5).to(x.dtype)),
        "nine tenths zeros": lambda x: x.mul_((torch.rand_like(x.float()) > 0.9).to(x.dtype)),
        "small integers": lambda x: x.copy_(torch.randint(-4, 5, x.shape, device="cuda").to(x.dtype)),
    }
    runs = {}
    for kind, fill in kinds.items():
        a, b = fill(dense(torch.bfloat16)), fill(dense(torch.bfloat16))
        runs[f"bf16 product of {kind}"] = (lambda a=a, b=b: torch.mm(a, b), 2 * sides**3)
    f = dense(torch.float32)
    runs["fp32 product"] = (lambda: torch.mm(f, f), 2 * sides**3)
    big = torch.randn(1 << 29, device="cuda")
    into = torch.empty_like(big)
    runs["copy"] = (lambda: into.copy_(big), 8 << 29)
    runs["strided multiply"] = (lambda: torch.mul(big.view(-1, 4096), big[:4096], out=into.view(-1, 4096)), 8 << 29)
    e4a, e4b, one = (
        dense(torch.bfloat16).to(torch.float8_e4m3fn),
        dense(torch.bfloat16).to(torch.float8_e4m3fn).t(),
        torch.tensor(1.0, device="cuda"),
    )
    runs["fp8 product of random"] = (
        lambda: torch._scaled_mm(e4a, e4b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        2 * sides**3,
    )
    torch.cuda.synchronize()
    time.sleep(1.0)
    found["idle"] = [nv.nvmlDeviceGetPowerUsage(handle) / 1e3, nv.nvmlDeviceGetClockInfo(handle, 1)]
    for name, (call, work) in runs.items():
        samples, done = [], threading.Event()

        def sample():
            while not done.is_set():
                try:
                    samples.append(
                        [
                            nv.nvmlDeviceGetPowerUsage(handle) / 1e3,
                            nv.nvmlDeviceGetClockInfo(handle, 1),
                            nv.nvmlDeviceGetClockInfo(handle, 2),
                            nv.nvmlDeviceGetCurrentClocksEventReasons(handle)
                            if hasattr(nv, "nvmlDeviceGetCurrentClocksEventReasons")
                            else nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                            nv.nvmlDeviceGetTemperature(handle, 0),
                        ]
                    )
                except Exception as error:
                    samples.append(repr(error)[:80])
                time.sleep(0.1)

        voltage = ""
        took = seconds(call, 3)
        thread = threading.Thread(target=sample)
        begin, count = time.perf_counter(), 0
        thread.start()
        asked = None
        while time.perf_counter() - begin < 2.2:
            for _ in range(20):
                call()
            count += 20
            if asked is None and time.perf_counter() - begin > 1.2:
                asked = subprocess.Popen(
                    ["nvidia-smi", "-q", "-d", "VOLTAGE,POWER,CLOCK"], stdout=subprocess.PIPE, text=True
                )
            torch.cuda.synchronize()
        spent = time.perf_counter() - begin
        done.set()
        thread.join()
        try:
            voltage = asked.communicate(timeout=10)[0]
        except Exception as error:
            voltage = repr(error)
        found[name] = {"rate": work * count / spent, "first_rate": work / took, "samples": samples, "smi": voltage}
    save("power", found)


def retries():
    """[cached segments, bytes of each, bytes asked for, seconds of the allocation that frees them, seconds of a plain cudaMalloc, retries]"""
    rows = []
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[0]
    for count, size in ((4, 4 << 30), (16, 1 << 30), (64, 1 << 28), (256, 1 << 26), (512, 1 << 25), (8, 1 << 28)):
        for attempt in range(2):
            torch.cuda.empty_cache()
            before = torch.cuda.memory_stats()["num_alloc_retries"]
            cached = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
            free = torch.cuda.mem_get_info()[0]
            ballast = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
            del cached
            torch.cuda.synchronize()
            ask = min(count * size, 8 << 30) if size < 4 << 30 else 8 << 30
            ask = max(ask, 3 << 29)
            begin = time.perf_counter()
            big = torch.empty(ask, dtype=torch.uint8, device="cuda")
            took = time.perf_counter() - begin
            number = torch.cuda.memory_stats()["num_alloc_retries"] - before
            del big, ballast
            torch.cuda.empty_cache()
            begin = time.perf_counter()
            big = torch.empty(ask, dtype=torch.uint8, device="cuda")
            plain = time.perf_counter() - begin
            del big
            rows.append([count, size, ask, took, plain, number])
    more = []
    for size in (1 << 21, 20 << 20, 1 << 26, 1 << 28, 1 << 30, 4 << 30, 16 << 30):
        torch.cuda.empty_cache()
        begin = time.perf_counter()
        one = torch.empty(size, dtype=torch.uint8, device="cuda")
        made = time.perf_counter() - begin
        del one
        begin = time.perf_counter()
        torch.cuda.empty_cache()
        more.append([size, made, time.perf_counter() - begin])
    save("retries: cached segments, bytes of each, bytes asked for, seconds, seconds without, retries", rows)
    save("cudaMalloc and empty_cache: bytes, seconds, seconds", more)


def host():
    """[operator, device, seconds the host needs for one call]"""
    rows = []
    for device in ("cpu", "meta", "cuda"):
        x = torch.randn(16, 64, device=device, requires_grad=True)
        w = torch.randn(64, 64, device=device, requires_grad=True)
        plain, weight = x.detach(), w.detach()
        b = torch.randn(64, device=device)
        norm = torch.nn.LayerNorm(64, device=device)
        linear = torch.nn.Linear(64, 64, device=device)
        block = torch.nn.Sequential(norm, linear, torch.nn.GELU(), torch.nn.Linear(64, 64, device=device))
        many = [torch.randn(64, device=device) for _ in range(32)]

        def back():
            y = x
            for _ in range(20):
                y = y * 1.5
            return y.sum()

        losses = [back() for _ in range(30)]
        taken = iter(losses)
        for name, call, number in (
            ("add", lambda: plain + 1, 300),
            ("mul with grad", lambda: x * x, 300),
            ("mm", lambda: plain @ weight, 300),
            ("linear with grad", lambda: F.linear(x, w, b), 300),
            ("layer_norm module", lambda: norm(x), 300),
            ("block of 4 modules", lambda: block(x), 100),
            ("view and transpose", lambda: plain.view(4, 4, 64).transpose(1, 2), 300),
            ("backward of 21 operators", lambda: next(taken).backward(), 15),
            ("_foreach_add_ of 32", lambda: torch._foreach_add_(many, 1.0), 200),
        ):
            try:
                for _ in range(5):
                    call()
                if device == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda._sleep(400_000_000)
                begin = time.perf_counter()
                for _ in range(number):
                    call()
                took = (time.perf_counter() - begin) / number
                if device == "cuda":
                    torch.cuda.synchronize()
                rows.append([name, device, took])
            except Exception as error:
                rows.append([name, device, repr(error)[:100]])
    idle = []
    x = torch.randn(16, 64, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(2000):
        x = x + 1
    torch.cuda.synchronize()
    idle = (time.perf_counter() - begin) / 2000
    save("host: operator, device, seconds", rows)
    save("seconds of a tiny operator before an idle GPU", idle)


for part in (operators, products, retries, power, host):
    if len(sys.argv) > 2 and part.__name__ not in sys.argv[2:]:
        continue
    try:
        part()
    except Exception as error:
        save(f"{part.__name__} failed", repr(error))
    torch.cuda.empty_cache()
