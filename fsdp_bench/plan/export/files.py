"""File: one exported file; its header, its text by a template, how it starts. write() overwrites nothing."""

import ast
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.pieces import DTYPES, adapters, literal
from fsdp_bench.plan.setup_text import setup_line
from fsdp_bench.spec.errors import SpecError, printable
from fsdp_bench.spec.recording.model import whose_code
from fsdp_bench.spec.units import format_gib
from fsdp_bench.version import __version__


@dataclass(frozen=True)
class File:
    """One file of an export."""

    kind: str
    name: str
    text: str
    start: str | None = None
    """The command that starts it, or None if another file of the export does."""
    notes: tuple[str, ...] = ()
    """The settings that the file cannot express, or that differ from the setting that was asked for."""


def write(files: Sequence[File], folder: Path) -> list[Path]:
    """Write files into a folder, which is made if it is not there; return their paths.

    Raises SpecError if a file is there already and differs, before any is written, or if one cannot be written.
    """
    paths = [folder / file.name for file in files]
    for file, path in zip(files, paths, strict=True):
        if path.is_symlink() or path.exists():
            _refuse_other(path, file.text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, path in zip(files, paths, strict=True):
            if not path.exists():
                with path.open("x", encoding="utf-8") as stream:
                    stream.write(file.text)
    except OSError as error:
        raise SpecError(f"export-dir: {str(folder)!r} cannot be written: {error.strerror or error}") from None
    return paths


def _refuse_other(path: Path, text: str) -> None:
    try:
        is_same = path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        is_same = False
    if not is_same:
        raise SpecError(
            f"export: {str(path)!r} exists and differs, so nothing was written; move it, or name another --export-dir"
        )


# -- text --------------------------------------------------------------------------------------------------------------


@cache
def templates() -> Environment:
    """Return the templates of all scripts."""
    found = Environment(
        loader=PackageLoader("fsdp_bench.plan.export"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    found.filters |= {"literal": literal, "adapters": adapters, "torch": DTYPES.__getitem__}
    return found


def text_of(
    name: str, title: str, chosen: Chosen, notes: Iterable[str], has_imports: bool = False, **facts: Any
) -> str:
    """Return a file by its template, below its header and, if it has none, the imports of the names that it uses."""
    template = templates().get_template(f"{name}.jinja")
    body = template.render(chosen=chosen, setup=chosen.setup, lora=chosen.lora, **facts)
    return header(title, chosen, notes) + ("" if has_imports else f"{_imports(body)}\n") + body


def _imports(body: str) -> str:
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    known = tomllib.loads((resources.files(__package__) / "templates" / "imports.toml").read_text())

    def named(modules: Mapping[str, Sequence[str]]) -> list[str]:
        found = {module: [name for name in names if name in used] for module, names in modules.items()}
        return [f"from {module} import {', '.join(names)}" for module, names in sorted(found.items()) if names]

    plain = sorted(line for name, line in known["plain"].items() if name in used)
    first = [line for line in plain if line in ("import os", "import time")]
    others = [line for line in plain if line not in first]
    return "\n".join([*first, *named(known["standard"]), "", "import torch", *others, *named(known["packages"])]) + "\n"


_WIDTH = 116


def header(what: str, chosen: Chosen, notes: Iterable[str] = ()) -> str:
    """Return the comment at the beginning of a file: model, server, what was predicted, version, command, notes."""
    model = chosen.question.model
    facts = {
        "model": f"{model.name}: {model.describe()}",
        "server": _hardware(chosen),
        "setting": setup_line(chosen.setup),
        "assumed": "; ".join(chosen.question.assumptions),
        "predicted": _predicted(chosen),
    }
    lines = [f"{what}, exported by fsdp-bench {__version__}."]
    for name, value in facts.items():
        if value:
            lines += textwrap.wrap(f"{name:<11}{printable(value)}", _WIDTH, subsequent_indent=" " * 11)
    lines.append(f"{'command':<11}{printable(chosen.command)}")
    for note in notes:
        lines += textwrap.wrap(f"{'note':<11}{printable(note)}", _WIDTH, subsequent_indent=" " * 11)
    return "\n".join(f"# {line}" for line in lines) + "\n"


def _hardware(chosen: Chosen) -> str:
    where, world = chosen.question.hardware, chosen.setup.world_size
    servers = f"{where.num_nodes} x {where.name}, " if where and where.has_server else ""
    return f"{servers}{world} {where.gpu.name if where else 'GPUs'}"


def _predicted(chosen: Chosen) -> str:
    """Return the predicted peak of reserved memory and speed, and for whose code they are.

    The peak is no bound: a framework around that code, such as transformers' Trainer, keeps tensors of its own.
    """
    found = chosen.prediction
    reserved = f"{format_gib(found.needed_bytes)} reserved"
    usable = found.gpu_bytes
    memory = f"{reserved} of {format_gib(usable)} usable" if usable is not None else reserved
    speed = chosen.tokens_per_second_per_gpu
    rate = f"{speed:,.0f} tokens/s per GPU" if speed is not None else "tokens/s unknown"
    whose = whose_code(chosen.code)
    return f"{memory}, {rate}, for {whose} alone; no bound: fsdp-bench rehearse says what this setting takes"


# -- start -------------------------------------------------------------------------------------------------------------

SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def environment(chosen: Chosen) -> tuple[str, ...]:
    """Return notes about environment variables that the prediction is for."""
    if not chosen.question.expandable_segments:
        return ()
    return (f"the prediction is for expandable segments, an environment variable: {SEGMENTS}",)


def prefix(chosen: Chosen) -> str:
    """Return the environment variables before a command."""
    return f"{SEGMENTS} " if chosen.question.expandable_segments else ""


def torchrun(chosen: Chosen, what: str) -> str:
    """Return the command that starts all ranks of a node; on several nodes it is started on each."""
    each, nodes = chosen.gpus_per_node, chosen.num_nodes
    if nodes == 1:
        return f"{prefix(chosen)}torchrun --standalone --nproc-per-node {each} {what}"
    return (
        f"{prefix(chosen)}torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d"
        f" --rdzv-endpoint HEAD_NODE:29500 --rdzv-id 1 {what}"
    )
