"""The budgets of the design, measured on this machine: ``make budgets``. Prints figures; decides nothing.

Whole processes are timed alternately with a bare Python process, and the ratio is printed beside the seconds,
because machines differ and are noisy. For what takes milliseconds, the median counts; the fastest run is beside it.

Commands run as they do from the second time on: Python keeps its bytecode, also where PYTHONDONTWRITEBYTECODE is set.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fsdp_bench.simulate.step import SimulatedSteps

RUNS = 15
TRIALS = 12

SWEEP = f"""
[run]
device = "cpu"
steps = 1
communication_steps = 0
[grid]
model = "tiny"
world_size = 2
sequence_length = 16
seed = {list(range(TRIALS))}
[models.tiny]
family = "llama"
num_hidden_layers = 2
hidden_size = 32
num_attention_heads = 2
intermediate_size = 64
vocab_size = 128
"""


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def process_seconds(words: list[str], environment: dict[str, str] = ENVIRONMENT) -> float:
    """Time one whole process, which may end with 3: a setup that does not fit."""
    begin = time.perf_counter()
    done = subprocess.run(words, capture_output=True, env=environment)
    if done.returncode not in (0, 3):
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
    return time.perf_counter() - begin


def whole_process(name: str, words: list[str], budget_seconds: float) -> None:
    """Time a command and a bare Python in turn; print medians and their ratio."""
    bare = [sys.executable, "-c", "pass"]
    process_seconds(words)
    pairs = [(process_seconds(words), process_seconds(bare)) for _ in range(RUNS)]
    seconds = statistics.median(pair[0] for pair in pairs)
    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
    print(f"{name:<34}{seconds:7.3f} s   budget {budget_seconds:.2f} s   {ratio:5.1f} x a bare Python")


def sweep_overhead() -> None:
    """Run a sweep of tiny trials; print what it adds to the workers' own start and steps."""
    from fsdp_bench.sweep.results.load import read_records

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "budget.toml"
        file.write_text(SWEEP)
        words = [sys.executable, "-m", "fsdp_bench.cli.main", "sweep", str(file), "--results", folder, "--no-charts"]
        subprocess.run(words, check=True, capture_output=True)
        records = read_records(Path(folder))
    # The first trial also starts the fork server, which imports torch once for the sweep.
    overheads = sorted(record.overhead_seconds or 0.0 for record in records[1:])
    first = records[0].overhead_seconds or 0.0
    print(
        f"{'sweep, overhead per trial':<34}{statistics.median(overheads):7.3f} s   budget 0.30 s   "
        f"worst {overheads[-1]:.3f} s, first (imports torch) {first:.2f} s, {len(records)} trials"
    )


def one_prediction() -> None:
    """Time predict_memory for an 80-layer model in this process, for each api and checkpointing mode.

    Each time for another sequence length: what is kept of the last prediction is no help.
    """
    from fsdp_bench.catalog.loader import model
    from fsdp_bench.plan.estimate import predict_memory
    from fsdp_bench.spec.setup import Api, Checkpointing, Precision, TrainSetup

    shape = model("Llama-3.1-70B").shape()
    for api in Api:
        for checkpointing in Checkpointing:
            seconds = []
            for further in range(10 * RUNS):
                setup = TrainSetup(
                    api=api,
                    world_size=64,
                    sequence_length=4096 + further,
                    checkpointing=checkpointing,
                    precision=Precision.parse("bf16-mixed"),
                )
                begin = time.perf_counter()
                predict_memory(SimulatedSteps(shape, setup))
                seconds.append(time.perf_counter() - begin)
            name = f"prediction, 80 layers, {api.value} {checkpointing.value}"
            fastest, median = 1e3 * min(seconds), 1e3 * statistics.median(seconds)
            print(f"{name:<46}{median:6.2f} ms   budget 3 ms   fastest {fastest:.2f} ms")


def dry_run_of_8b(api: str) -> None:
    """Time a dry run of an 8B model at world 64 as a whole process, once."""
    words = [sys.executable, "-m", "fsdp_bench.cli.main", "dry-run", "--model", "Llama-3.1-8B", "--api", api]
    words += ["--world-size", "64", "--seq", "4096", "--precision", "bf16-mixed"]
    print(f"{'dry-run, 8B, world 64, ' + api:<34}{process_seconds(words):7.1f} s   budget 15 s")


