"""``fsdp-bench doctor``: show this machine's hardware and software."""

import sys
from pathlib import Path

import click

from fsdp_bench.cli.common.options import FILE
from fsdp_bench.cli.common.printing import print_json
from fsdp_bench.report.terminal import print_line
from fsdp_bench.report.text.catalog_entry import catalog_entry
from fsdp_bench.spec.calibration_profile import read_profile
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_gib
from fsdp_bench.sweep.diagnosis import Diagnosis, diagnose, own_server
from fsdp_bench.sweep.gpu_links import probe_links
from fsdp_bench.sweep.machine import probe_machine


@click.command("doctor")
@click.option("--as-catalog", is_flag=True, help="Print this machine as entries of a file for --catalog (TOML).")
@click.option("--calibration", type=FILE, metavar="FILE", help="With --as-catalog: add what `calibrate` measured here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_catalog: bool, calibration: Path | None, as_json: bool) -> None:
    """Show this machine's hardware, and what a sweep will use of it.

    \b
    fsdp-bench doctor
    fsdp-bench doctor --as-catalog > mine.toml
    """
    if calibration is not None and not as_catalog:
        raise SpecError("calibration: needs --as-catalog")
    if as_catalog and as_json:
        raise SpecError("as-catalog: prints TOML; leave --json out")
    profile = None if calibration is None else read_profile(calibration)
    diagnosis = diagnose(probe_machine())
    if as_catalog:
        sys.stdout.write(catalog_entry(*own_server(diagnosis, probe_links(), profile)))
    elif as_json:
        print_json(diagnosis)
    else:
        lines = [("a sweep will", line) for line in diagnosis.will] + [("warning", line) for line in diagnosis.warnings]
        for name, value in _facts(diagnosis) + lines:
            print_line(f"{name:<18}{value}")


def _facts(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    machine, torch = diagnosis.machine, diagnosis.torch or {}
    limit = machine.cgroup_limit_bytes
    facts = [
        ("processor", f"{machine.cpu_name}, {machine.num_cores} cores"),
        ("host memory", f"{format_gib(machine.memory_bytes)}, cgroup limit {format_gib(limit) if limit else 'none'}"),
        ("system", machine.platform),
    ]
    facts += [(f"GPU {gpu.index}", f"{gpu.name}, {format_gib(gpu.memory_bytes)}") for gpu in machine.gpus]
    facts += [("GPUs", "none")] if not machine.gpus else [("driver", machine.driver_version or "unknown")]
    facts += [("link", link) for link in machine.gpu_links]
    facts += [
        ("torch", f"{torch.get('torch', 'unknown')}, CUDA build {torch.get('cuda_build') or 'none'}"),
        ("NCCL", str(torch.get("nccl") or "none")),
        ("gloo", {True: "yes", False: "no"}.get(torch.get("gloo"), "unknown")),  # type: ignore[arg-type]
    ]
    return facts
