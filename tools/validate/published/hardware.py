"""The hardware of published runs: GPUs and networks under the names that the sources use."""

from __future__ import annotations

import re

import msgspec

from fsdp_bench.catalog import loader
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu, Hardware, LinkKind, Network, Source
from tools.validate.published.cases import CaseInputs

_GPUS = {
    ("A100 80GB", 80): ("A100-SXM-80GB", "p4de.24xlarge"),
    ("A100-SXM4-80GB", 80): ("A100-SXM-80GB", "p4de.24xlarge"),
    ("A100 40GB", 40): ("A100-SXM-40GB", "p4d.24xlarge"),
    ("A100-SXM4-40GB", 40): ("A100-SXM-40GB", "p4d.24xlarge"),
    ("H100 80GB", 80): ("H100-SXM", "p5.48xlarge"),
    ("H100", 96): ("H100-SXM-96GB", "p5.48xlarge"),
}
"""The catalogue's GPU, and a server with such GPUs and NVSwitch, by the sources' name of the GPU."""


def gpu_of(inputs: CaseInputs) -> Gpu | None:
    """Return the catalogue's GPU. None if the row's name may mean several GPUs."""
    names = _GPUS.get((inputs.gpu, inputs.gpu_memory_gb or 0))
    return loader.gpu(names[0]) if names else None


def cluster_of(inputs: CaseInputs) -> Hardware:
    """Return the nodes: GPUs connected by NVSwitch, and between nodes the network that the source states, if any.

    Raises:
        SpecError: if the source does not state the GPU, the number of GPUs, or the network's bandwidth.
    """
    names = _GPUS.get((inputs.gpu, inputs.gpu_memory_gb or 0))
    if names is None or not inputs.num_gpus or not inputs.num_nodes:
        raise SpecError("the source does not state which GPUs, or how many on how many nodes")
    gpu, server = loader.gpu(names[0]), loader.server(names[1])
    network = None
    if inputs.num_nodes > 1 and inputs.interconnect is not None:
        network = read_network(inputs.interconnect, inputs.source)
    return Hardware(
        server=msgspec.structs.replace(server, gpu=gpu.name, inter_node=network),
        gpu=gpu,
        num_nodes=inputs.num_nodes,
        gpus_per_node=inputs.num_gpus // inputs.num_nodes,
    )


_NETWORK = re.compile(r"(?:(?P<count>\d+) ?x ?)?(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[GT])(?P<bit>bit|b|B)(?:ps|/s)")
_KINDS = {"roce": LinkKind.ROCE, "efa": LinkKind.EFA, "infiniband": LinkKind.INFINIBAND, "ib": LinkKind.INFINIBAND}


def read_network(stated: str, source: str) -> Network:
    """Read ``400 Gb/s per node``, ``1600 Gbps/node RoCE``, ``8 x 200 Gbit/s per node``, ``EFA 0.4 Tb/s per node``.

    Without a named kind it is InfiniBand; without a number of interfaces there are eight, one for each GPU.

    Raises:
        SpecError: for text without the bandwidth of a node.
    """
    found = _NETWORK.search(stated)
    if found is None or re.search(r"(per |/)node", stated) is None:
        raise SpecError(f"network {stated!r}: what a node has is not said as in '400 Gb/s per node'")
    bits = float(found["number"]) * {"G": 1e9, "T": 1e12}[found["unit"]] * (8 if found["bit"] == "B" else 1)
    words = [_KINDS[word] for word in re.findall(r"[a-z]+", stated.lower()) if word in _KINDS]
    return Network(
        kind=words[0] if words else LinkKind.INFINIBAND,
        source=Source(title=source, date="published"),
        num_nics=int(found["count"] or 8),
        bandwidth_bytes_per_second=int(found["count"] or 1) * bits / 8,
    )
