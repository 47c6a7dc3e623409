"""The table of docs/validation/memory.md that has one setting in four commands: max-size, predict, plan, rehearse.

``python -m tests.one_memory`` with PyTorch's CUDA build writes it anew; each row takes a minute, one with adapters that
are not recorded yet three more. ``python -m tests.one_memory 2 3`` writes rows 2 and 3 alone.
"""

import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_bench.spec.errors import ExitCode
from tests.conftest import run_command

PAGE = Path(__file__).parents[1] / "docs" / "validation" / "memory.md"
WITHIN_GIB = 0.1
"""The largest differences of the four, in allocated and in reserved memory."""
STEPS = "3"
"""Optimizer steps of a rehearsal: the second is like all later ones."""

ONE_GPU = """\
[[server]]
name = "one-{gpu}"
provider = "mine"
gpu = "{gpu}"
gpus_per_node = 1
host_memory_bytes = 137438953472
"""
"""A server for --catalog."""
_HEAD = "| model | trained | on | batch |"


@dataclass(frozen=True)
class Row:
    """A setting. Its micro-batch is the largest that max-size finds."""

    model: str
    server: str
    trained: str = "whole"
    """Or ``LoRA`` or ``QLoRA``."""
    options: dict[str, str] = field(default_factory=dict)
    kind: str = "pytorch"
    """The kind of script that is exported."""

    @property
    def words(self) -> list[str]:
        model = ["--model", self.model, "--server", self.server, "--loss", "plain"]
        code = ["--code", "huggingface"] if self.trained == "whole" else []
        return [*model, *code, *(word for name, value in self.options.items() for word in (f"--{name}", value))]

    def __str__(self) -> str:
        return f"{self.model} {self.trained} on {self.server}"

    def cells(self, batch: int) -> list[str]:
        gpu = self.server.removeprefix("one-")
        options = {name: value for name, value in self.options.items() if name != "seq"}
        lora = [f"{self.trained} {options.pop(name)}" for name in ("lora", "qlora") if name in options]
        setting = ", ".join([options.pop("api", "bare"), *options.values()])
        how = f"{(lora or [self.trained])[0]}: {setting}"
        return [self.model, how, f"one {gpu}" if gpu != self.server else gpu, f"{batch} x {self.options['seq']}"]


NONE, FULL = {"checkpointing": "none"}, {"checkpointing": "full"}
FSDP1, FSDP2 = {"api": "fsdp1", "strategy": "FULL_SHARD"}, {"api": "fsdp2", "strategy": "FULL_SHARD"}
LORA, QLORA = {"lora": "16"}, {"qlora": "rank=16,targets=all-linear"}
ROWS = (
    Row("Llama-3.1-8B", "p5.48xlarge", options=FSDP1 | FULL | {"seq": "4096"}),
    Row("Qwen2.5-7B", "p4d.24xlarge", options=FSDP2 | FULL | {"seq": "4096"}),
    Row("Mistral-7B-v0.1", "p5.48xlarge", options=FSDP2 | NONE | {"precision": "bf16-true", "seq": "4096"}),
    Row("Mistral-7B-v0.3", "p4de.24xlarge", options=FSDP1 | NONE | {"strategy": "SHARD_GRAD_OP", "seq": "2048"}),
    Row("Gemma-2-9B", "p5.48xlarge", options=FSDP2 | FULL | {"seq": "2048"}),
    Row("Gemma-3-1B", "one-H100-SXM", options=NONE | {"seq": "2048"}, kind="huggingface"),
    Row("Llama-3.1-8B", "one-RTX-4090", "LoRA", LORA | FULL | {"seq": "1024"}, kind="huggingface"),
    Row("Llama-3.1-8B", "g6e.48xlarge", "LoRA", FSDP1 | LORA | FULL | {"seq": "2048"}),
    Row("Qwen2.5-7B", "g5.48xlarge", "QLoRA", FSDP2 | QLORA | FULL | {"seq": "2048"}),
    Row("Qwen2.5-7B", "one-RTX-4090", "QLoRA", QLORA | FULL | {"seq": "1024"}),
)


@dataclass(frozen=True)
class Answers:
    """The commands' answers about a row: allocated and reserved bytes; ``rehearse`` is missing if it was not asked."""

    batch: int
    peaks: dict[str, tuple[int, int]]

    def line(self, row: Row) -> str:
        peaks = [f"{allocated / 2**30:.1f}, {reserved / 2**30:.1f}" for allocated, reserved in self.peaks.values()]
        return f"| {' | '.join([*row.cells(self.batch), *peaks])} |"

    @property
    def apart_gib(self) -> float:
        """The largest difference of two of the commands, in allocated or in reserved memory."""
        return max(max(sizes) - min(sizes) for sizes in zip(*self.peaks.values(), strict=True)) / 2**30


def predicted(row: Row, folder: Path) -> Answers:
    """Ask max-size for the largest micro-batch, then predict and plan for its memory; predict exports it."""
    catalog = folder / "servers.toml"
    catalog.write_text("".join(ONE_GPU.format(gpu=gpu) for gpu in ("RTX-4090", "H100-SXM")))
    words = [*row.words, "--catalog", str(catalog)]
    (cell,) = _ask("max-size", *words, "--of", "micro_batch_size", "--no-time")["cells"]
    batch = int(cell["fits_value"])
    words += ["--batch", str(batch)]
    found = _ask("predict", *words, "--export", row.kind, "--export-dir", str(folder))
    (folder / "start.json").write_text(json.dumps(found["exports"][-1]["start"]))
    planned = _ask("plan", *words, "--nodes", "1", "--offload", "none")["winner"]
    documents = {"max-size": cell, "predict": found, "plan": planned}
    return Answers(batch, {name: _peak(one["memory"]) for name, one in documents.items()})


def _peak(memory: dict[str, Any]) -> tuple[int, int]:
    return memory["peak_allocated_bytes"], memory["peak_reserved_bytes"]


def rehearsed(row: Row, folder: Path) -> tuple[int, int]:
    """Rehearse the script that ``predicted`` exported into a folder, as it is and as the export says that it starts."""
    command, *words = json.loads((folder / "start.json").read_text()).split()
    words = [word if word != words[-1] else str(folder / word) for word in words]
    given = ["--server", row.server, "--catalog", str(folder / "servers.toml"), "--steps", STEPS]
    found = _ask("rehearse", *given, "--", str(Path(sys.executable).parent / command), *words)
    return _peak(found["memory"])


def _ask(command: str, *words: str) -> Any:
    split = words.index("--") if "--" in words else len(words)
    done = run_command(command, *words[:split], "--json", *words[split:])
    assert done.returncode in (ExitCode.DONE, ExitCode.DOES_NOT_FIT), done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout)


def table() -> list[str]:
    """Return the rows of the table in docs/validation/memory.md."""
    text = PAGE.read_text()
    return re.findall(r"^\|.*\|$", text[text.index(_HEAD) :].partition("\n\n")[0], re.MULTILINE)[2:]


def write(number: int, line: str) -> None:
    before, head, after = PAGE.read_text().partition(_HEAD)
    PAGE.write_text(before + head + after.replace(table()[number], line, 1))


def main(numbers: list[str]) -> None:
    """Ask all commands of some rows, by default of all, and write them."""
    for number, row in enumerate(ROWS, 1):
        if numbers and str(number) not in numbers:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = predicted(row, Path(folder))
            found = Answers(found.batch, {**found.peaks, "rehearse": rehearsed(row, Path(folder))})
        write(number - 1, found.line(row))
        print(f"{number}: {found.line(row)} at most {found.apart_gib:.3f} GiB apart {found.peaks}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
