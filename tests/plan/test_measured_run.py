"""A user's own run, read from a number, a log, a table or a trace; what is in none of them is refused in one line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.plan.measured_run import read_run
from fsdp_bench.spec.errors import SpecError
from tests.conftest import message_of

TITAN = "".join(
    f"[rank0]:[titan] 2026-11-01 10:00:{2 * step},000 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: 10.1"
    f"  \x1b[33mmemory: 47.28GiB(59.77%)  \x1b[34mtps: {tps:,}  \x1b[36mtflops: 300.20  \x1b[35mmfu: 30.36%\x1b[39m\n"
    for step, tps in ((1, 412), (10, 5762), (20, 5760), (30, 5764))
)
"""Lines as torchtitan's components/metrics.py prints them; the first has the warm-up in it."""


@pytest.mark.parametrize(
    ("text", "tokens", "seconds"),
    [("5,762tok/s", 5762, None), ("5762 tokens/s", 5762, None), ("0.71s", None, 0.71), ("712ms", None, 0.712)],
)
def test_a_number_says_its_unit(text: str, tokens: float | None, seconds: float | None) -> None:
    run = read_run(text)
    assert (run.tokens_per_second, run.step_seconds) == (tokens, seconds)


@pytest.mark.parametrize(
    ("name", "content", "tokens", "seconds"),
    [
        ("titan.log", TITAN, 5762, None),
        ("own.log", "warm: 9 tokens/sec\n{'loss': 3.1, 'train_tokens_per_second': 5762.0}\n", 5762, None),
        ("own.log", "step 1 step_time: 9.1 s\nstep 2 step_time: 712 ms\nstep 3 step_time: 712 ms\n", None, 0.712),
        ("own.log", " 10%|#   | 1/10 [00:09<01:21, 9.10s/it]\n 20%|##  | 2/10 [00:10<00:57, 1.42s/it]\n", None, 1.42),
        ("own.log", " 10%|#   | 1/10 [00:09<01:21, 9.10s/it]\n 20%|##  | 2/10 [00:10<00:57, 2.50it/s]\n", None, 0.4),
        ("own.jsonl", '{"step": 2, "tokens_per_sec_per_gpu": 5762}\n', 5762, None),
        ("t.csv", "step,time_metrics/end_to_end(s)\n1,9.5\n2,0.71\n3,0.73\n", None, 0.72),
        ("t.csv", "step,step_time_ms\n1,9500\n2,710\n", None, 0.71),
        ("state.json", '{"global_step": 50, "log_history": [{"loss": NaN}, {"train_runtime": 80.0}]}', None, 1.6),
    ],
)  # fmt: skip
def test_a_log_gives_its_median_without_the_warm_up(
    name: str, content: str, tokens: float | None, seconds: float | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    run = read_run(tmp_path / name)
    assert (run.tokens_per_second, run.step_seconds) == (tokens, pytest.approx(seconds) if seconds else None)


def test_a_column_is_named_and_its_unit_too_where_the_name_does_not_say_it(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,b,tps\n1,0.9,5\n2,0.7,6\n3,0.7,6\n")
    assert read_run(table, "b=s").step_seconds == 0.7
    assert read_run(table, "b=ms").step_seconds == 0.0007
    assert read_run(table).tokens_per_second == 6
    assert "in which unit? --column 'b=tok/s'" in message_of(lambda: read_run(table, "b"))
    assert "0 columns are 'c'; --column, of a, b, tps" in message_of(lambda: read_run(table, "c"))
    table.write_text("b\nfast\n")
    assert "column 'b': could not convert" in message_of(lambda: read_run(table, "b=s"))


@pytest.mark.parametrize("ending", ["json", "toml"])
def test_a_file_may_have_the_setup_beside_the_measured_value(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"run.{ending}"
    values = {"model": "Llama-3.1-8B", "nodes": 2, "tokens_per_second": 5762}
    path.write_text(
        json.dumps(values) if ending == "json" else 'model="Llama-3.1-8B"\nnodes=2\ntokens_per_second=5762\n'
    )
    run = read_run(path)
    assert (run.tokens_per_second, dict(run.options)) == (5762, {"model": "Llama-3.1-8B", "nodes": 2})


def kernel(name: str, begin: float, took: float, cat: str = "kernel", device: int = 0) -> dict[str, Any]:
    """An event as torch.profiler writes it; times in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": took, "args": {"device": device, "stream": 7}}


STEPS = [
    {"ph": "X", "cat": cat, "name": f"ProfilerStep#{number}", "ts": 500.0 * number, "dur": 500.0}
    for number in (4, 5)
    for cat in ("user_annotation", "gpu_user_annotation")
]


def trace(path: Path, events: list[dict[str, Any]]) -> Path:
    """Write a Chrome trace with some metadata, as torch.profiler does."""
    data = json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name", "args": {}}, *events]})
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_gives_the_seconds_of_each_class_and_of_gaps(name: str, tmp_path: Path) -> None:
    """Names are those of traces of an H100 and an A100; two steps; another GPU's kernels are not counted."""
    events = [
        kernel("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 2000, 100),
        kernel("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn", 2100, 100),
        kernel("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(...)", 2200, 40),
        kernel("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(...)", 2240, 60),
        kernel("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", 2300, 20),
        kernel("fmha_cutlassB_bf16_aligned_64x64_k128_sm80(...)", 2320, 20),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2000, 300),
        kernel("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", 2400, 10),
        kernel("void at::native::vectorized_elementwise_kernel<4, ...>", 2410, 30),
        kernel("Memcpy HtoD (Pinned -> Device)", 2440, 6, "gpu_memcpy"),
        kernel("Memcpy DtoD (Device -> Device)", 2446, 2, "gpu_memcpy"),
        kernel("Memset (Device)", 2996, 4, "gpu_memset"),
        kernel("ncclDevKernel_AllGather_RING_LL(...)", 2000, 900, device=1),
    ]
    run = read_run(trace(tmp_path / name, [*STEPS, *events]))
    micro = {kind: round(seconds * 1e6, 6) for kind, seconds in run.class_seconds.items()}
    assert micro == {
        "matrix_products": 120,
        "attention": 50,
        "communication": 150,
        "optimizer": 5,
        "other_operators": 18,
        "copies": 3,
    }
    assert run.step_seconds == pytest.approx(500e-6)
    assert run.idle_seconds == pytest.approx((60 + 2996 - 2448) * 1e-6 / 2)


def test_steps_are_also_counted_by_the_optimizers_steps(tmp_path: Path) -> None:
    updates = [{"ph": "X", "cat": "user_annotation", "name": "Optimizer.step#AdamW.step", "ts": 1, "dur": 1}] * 4
    run = read_run(trace(tmp_path / "t.json", [*updates, kernel("gemm", 0, 400)]))
    assert run.class_seconds == {"matrix_products": pytest.approx(1e-4)}


def test_what_is_no_measurement_is_refused_in_one_line(tmp_path: Path) -> None:
    def said(name: str, content: str) -> str:
        (tmp_path / name).write_text(content)
        return message_of(lambda: read_run(tmp_path / name))

    assert "nothing in it like 'tps: 5,762'" in said("a.log", "loss: 3.2\n")
    assert "a trace without kernels" in said("a.json", json.dumps({"traceEvents": STEPS}))
    assert "a trace without ProfilerStep" in said("a.json", json.dumps({"traceEvents": [kernel("gemm", 0, 1)]}))
    assert "cannot be read: Not a gzipped file" in said("a.gz", "x")
    assert "cannot be read: " in said("a.json", '{"traceEvents": [3]}')
    assert "no `train_runtime`" in said("a.json", '{"global_step": 4, "log_history": [{"loss": 1}]}')
    assert "no `train_runtime`" in said("a.json", '{"global_step": 4, "log_history": [{"train_runtime": NaN}]}')
    assert "cannot be read" in said("a.json", "[" * 100_000)
    assert "nothing in it" in said("a.toml", "model = 'gpt2'")
    assert "0 columns are tokens/s or seconds; --column, of step, loss" in said("a.csv", "step,loss\n1,2\n")
    assert "0 tok/s is not allowed" in said("b.log", "tps: 0\n")
    assert "inf tok/s is not allowed" in said("b.log", "tps: 9e999\n")
    assert "is no file and no measurement" in message_of(lambda: read_run("fast"))
    with pytest.raises(SpecError, match="is not allowed; a number greater than 0"):
        read_run("0s")
