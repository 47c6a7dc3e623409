"""Run training scripts one after another on one GPU, each in a fork of a process that has imported its libraries.

    python run_scripts.py OUT.json SECONDS NAME[:flash] ...

After every optimizer step the allocator's peaks and two clocks are noted, from outside of the script. The last
step is profiled.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent / "scripts"
STEPS = 9  # noted; the tenth is profiled


def observe(result):
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps, begin, state = result["steps"], time.perf_counter(), {}

    def after(optimizer, args, kwargs):
        if type(optimizer).__module__.split(".")[0] == "accelerate":  # it steps the optimizer inside
            return
        issued = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        if state.get("profiler"):
            state["profiler"].__exit__(None, None, None)
            result["profile"] = table(state.pop("profiler"))
            return
        stats = torch.cuda.memory_stats()
        steps.append(
            {
                "seconds": done - state.get("done", begin),
                "host_behind": done - issued,
                "allocated": torch.cuda.memory_allocated(),
                "peak_allocated": stats["allocated_bytes.all.peak"],
                "reserved": torch.cuda.memory_reserved(),
                "peak_reserved": stats["reserved_bytes.all.peak"],
                "peak_active": stats["active_bytes.all.peak"],
                "retries": stats["num_alloc_retries"],
                "segments": stats["segment.all.current"],
            }
        )
        if len(steps) == STEPS and not os.environ.get("NO_PROFILE"):
            free, total = torch.cuda.mem_get_info()
            result["device_used"] = total - free
            profiler = torch.profiler.profile(record_shapes=True)
            profiler.__enter__()
            state["profiler"] = profiler
        torch.cuda.synchronize()
        state["done"] = time.perf_counter()

    register_optimizer_step_post_hook(after)


def table(profiler):
    from torch.autograd import DeviceType

    kernels, operators = {}, {}
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            row = kernels.setdefault(event.name[:300], [0, 0.0])
            row[0] += 1
            row[1] += event.time_range.elapsed_us()
    for average in profiler.key_averages(group_by_input_shape=True):
        if average.self_device_time_total > 0 and average.device_type == DeviceType.CPU:
            operators[f"{average.key} {average.input_shapes}"[:400]] = [
                average.count,
                average.self_device_time_total,
                average.self_cpu_time_total,
            ]
    return {"kernels": kernels, "operators": operators}


def child(name, flash, path):
    result = {"name": name, "flash_only": flash, "steps": []}
    try:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511"
        )
        if name in (
            "hf_llama_autocast",
            "trainer_qwen",
            "peft_lora_llama",
            "gpt2_compiled",
            "gemma2_eager",
            "trl_sft_lora",
            "t5_large",
            "vit_large",
            "resnet50",
            "fabric_fsdp",
        ):
            for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(key)
        import torch

        if flash:
            torch.backends.cuda.enable_cudnn_sdp(False)
        observe(result)
        sys.argv = [f"{name}.py"]
        os.chdir(HERE)
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
        result["outcome"] = "ok"
    except BaseException:
        result["outcome"] = traceback.format_exc()[-3000:]
    try:
        stats = torch.cuda.memory_stats()
        result["end"] = {
            "peak_allocated": stats["allocated_bytes.all.peak"],
            "peak_reserved": stats["reserved_bytes.all.peak"],
        }
    except BaseException:
        pass
    Path(path).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


def main():
    out, seconds, names = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    begin = time.time()
    for module in (
        "torch",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "torch.distributed.fsdp",
        "torch.profiler",
        "transformers",
        "accelerate",
        "peft",
        "datasets",
        "trl",
        "lightning.fabric",
        "timm",
        "torchvision",
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.gpt2.modeling_gpt2",
    ):
        try:
            importlib.import_module(module)
            import torch

            if torch.cuda.is_initialized():
                print("initialized by", module, flush=True)
        except BaseException as error:
            print("no", module, repr(error)[:200], flush=True)
    import torch

    forks = not torch.cuda.is_initialized()
    results = {"torch": torch.__version__, "python": sys.version, "import_seconds": time.time() - begin, "scripts": []}
    print("imported", round(time.time() - begin, 1), flush=True)
    for word in names:
        name, _, flash = word.partition(":")
        if time.time() - begin > seconds:
            print("no time for", word, flush=True)
            continue
        start, path = time.time(), f"/tmp/result_{os.getpid()}.json"
        if forks:
            pid = os.fork()
            if pid == 0:
                child(name, bool(flash), path)
        else:
            pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, __file__, "--child", word, path])
        limit = start + (110 if "compiled" in name else 60)
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.time() > limit:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.02)
        try:
            result = json.loads(Path(path).read_text())
            os.unlink(path)
        except OSError:
            result = {"name": name, "outcome": "killed"}
        result["wall"] = time.time() - start
        results["scripts"].append(result)
        last = (result.get("steps") or [{}])[-1]
        print(
            word,
            str(result["outcome"])[-300:],
            round(result["wall"], 1),
            last.get("peak_allocated"),
            last.get("peak_reserved"),
            last.get("seconds"),
            flush=True,
        )
        Path(out).write_text(json.dumps(results, indent=1))
    print(json.dumps({k: v for k, v in results.items() if k != "scripts"}))


if sys.argv[1] == "--child":
    word, path = sys.argv[2:]
    child(word.partition(":")[0], ":" in word, path)
main()