def largest_models(server: str) -> None:
    """Time max-size with all settings of one server as a whole process, once."""
    words = [sys.executable, "-m", "fsdp_bench.cli.main", "max-size", "--server", server]
    for option in ("strategy", "precision", "offload", "checkpointing"):
        words += [f"--{option}", "all"]
    print(f"{'max-size, all settings, ' + server:<38}{process_seconds(words):6.1f} s   budget 15 s, 150 settings")


def first_command(words: list[str], budget_seconds: float) -> None:
    """Time a command without anything that an earlier one has kept, as a whole process, once."""
    with tempfile.TemporaryDirectory() as home:
        seconds = process_seconds(words, {**ENVIRONMENT, "HOME": home, "XDG_CACHE_HOME": f"{home}/.cache"})
    print(f"{'fsdp-bench ' + words[3] + ', nothing kept':<34}{seconds:7.3f} s   budget {budget_seconds:.2f} s")


def plan_of(model: str) -> None:
    """Time a plan over the whole catalogue on 1 to 64 nodes as a whole process, once."""
    words = [sys.executable, "-m", "fsdp_bench.cli.main", "plan", "--model", model, "--tokens", "1T"]
    words += ["--deadline", "60d"]
    print(f"{'plan, every server, ' + model:<38}{process_seconds(words):6.1f} s   budget 10 s")


def rehearsals() -> None:
    """Time rehearsals of one command, two at a time: of a script that does nothing, and of a 7.6B model.

    The first one of a command pays for imports. Needs PyTorch's CUDA build, as in ``make test-rehearsal``.
    """
    own = Path(__file__).parents[1]
    python = own / ".venv-rehearsal" / "bin" / "python"
    if not python.exists():
        print(f"rehearsals are not timed: no {python}")
        return
    begin = [sys.executable, "-m", "fsdp_bench.cli.main", "rehearse", "--server", "p5.48xlarge", "--each"]
    model = [str(python), "-m", "torch.distributed.run", str(own / "tests/on_stand_in/scripts/fsdp2_loop.py"), "{n}"]
    nothing = [str(python), "-c", "import sys", "{n}"]

    def seconds(times: int, command: list[str]) -> float:
        words = [*begin, f"n={','.join(map(str, range(times)))}", "--", *command]
        return process_seconds(words, {**ENVIRONMENT, "LAYERS": "28"})

    seconds(1, nothing)  # builds the stand-in
    first, twenty = seconds(1, nothing), seconds(21, nothing)
    print(f"{'rehearse, an empty script':<34}{first:7.2f} s   budget 5 s")
    print(f"{'  each further one':<34}{(twenty - first) / 20:7.2f} s   budget 0.5 s")
    print(f"{'rehearse, 7.6B, ten times':<34}{seconds(10, model):7.1f} s   budget 60 s")


PREDICT = ["predict", "--model", "Llama-3.1-8B", "--server", "p5.48xlarge", "--precision", "bf16-mixed"]

if __name__ == "__main__":
    whole_process("fsdp-bench --help", [sys.executable, "-m", "fsdp_bench.cli.main", "--help"], 0.15)
    whole_process("fsdp-bench predict", [sys.executable, "-m", "fsdp_bench.cli.main", *PREDICT], 0.40)
    advice = ["predict", "--model", "Llama-3.1-70B", "--server", "p4d.24xlarge"]
    whole_process("fsdp-bench predict, does not fit", [sys.executable, "-m", "fsdp_bench.cli.main", *advice], 2.0)
    default = ["max-size", "--server", "p5.48xlarge"]
    whole_process("fsdp-bench max-size", [sys.executable, "-m", "fsdp_bench.cli.main", *default], 1.50)
    first_command([sys.executable, "-m", "fsdp_bench.cli.main", *default], 3.0)
    one_prediction()
    dry_run_of_8b("fsdp1")
    dry_run_of_8b("fsdp2")
    largest_models("g5.48xlarge")
    largest_models("p5.48xlarge")
    for name in ("Llama-3.1-8B", "Llama-3.1-70B", "Qwen2.5-7B"):
        plan_of(name)
    sweep_overhead()
    rehearsals()
