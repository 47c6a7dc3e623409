"""A GPU and a server as the TOML of a file for ``--catalog``. Facts that are unknown are there as comments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.hardware import Gpu, Server

_BEGINNING = """\
# This machine as entries of a catalogue: predict --server {name} --catalog FILE, with the name of this file.
# A line that begins with # is not known here: fill in its value and take the # away. Without it what depends on it
# prints as unknown. docs/catalog.md says what the fields mean.
"""
_PRICE = """\
# [[price]]
# server = "{name}"
# currency = "EUR"
# purchase = 160_000                       # or on_demand_per_hour of the whole server, if it is rented
# years_of_use = 4
# electricity_per_kwh = 0.25               # counts if the server has power_watts
"""
_UNKNOWN_OF_GPU = {
    "usable_memory_bytes": ("85020639232", "torch.cuda.get_device_properties(0).total_memory"),
    "memory_bandwidth_bytes_per_second": ("3.35e12", "datasheet; without it, no times"),
    "matmul_efficiency": ("0.75", "large matrix products over the peak; `calibrate` measures it"),
    "num_multiprocessors": ("132", "torch.cuda.get_device_properties(0).multi_processor_count"),
    "compute_capability": ("9.0", "torch.cuda.get_device_capability(0)"),
}
"""By field of a Gpu: a value as an example, and where to find one's own."""
_UNKNOWN_OF_SERVER = {
    "power_watts": ("10200", "the most that the machine takes, by its maker; for energy and its price")
}
_PEAKS = """\
# bf16 = 989.4e12                          # datasheet: FLOP/s without sparsity; without it, no times and no MFU
# fp16 = 989.4e12
# tf32 = 494.7e12
# fp32 = 66.9e12
"""
_UNKNOWN_LINKS = {
    "intra_node": """\
# [server.intra_node]                      # between the GPUs
# kind = "nvswitch"                        # or nvlink-mesh, xgmi, pcie
# bandwidth_bytes_per_second = 450e9       # per GPU and direction: half of what vendors print
""",
    "host_link": """\
# [server.host_link]                       # between a GPU and host memory; for --offload
# kind = "pcie"
# bandwidth_bytes_per_second = 32e9        # per GPU and direction
""",
    "inter_node": """\
# [server.inter_node]                      # between such servers, if there are several
# kind = "infiniband"                      # or roce, efa, tcp
# num_nics = 8                             # network interfaces for the GPUs' traffic
# bandwidth_bytes_per_second = 400e9       # per server and direction, of all interfaces together
""",
}


def catalog_entry(gpu: Gpu, server: Server) -> str:
    """Return the text of a file that ``load_user_catalog`` reads."""
    asked = [link for link in _UNKNOWN_LINKS if link != "intra_node" or server.gpus_per_node > 1]
    unknown = [_UNKNOWN_LINKS[link] for link in asked if not getattr(server, link)]
    parts = [
        _BEGINNING.format(name=server.name),
        "\n".join(_table("gpu", _without_none(to_builtins(gpu)), _UNKNOWN_OF_GPU)) + "\n",
        "\n".join(_table("server", _without_none(to_builtins(server)), _UNKNOWN_OF_SERVER)) + "\n",
        *unknown,
        _PRICE.format(name=server.name),
    ]
    return "\n".join(parts)


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value not in (None, [], ())
    }


def _table(path: str, facts: dict[str, Any], unknown: dict[str, tuple[str, str]]) -> Iterator[str]:
    yield f"[{path}]" if "." in path else f"[[{path}]]"
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict)}
    yield from msgspec.toml.encode(plain).decode().splitlines()
    for key, (example, where) in unknown.items():
        if key not in facts:
            yield f"# {f'{key} = {example}':40} # {where}"
    if path == "gpu.dense_flops_per_second" and not facts:
        yield from _PEAKS.splitlines()
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from _table(f"{path}.{key}", value, {})
