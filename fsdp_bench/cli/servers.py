"""``fsdp-bench servers [NAME]``: print the catalogue's servers and GPUs."""

from pathlib import Path

import click

from fsdp_bench.catalog.loader import Catalog, load_user_catalog
from fsdp_bench.catalog.names import OTHER_GPUS, misspelt
from fsdp_bench.catalog.user_file import names_of
from fsdp_bench.cli.common.printing import Fact, known, print_facts, print_json, source_facts
from fsdp_bench.report.terminal import print_lines
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.errors import SpecError, nearest, shown
from fsdp_bench.spec.hardware import Gpu, Interconnect, Network, Server
from fsdp_bench.spec.units import format_gib

_SERVER_HEADER = ("server", "provider", "GPUs", "GPU to GPU", "between nodes", "host\nmemory", "CPUs")
_SERVER_DROPPABLE = ("CPUs", "provider", "host\nmemory")
_GPU_HEADER = ("GPU", "usable\nmemory", "bf16 dense\npeak", "power\nlimit", "memory\nbandwidth", "native\nbf16")


@click.command("servers")
@click.argument("name", required=False)
@click.option("--catalog", "file", type=click.Path(path_type=Path), help="A TOML file that adds entries or overrides.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: bytes, bytes per second, FLOP/s.")
def command(name: str | None, file: Path | None, as_json: bool) -> None:
    """Print the catalogue's servers and GPUs, or with a NAME one of them with its sources.

    \b
    fsdp-bench servers
    fsdp-bench servers p5.48xlarge
    """
    catalog = load_user_catalog(file)
    if name is None:
        _list(catalog, as_json)
        return
    folded = name.lower()
    server = next((one for one in catalog.servers() if folded in names_of(one)), None)
    entry = server or next((one for one in catalog.gpus() if folded in names_of(one)), None)
    if entry is None:
        names = [known_as for one in catalog.servers() for known_as in names_of(one)]
        close = misspelt(name, catalog.gpus()) or nearest(name, names, cutoff=0.75)
        raise SpecError(f"name: {shown(name)} is neither a server nor a GPU of the catalogue{close}; {OTHER_GPUS}")
    if as_json:
        print_json(entry)
    else:
        print_facts(_server_facts(entry, catalog) if isinstance(entry, Server) else _gpu_facts(entry))


def _list(catalog: Catalog, as_json: bool) -> None:
    if as_json:
        print_json({"servers": catalog.servers(), "gpus": catalog.gpus()})
        return
    from fsdp_bench.report.table import table_columns, table_lines

    servers = table_columns(_SERVER_HEADER, map(_server_row, catalog.servers()), (), _SERVER_DROPPABLE)
    gpus = table_columns(_GPU_HEADER, map(_gpu_row, catalog.gpus()), _GPU_HEADER[1:5], _GPU_HEADER[5:])
    print_lines("\n".join([*table_lines(servers), "", *table_lines(gpus)]))


def _server_row(entry: Server) -> tuple[str, ...]:
    return (
        entry.name,
        entry.provider,
        f"{entry.gpus_per_node} x {entry.gpu}",
        _link(entry.intra_node),
        _link(entry.inter_node),
        known(entry.host_memory_bytes, format_gib),
        _cpus(entry),
    )


def _gpu_row(entry: Gpu) -> tuple[str, ...]:
    return (
        entry.name,
        known(entry.usable_memory_bytes, format_gib),
        _peak(entry, "bf16"),
        known(entry.limit_watts, lambda watts: f"{watts:g} W"),
        _rate(entry.memory_bandwidth_bytes_per_second),
        "yes" if entry.native_bf16 else "no",
    )


def _limits(entry: Gpu) -> str:
    power = entry.power
    if power is None:
        return UNKNOWN
    lowest = "" if power.lowest_watts is None else f", {power.lowest_watts:g} W at least"
    return f"{power.default_watts:g} W{lowest}" + ("" if power.clock else "; what less would cost is unknown")


