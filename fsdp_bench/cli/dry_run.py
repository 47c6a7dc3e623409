"""``fsdp-bench dry-run``: real FSDP without GPUs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from fsdp_bench.catalog.lookup import Hardware
from fsdp_bench.cli.facts import columns
from fsdp_bench.cli.options import SetupCommand, SetupWords, setup_options
from fsdp_bench.cli.setups import read_setup, read_setups
from fsdp_bench.report.terminal import print_line, print_lines
from fsdp_bench.spec.codec import to_builtins, to_json
from fsdp_bench.spec.dry_run import DryRunReading, DryRunSpec, UserModule
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster
from fsdp_bench.spec.setup import impossible
from fsdp_bench.spec.units import format_count, format_gib, format_seconds
from fsdp_bench.sweep.dry_run import DryRunError, reading_of, run_one

PATIENCE_SECONDS = 2.0
"""After which a line on standard error says that the dry run is running."""


@click.command("dry-run", cls=SetupCommand)
@click.option(
    "--kernels", type=click.Choice(["cpu", "cuda"]), default="cuda", help="Whose operators run. Default: cuda."
)
@click.option("--module", metavar="PKG.MOD:FUNCTION", help="A function that returns your nn.Module and a batch for it.")
@click.option("--transformer-block", "block", metavar="PKG.MOD:CLASS", help="With --module: the class of its blocks.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write every change of the live bytes into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@setup_options()
def command(
    words: SetupWords, kernels: Any, module: str | None, block: str | None, trace: Path | None, as_json: bool
) -> int:
    """Run one training step through PyTorch's own FSDP code, as rank 0 of its world, on tensors without data.

    Needs torch but no GPU. Prints the live bytes: their peak, where it is, and what it consists of.
    """
    spec, hardware = _spec(words, module, block)
    if trace is not None and not trace.resolve().parent.is_dir():
        raise SpecError(f"trace: {str(trace.parent)!r} is no folder")
    spec = msgspec.structs.replace(spec, kernels=kernels, trace=str(trace.resolve()) if trace else None)
    with _patience(spec):
        answer = run_one(spec)
    try:
        reading = reading_of(answer)
    except DryRunError as error:
        raise DryRunError(f"the dry run failed: {error}") from None
    if as_json:
        sys.stdout.write(to_json(document(spec, hardware, reading)).decode())
    else:
        print_lines(_text(spec, reading))
    return 0


def _spec(words: SetupWords, module: str | None, block: str | None) -> tuple[DryRunSpec, Hardware]:
    if module is None:
        if block is not None:
            raise SpecError("transformer-block: goes with --module; the benchmark models know their blocks")
        shape, setup, hardware = read_setup(words)
        return DryRunSpec(model=shape, setup=setup), hardware
    given = [name for name in ("model", "hf_config", "params", "family") if getattr(words, name) is not None]
    if given:
        raise SpecError(f"--module and --{given[0].replace('_', '-')} each name a model; keep one")
    setups, hardware = read_setups(words)
    if len(setups) > 1:
        raise SpecError("several setups are named; one is allowed here")
    reason = impossible(setups[0], "cuda")
    if reason is not None:
        raise SpecError(reason)
    user = UserModule(function=module, block=block, folder=os.getcwd())
    return DryRunSpec(module=user, setup=setups[0]), hardware


@contextmanager
def _patience(spec: DryRunSpec) -> Iterator[None]:
    """Say on standard error what takes so long, once."""
    what = spec.model.describe() if spec.model is not None else str(spec.module and spec.module.function)
    line = f"running three steps of {what} as rank 0 of {spec.setup.world_size} ..."
    timer = threading.Timer(PATIENCE_SECONDS, lambda: print_line(line, error=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def document(spec: DryRunSpec, hardware: Hardware, reading: DryRunReading) -> dict[str, Any]:
    """Return the JSON form: the names of ``predict --json``; null for what a dry run does not know."""
    setup = spec.setup
    model: dict[str, Any] = {"name": spec.module.function} if spec.module is not None else to_builtins(spec.model)
    cluster = hardware if isinstance(hardware, Cluster) else None
    gpu = hardware.gpu if isinstance(hardware, Cluster) else hardware
    memory = {
        "peak_allocated_bytes": reading.peak_allocated_bytes,
        "peak_reserved_bytes": None,
        "peak_device_bytes": None,
        "peak_host_bytes_per_node": None,
        "peak_phase": reading.peak_phase,
        "phases": reading.phases,
        "load_bytes": reading.load_bytes,
        "resident": to_builtins(reading.resident),
        "breakdown_bytes": reading.breakdown_bytes,
    }
    return {
        "source": "dry-run",
        "torch": reading.torch,
        "kernels": reading.kernels,
        "device": reading.device,
        "model": {**model, "num_parameters": reading.num_parameters},
        "setup": {
            **to_builtins(setup),
            "effective_strategy": setup.effective_strategy.value,
            "shard_size": setup.shard_group_size,
        },
        "server": {
            "name": cluster.server.name if cluster else None,
            "gpu": gpu.name if gpu else None,
            "gpu_memory_bytes": gpu.usable_memory_bytes if gpu else None,
        },
        "memory": memory,
        "seconds": reading.seconds,
    }


def _text(spec: DryRunSpec, reading: DryRunReading) -> str:
    setup = spec.setup
    name = spec.model.describe() if spec.model is not None else str(spec.module and spec.module.function)
    resident = reading.resident
    lines = [
        f"{name}, {format_count(reading.num_parameters)} parameters",
        f"{setup.api.value} {setup.effective_strategy.value}, {setup.precision}, rank 0 of {setup.world_size}; dry run "
        f"with torch {reading.torch}, {reading.kernels} kernels, in {format_seconds(reading.seconds)}",
        f"peak allocated  {format_gib(reading.peak_allocated_bytes)}, in {reading.peak_phase}",
        f"between steps   {format_gib(resident.total_bytes)}",
        "",
        columns(("phase", "peak"), [(phase, format_gib(size)) for phase, size in reading.phases.items()]),
        "",
        columns(("at the peak", "size"), [(kind, format_gib(size)) for kind, size in reading.breakdown_bytes.items()]),
        "",
        "Not in these figures: workspaces inside kernels, the caching allocator, the CUDA context, NCCL's buffers.",
    ]
    return "\n".join(lines)
