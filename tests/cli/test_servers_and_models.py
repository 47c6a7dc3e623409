"""The commands that print the catalogue: tables, single entries with sources, JSON, one-line errors."""

from __future__ import annotations

from fsdp_bench.catalog.loader import gpus, models, servers
from tests.conftest import json_of, stdout_of


def test_servers_lists_every_server_and_every_gpu() -> None:
    printed = stdout_of("servers")
    for entry in (*servers(), *gpus()):
        assert any(line.split("  ")[0] == entry.name for line in printed.splitlines()), entry.name
    assert "unknown" in printed


def test_a_server_is_shown_with_its_links_its_gpu_and_their_sources() -> None:
    text = " ".join(stdout_of("servers", "DGX B200").split())
    for part in (
        *("host memory unknown", "nvswitch, NVLink 5, 900 GB/s per GPU and direction", "GPU to host unknown"),
        *("infiniband, NDR, interfaces: 8, 400 GB/s per node and direction", "usable by a process"),
        *("(2024-03-18)", "NVIDIA HGX B200 datasheet (2024-03)"),
    ):
        assert part in text


def test_a_gpu_is_shown_by_its_own_name() -> None:
    printed = stdout_of("servers", "mi300x")
    assert "AMD Instinct MI300X" in printed
    assert "host memory" not in printed


def test_servers_as_json_is_one_document_with_units_in_its_names() -> None:
    document = json_of("servers")
    assert len(document["servers"]) == len(servers())
    assert len(document["gpus"]) == len(gpus())
    p5 = json_of("servers", "p5.48xlarge")
    assert p5["inter_node"]["bandwidth_bytes_per_second"] == 400e9  # 3200 Gbps
    assert p5["host_memory_bytes"] == 2048 * 2**30
    assert p5["source"]["date"]


def test_models_lists_every_model_and_all_can_be_planned() -> None:
    printed = stdout_of("models")
    assert "in all rows: predicted yes" in printed
    assert {entry.name for entry in models()} <= {line.split()[0] for line in printed.splitlines()}


def test_a_model_that_is_not_benchmarked_is_shown_with_its_published_count_and_why() -> None:
    text = " ".join(stdout_of("models", "qwen3-8b").split())
    assert "8,190,735,360 (published)" in text
    assert "with Hugging Face's code; Qwen 3 normalises queries and keys" in text


def test_models_as_json_holds_the_reason_too() -> None:
    document = json_of("models")
    by_name = {entry["name"]: entry for entry in document["models"]}
    # By hand: (50257 + 1024) x 768 embeddings, 12 blocks of 12 x 768^2 + 13 x 768, and a norm of 2 x 768.
    assert by_name["gpt2"]["num_parameters"] == by_name["gpt2"]["published_num_parameters"] == 124_439_808
    assert by_name["t5-base"]["num_parameters"] is None
    assert "encoder-decoder" in by_name["t5-base"]["unsupported_because"]
