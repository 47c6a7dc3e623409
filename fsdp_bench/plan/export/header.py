"""The comment at the beginning of every exported file: model, server, what was predicted, version, command, notes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.spec.errors import printable
from fsdp_bench.spec.recording.model import whose_code
from fsdp_bench.spec.setup import Loss, Offload, Reentrant, TrainSetup
from fsdp_bench.spec.units import format_gib
from fsdp_bench.version import __version__

_WIDTH = 116


def header(what: str, chosen: Chosen, notes: Iterable[str] = ()) -> str:
    """Return a comment of lines that begin with ``#``."""
    model = chosen.question.model
    facts = {
        "model": f"{model.name}: {model.describe()}",
        "server": hardware(chosen),
        "setting": setting(chosen.setup),
        "assumed": "; ".join(chosen.question.assumptions),
        "predicted": predicted(chosen),
    }
    lines = [f"{what}, exported by fsdp-bench {__version__}."]
    for name, value in facts.items():
        if not value:
            continue
        lines += textwrap.wrap(f"{name:<11}{printable(value)}", _WIDTH, subsequent_indent=" " * 11)
    lines.append(f"{'command':<11}{printable(chosen.command)}")
    for note in notes:
        lines += textwrap.wrap(f"{'note':<11}{printable(note)}", _WIDTH, subsequent_indent=" " * 11)
    return "\n".join(f"# {line}" for line in lines) + "\n"


def hardware(chosen: Chosen) -> str:
    """Return the servers and GPUs."""
    where, world = chosen.question.hardware, chosen.setup.world_size
    servers = f"{where.num_nodes} x {where.name}, " if where and where.has_server else ""
    return f"{servers}{world} {where.gpu.name if where else 'GPUs'}"


def setting(setup: TrainSetup) -> str:
    """Return a setup in a line."""
    steps = setup.gradient_accumulation_steps
    batch = f"batch {setup.micro_batch_size} x {setup.sequence_length} tokens on each GPU"
    policy = f" {setup.checkpointing_policy}" if setup.checkpointing_policy else ""
    parts = [f"{setup.strategy.value} under {setup.api.value}", str(setup.precision), f"wrap {setup.wrap.value}"]
    reentrant = f", reentrant {setup.reentrant.value}" if setup.reentrant is not Reentrant.NO else ""
    parts += [f"checkpointing {setup.checkpointing.value}{policy}{reentrant}"]
    parts += [] if setup.offload is Offload.NONE else [f"offload {setup.offload.value}"]
    parts += [] if setup.loss is Loss.PLAIN else [f"loss {setup.loss.value}"]
    parts += ["compile"] if setup.compile else []
    parts += [setup.optimizer.value, batch + (f", {steps} micro-batches a step" if steps > 1 else "")]
    return ", ".join(parts)


def predicted(chosen: Chosen) -> str:
    """Return the predicted peak of reserved memory and speed, and for whose code they are.

    The peak is no bound: a framework around that code, such as transformers' Trainer, keeps tensors of its own.
    """
    found = chosen.prediction
    reserved = f"{format_gib(found.needed_bytes)} reserved"
    usable = found.estimate.gpu_bytes
    memory = f"{reserved} of {format_gib(usable)} usable" if usable is not None else reserved
    speed = chosen.tokens_per_second_per_gpu
    rate = f"{speed:,.0f} tokens/s per GPU" if speed is not None else "tokens/s unknown"
    whose = whose_code(chosen.code)
    return f"{memory}, {rate}, for {whose} alone; no bound: fsdp-bench rehearse says what this setting takes"