def _rate(bytes_per_second: float | None) -> str:
    return known(bytes_per_second, lambda value: f"{value / 1e9:g} GB/s")


def _link(link: Interconnect | Network | None) -> str:
    if link is None:
        return UNKNOWN
    return f"{link.generation or link.kind.value} {_rate(link.bandwidth_bytes_per_second)}"


def _cpus(entry: Server) -> str:
    if entry.num_vcpus is not None:
        return f"{entry.num_vcpus} vCPUs"
    return known(entry.num_cores, lambda cores: f"{cores} cores")


def _peak(entry: Gpu, dtype: str) -> str:
    return known(entry.dense_flops_per_second.get(dtype), lambda peak: f"{peak / 1e12:.1f} TFLOP/s")


def _server_facts(entry: Server, catalog: Catalog) -> list[Fact]:
    facts: list[Fact] = [
        ("server", entry.name),
        ("also called", ", ".join(entry.aliases) or "-"),
        ("provider", entry.provider),
        ("GPUs", f"{entry.gpus_per_node} x {entry.gpu}"),
        *_power_facts(entry, catalog.gpu(entry.gpu)),
        ("host memory", known(entry.host_memory_bytes, format_gib)),
        ("vCPUs", known(entry.num_vcpus, str)),
        ("cores", known(entry.num_cores, str)),
        *source_facts(entry.source),
        *_link_facts("GPU to GPU", "per GPU and direction", entry.intra_node),
        *_link_facts("GPU to host", "per GPU and direction", entry.host_link),
        *_link_facts("between nodes", "per node and direction", entry.inter_node),
    ]
    return facts + _gpu_facts(catalog.gpu(entry.gpu))


def _power_facts(entry: Server, gpu: Gpu) -> list[Fact]:
    if entry.gpu_power is not None:
        return [("GPU power limit", f"{entry.gpu_power.watts:g} W"), *source_facts(entry.gpu_power.source)]
    assumed = "" if gpu.limit_watts is None else f"; the GPU's default is assumed: {gpu.limit_watts:g} W"
    return [("GPU power limit", f"not documented{assumed}")]


def _link_facts(name: str, unit: str, link: Interconnect | Network | None) -> list[Fact]:
    if link is None:
        return [(name, UNKNOWN)]
    more = f", interfaces: {known(link.num_nics, str)}" if isinstance(link, Network) else ""
    text = f"{link.kind.value}, {link.generation or UNKNOWN}{more}, {_rate(link.bandwidth_bytes_per_second)} {unit}"
    if isinstance(link, Interconnect) and link.gpus_per_uplink is not None:
        text += f", GPUs on one uplink: {link.gpus_per_uplink}"
    if isinstance(link, Interconnect) and link.gpus_per_socket is not None:
        between = _rate(link.socket_bandwidth_bytes_per_second)
        text += f", GPUs on one processor: {link.gpus_per_socket}, {between} between processors"
    return [(name, text), *source_facts(link.source)]


def _gpu_facts(entry: Gpu) -> list[Fact]:
    facts: list[Fact] = [
        ("GPU", entry.name),
        ("reported as", ", ".join(entry.product_names) or UNKNOWN),
        ("memory, as sold", f"{entry.memory_gib:g} GB"),
        ("memory, NVML total", known(entry.nvml_total_bytes, format_gib)),
        ("memory bandwidth", _rate(entry.memory_bandwidth_bytes_per_second)),
        ("native bf16", "yes" if entry.native_bf16 else "no"),
        ("default power limit", _limits(entry)),
        *(source_facts(entry.power.source) if entry.power else ()),
        *((f"dense peak, {dtype}", _peak(entry, dtype)) for dtype in ("bf16", "fp16", "tf32", "fp32")),
        *source_facts(entry.source),
        ("usable by a process", known(entry.usable_memory_bytes, format_gib)),
    ]
    return facts + (source_facts(entry.usable_memory_source) if entry.usable_memory_source else [])
