"""Record what forty commands and six pages print, and compare it with what they print after a change.

    python -m tools.outputs record DIR     before the change
    python -m tools.outputs compare DIR    after it: prints the differences; exit code 1 if there are any

A refactoring leaves all of them the same to the character. They need neither torch nor a GPU.
"""

import contextlib
import difflib
import importlib
import io
import multiprocessing
import os
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Self

COMMANDS = {
    name: f"{command} --json"
    for name, command in {
        "predict-benchmark": "predict --params 7B --server p4d.24xlarge --code benchmark",
        "predict-recorded": "predict --model Llama-3.1-8B --server p5.48xlarge",
        "predict-fsdp1": "predict --model Llama-3.1-8B --server p5.48xlarge --api fsdp1 --strategy SHARD_GRAD_OP",
        "predict-does-not-fit": "predict --model Llama-2-70B --server p5.48xlarge",
        "predict-nodes": "predict --model Llama-2-70B --server p5.48xlarge --nodes 4 --checkpointing full",
        "predict-hybrid": "predict --params 13B --server p4d.24xlarge --nodes 2 --strategy hsdp --checkpointing full",
        "predict-gpu": "predict --model Qwen2.5-7B --gpu H100-SXM --offload params",
        "predict-several": "predict --params 7B --server p5.48xlarge --nodes 1,2 --batch 1,2,4",
        "predict-models": "predict --model Llama-3.1-8B,Llama-3.2-1B --server p4d.24xlarge --api fsdp2",
        "predict-compile": "predict --model Llama-3.2-1B --server p5.48xlarge --compile on,off --code benchmark",
        "predict-precisions": "predict --params 1B --server g5.48xlarge --precision all --code benchmark",
        "predict-optimizers": "predict --params 1B --server p5.48xlarge --optimizer adamw-8bit,adafactor,muon,sgd",
        "predict-lora": "predict --model Llama-3.1-8B --lora 16 --gpu RTX-4090 --seq 1024",
        "predict-qlora": "predict --model Llama-3.1-8B --qlora 16 --gpu RTX-4090 --seq 1024",
        "predict-loss": "predict --model Llama-3.1-8B --server p5.48xlarge --loss chunked",
        "predict-reentrant": "predict --model Qwen2.5-7B --server p5.48xlarge --checkpointing full --reentrant inside",
        "predict-selective": "predict --params 7B --server p5.48xlarge --checkpointing selective --code benchmark",
        "predict-accumulation": "predict --params 7B --server p5.48xlarge --accumulate 4 --no-sync",
        "predict-torchtitan": "predict --model Llama-3.1-8B --code torchtitan --server p5.48xlarge",
        "predict-t4": "predict --model Llama-3.2-1B --gpu T4 --precision fp16-mixed",
        "predict-windows": "predict --model Gemma-2-9B --server p5.48xlarge --seq 8192",
        "predict-float8": "predict --params 7B --server p5.48xlarge --float8 tensorwise --compile --code benchmark",
        "predict-bad": "predict --model Llama-9-8B --server p5.48xlarge",
        "max-size": "max-size --server p5.48xlarge",
        "max-size-all": "max-size --server g5.48xlarge --offload all --precision all --checkpointing all",
        "max-size-gpu": "max-size --gpu H100-SXM --model gpt2-xl --of micro_batch_size",
        "max-size-sequence": "max-size --server p5.48xlarge --model Llama-3.1-8B --of sequence_length",
        "max-size-lora": "max-size --model Llama-3.1-8B --lora 16 --gpu RTX-4090 --of sequence_length",
        "max-size-gpus": "max-size --model Llama-3.1-8B --server p4d.24xlarge --of gpus",
        "max-size-servers": "max-size --server p4d.24xlarge --server p5.48xlarge --strategy FULL_SHARD",
        "plan": "plan --model Llama-3.1-8B --tokens 1T --server p5.48xlarge --nodes 1-4",
        "plan-own-code": "plan --params 7B --tokens 300B --server p4d.24xlarge --deadline 60d --code benchmark",
        "plan-lora": "plan --model Llama-3.1-8B --lora 16 --tokens 1B --server g5.48xlarge --nodes 1",
        "plan-pcie": "plan --model Llama-3.2-1B --tokens 1B --server g6e.48xlarge --nodes 1",
        "compare": "compare '--api fsdp2' '--api fsdp1' --model Llama-3.1-8B --server p5.48xlarge",
        "compare-benchmark": "compare '' '--checkpointing full --batch 2' --params 7B --server p5.48xlarge",
        "servers": "servers",
        "models": "models",
        "report": "report results/xeon-2-cores/cpu",
        "report-rehearsed": "report results/rehearsed/llama-8b",
        "status": "status results/xeon-2-cores/cpu",
        "validate": "validate --against results/xeon-2-cores/emulation-check",
        "validate-published": "tools.validate --against published",
    }.items()
}
PAGES = {
    "page-predict": "predict --model Llama-3.1-8B --server p5.48xlarge",
    "page-several": "predict --model Llama-3.1-8B,Llama-3.2-1B --server p4d.24xlarge --api fsdp2",
    "page-max-size": "max-size --server p5.48xlarge",
    "page-plan": "plan --model Llama-3.1-8B --tokens 1T --server p5.48xlarge --nodes 1-4",
    "page-lora": "max-size --model Llama-3.1-8B --lora 16 --gpu RTX-4090 --of sequence_length",
    "page-measured": "report results/xeon-2-cores/cpu",
}
"""Commands of whose JSON ``report --html`` makes a page (the last makes its own)."""
TEXT = {
    "text-" + name: COMMANDS[name].removesuffix(" --json")
    for name in (
        "predict-recorded",
        "predict-several",
        "predict-does-not-fit",
        "max-size",
        "plan",
        "compare",
        "servers",
        "models",
        "report",
        "validate-published",
    )
}


