"""A user's catalogue: it adds, it overrides, and what is wrong in it is one line."""

from pathlib import Path

import pytest

from fsdp_bench.catalog.loader import BUILT_IN, load_user_catalog
from tests.conftest import message_of

SERVER = """
[[server]]
name = "basement"
provider = "ours"
gpu = "RTX-4090"
gpus_per_node = 4
"""
MODEL = """
[[model]]
name = "tiny"
family = "llama"
num_hidden_layers = 2
hidden_size = 64
num_attention_heads = 4
intermediate_size = 128
vocab_size = 100
max_position_embeddings = 128
"""
GPU = """
[[gpu]]
name = "rtx-4090"
product_names = ["NVIDIA GeForce RTX 4090"]
memory_gib = 48
native_bf16 = true
dense_flops_per_second = { bf16 = 160e12 }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_without_a_file_it_is_the_built_in_catalogue() -> None:
    assert load_user_catalog(None) is BUILT_IN


def test_entries_are_added_with_the_file_as_their_source(tmp_path: Path) -> None:
    path = write(tmp_path, SERVER + '[server.intra_node]\nkind = "PCIe"\n' + MODEL)
    catalog = load_user_catalog(path)
    mine = catalog.server("Basement")
    assert mine.source.title == str(path)
    assert mine.intra_node.source.title == str(path)
    assert mine.intra_node.bandwidth_bytes_per_second is None
    assert catalog.model("tiny").shape().num_hidden_layers == 2
    assert len(catalog.servers()) == len(BUILT_IN.servers()) + 1
    assert catalog.server("p5.48xlarge") is BUILT_IN.server("p5.48xlarge")


def test_the_memory_of_a_users_card_has_a_source(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[[gpu]]\nname = "Mine"\nproduct_names = []\nmemory_gib = 16\ndense_flops_per_second = {}\n'
        "native_bf16 = true\nusable_memory_bytes = 16000000000\n",
    )
    source = load_user_catalog(path).gpu("mine").usable_memory_source
    assert source.title == str(path)


def test_an_entry_of_the_same_name_overrides_the_built_in_one(tmp_path: Path) -> None:
    catalog = load_user_catalog(write(tmp_path, GPU + SERVER))
    assert catalog.gpu("RTX-4090").memory_gib == 48
    assert len(catalog.gpus()) == len(BUILT_IN.gpus())
    assert BUILT_IN.gpu("RTX-4090").memory_gib == 24


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("x = [", "is not TOML"),
        ("[[servr]]", "[servr] is not allowed; [[gpu]], [[server]], [[model]], [[price]] (did you mean 'server'?)"),
        ("[server]\nname = 'x'", "server: write each as a table [[server]]"),
        (SERVER + "gpu_count = 4", "[[server]] 'basement': unknown field 'gpu_count'"),
        (SERVER.replace("gpus_per_node", "gpus_per_nod"), "(did you mean 'gpus_per_node'?)"),
        (SERVER.replace("gpus_per_node = 4", ""), "[[server]] 'basement': has no `gpus_per_node`"),
        (SERVER.replace("4\n", "'4'\n"), "gpus_per_node: '4' is not allowed; a whole number"),
        (SERVER.replace("= 4\n", "= 0\n"), "gpus_per_node: 0 is not allowed; 1 or more"),
        (SERVER.replace("RTX-4090", "RXT-4090"), "gpu: 'RXT-4090' is not in the catalogue (did you mean 'RTX-4090'?)"),
        (SERVER.replace('"basement"', "7"), "[[server]] number 1: name: 7 is not allowed; a text"),
        (SERVER + SERVER, "[[server]]: the name 'basement' is taken twice"),
        (SERVER + '[server.intra_node]\nkind = "pci"', "kind: 'pci' is not allowed; one of nvswitch,"),
        (SERVER + '[server.inter_node]\nkind = "efa"\nbandwith = 1.0', "unknown field 'inter_node.bandwith'; one of"),
        (SERVER + '[server.inter_node]\nkind = "efa"\nnum_nics = -1', "num_nics: -1 is not allowed"),
        (MODEL.replace("= 4\n", "= 5\n"), "[[model]] 'tiny': hidden_size: 64 is not a multiple of"),
        (MODEL.replace("= 2\n", "= -2\n"), "num_hidden_layers: -2 is not allowed; 1 or more"),
        (GPU.replace("bf16 = 160e12", "bf16 = 160"), "per_second.bf16: 160.0 is not allowed; 1000000 or more"),
        (GPU.replace("native", "matmul_efficiency = 1e-9\nnative"), "efficiency: 1e-09 is not allowed; 0.001"),
        (GPU.replace("native", "num_multiprocessors = 10000000\nnative"), "is not allowed; up to 100000"),
        (GPU.replace("bf16 = 160e12", "bf17 = 1e12"), "dense_flops_per_second: 'bf17' is not allowed; one of fp32,"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path: Path, text: str, part: str) -> None:
    path = write(tmp_path, text)
    message = message_of(lambda: load_user_catalog(path))
    assert message.startswith(f"{path}: ")
    assert part in message
