"""servers.toml: complete, and consistent with gpus.toml; Hardware, which is made of it."""

import pytest

from fsdp_bench.catalog.loader import gpu, server
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware, LinkKind
from tests.conftest import run_command

PROMISED = {
    "A10G": ("g5.48xlarge",),
    "L40S": ("g6e.48xlarge",),
    "V100-SXM2-32GB": ("p3dn.24xlarge",),
    "A100-SXM-40GB": ("p4d.24xlarge", "a2-highgpu-8g", "ND A100 v4"),
    "A100-SXM-80GB": ("p4de.24xlarge", "a2-ultragpu-8g", "DGX A100"),
    "H100-SXM": ("p5.48xlarge", "a3-highgpu-8g", "a3-megagpu-8g", "ND H100 v5", "dgx-h100"),
    "H200-SXM": ("p5en.48xlarge", "a3-ultragpu-8g", "ND H200 v5"),
    "B200": ("p6-b200.48xlarge", "DGX B200"),
}


def test_every_server_that_was_promised_is_there_with_eight_of_its_gpus() -> None:
    for gpu_name, names in PROMISED.items():
        for found in map(server, names):
            assert (found.gpu, found.gpus_per_node) == (gpu_name, 8)


def test_links_are_per_direction() -> None:
    """Vendors print both directions: NVLink 3, 4 and 5 as 600, 900 and 1800 GB/s per GPU (their whitepapers)."""
    printed = {"p4d.24xlarge": 600e9, "p5.48xlarge": 900e9, "p6-b200.48xlarge": 1800e9}
    for name, both_directions in printed.items():
        link = server(name).intra_node
        assert link.kind is LinkKind.NVSWITCH
        assert link.bandwidth_bytes_per_second == both_directions / 2


def test_a_host_link_says_how_many_gpus_share_it() -> None:
    """AWS's and Azure's own NCCL topology files: two GPUs behind each uplink of p4d and ND A100 v4, one in p5."""
    shared = {name: server(name).host_link for name in ("p4d.24xlarge", "ND-A100-v4", "p5.48xlarge", "g5.48xlarge")}
    assert [link and link.gpus_per_uplink for link in shared.values()] == [2, 2, 1, None]


def test_pcie_says_which_gpus_share_a_processor_where_that_is_documented() -> None:
    """AWS's topology file of g5: buses 16 to 19 at the first processor, 1a to 1d at the second."""
    links = [server(name).intra_node for name in ("g5.48xlarge", "g6e.48xlarge")]
    assert [link and link.gpus_per_socket for link in links] == [4, None]
    text = " ".join(run_command("servers", "g5.48xlarge").stdout.split())
    assert "GPUs on one processor: 4, 16 GB/s between processors" in text


def test_networks_are_per_node_in_bytes() -> None:
    """Sold in bits per second: p4d 400 Gbps, p5 3200 Gbps, ND H100 v5 3.2 Tbps (their product pages)."""
    for name, gbps in {"p4d.24xlarge": 400, "p5.48xlarge": 3200, "ND-H100-v5": 3200, "ND-A100-v4": 1600}.items():
        network = server(name).inter_node
        assert network.bandwidth_bytes_per_second == gbps * 1e9 / 8


def test_servers_say_how_many_ranks_there_are() -> None:
    node = server("p5.48xlarge")
    four = Hardware(server=node, gpu=gpu(node.gpu), num_nodes=4, gpus_per_node=8)
    assert (four.world_size, four.ranks_per_node(32), four.count(32)) == (32, 8, 4)
    assert (four.holds(32), four.holds(16)) == (True, False)
    assert four.name == "p5.48xlarge"


def test_a_gpu_alone_is_one_node_of_one_whose_links_and_host_are_unknown() -> None:
    alone = Hardware.of_gpu(gpu("H100-SXM"))
    assert (alone.has_server, alone.num_nodes, alone.gpus_per_node) == (False, 1, 1)
    assert (alone.ranks_per_node(16), alone.count(16), alone.holds(16)) == (16, 16, True)
    assert alone.name == "H100-SXM"
    node = alone.server
    assert {node.intra_node, node.inter_node, node.host_link, node.host_memory_bytes} == {None}


def test_hardware_refuses_what_its_servers_have_not() -> None:
    node = server("p5.48xlarge")
    with pytest.raises(SpecError, match=r"gpus-per-node: 9 is not allowed; p5\.48xlarge has 8"):
        Hardware(server=node, gpu=gpu(node.gpu), gpus_per_node=9)
    with pytest.raises(SpecError, match="nodes: 0"):
        Hardware(server=node, gpu=gpu(node.gpu), num_nodes=0, gpus_per_node=8)
    with pytest.raises(SpecError, match="gpu: B200 is not the GPU of p5"):
        Hardware(server=node, gpu=gpu("B200"), gpus_per_node=8)