class _Today(date):
    """A date that stands still: ``plan`` prints the age of the catalogue's prices."""

    @classmethod
    def today(cls) -> Self:
        return cls(2026, 11, 26)


def printed(line: str) -> str:
    """Run a command in this process; return what it printed, standard error included, and its exit code."""
    from fsdp_bench.cli.main import main
    from tools.validate.__main__ import main as validate

    for name in ("plan.purchase.document", "report.html.write", "report.text.plan"):
        vars(importlib.import_module(f"fsdp_bench.{name}"))["date"] = _Today
    out = io.StringIO()
    command, *words = shlex.split(line)
    code: object = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = validate(words) if command == "tools.validate" else main([command, *words])
        except SystemExit as ended:
            code = ended.code
    return f"$ fsdp-bench {line.removeprefix('tools.')}\n{out.getvalue()}exit code {code}\n"


def page(command: str, folder: Path) -> str:
    """Return the HTML page of a command's JSON document, or of a folder of results."""
    path = folder / f"{os.getpid()}.html"
    if command.startswith("report "):
        said = printed(f"{command} --html {path}")
    else:
        document = folder / f"{os.getpid()}.json"
        body = printed(f"{command} --json").split("\n", 1)[1].rsplit("exit code", 1)[0]
        document.write_text(body)
        said = printed(f"report {document} --html {path}")
        document.unlink()
    text = path.read_text() if path.exists() else said
    path.unlink(missing_ok=True)
    return text


def _write(name: str, command: str, folder: Path) -> None:
    os.environ["COLUMNS"] = "100"
    text = page(command, folder) if name in PAGES else printed(command)
    (folder / name).write_text(text.replace(str(folder), "FOLDER").replace(f"{os.getpid()}.json", "x.json"))


def record(folder: Path, names: list[str]) -> None:
    """Write each output into the folder, each from a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    forked = multiprocessing.get_context("fork")
    for name, command in {**COMMANDS, **PAGES, **TEXT}.items():
        if names and name not in names:
            continue
        process = forked.Process(target=_write, args=(name, command, folder))
        process.start()
        process.join()
        if process.exitcode:
            (folder / name).write_text(f"the process ended with {process.exitcode}\n")
        print(".", end="", flush=True)
    print()


def compare(before: Path, after: Path, names: list[str]) -> int:
    """Print how the outputs differ; return 1 if any does."""
    record(after, names)
    num_different = 0
    for path in sorted(after.iterdir()):
        old, new = (before / path.name).read_text(), path.read_text()
        if old != new:
            num_different += 1
            lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), "before", "after", n=0, lineterm=""))
            print(f"== {path.name}: {len(lines)} lines of difference", *(line[:300] for line in lines[:12]), sep="\n")
    print(f"{num_different} of {len(list(after.iterdir()))} outputs differ")
    return int(num_different > 0)


if __name__ == "__main__":
    verb, folder, *chosen = sys.argv[1:]
    if verb == "record":
        record(Path(folder), chosen)
    else:
        sys.exit(compare(Path(folder), Path(folder).with_name(Path(folder).name + ".after"), chosen))
