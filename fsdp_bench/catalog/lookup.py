"""gpu(), server() and model(): lookup by name, size or file. find_placement(): the hardware of a run.

Every function takes a name or the object itself, so that ``estimate("Llama-3.1-8B", ...)`` and
``estimate(model("Llama-3.1-8B"), ...)`` are the same.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_bench.catalog.architectures import ADAPTERS, ATTENTION, FOLDERS, NotRecorded, recorded_architecture
from fsdp_bench.catalog.hf_config import config_name, read_config, read_hf_config
from fsdp_bench.catalog.ladder import nearest_size
from fsdp_bench.catalog.loader import BUILT_IN, Catalog
from fsdp_bench.catalog.model_entry import config_names
from fsdp_bench.catalog.recorded import read_recorded, recorded_model
from fsdp_bench.spec.checked import Count, read
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.hardware import Gpu, Hardware, Server
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.recording.model import Model, RecordedModel, code_of
from fsdp_bench.spec.setup import ShardingStrategy
from fsdp_bench.spec.units import parse_count

CODES = ("huggingface", "torchtitan", "benchmark")
"""Whose code a number is for."""

POSITIONS = {Family.LLAMA: 4096, Family.GPT2: 1024}
"""Positions of the ladder's models. For a longer sequence the model gets as many positions as the sequence is long."""

SIZE = re.compile(r"\s*[0-9]+(\.[0-9]+)?\s*[kmbt]?\s*", re.IGNORECASE)
"""A number of parameters as users write it: ``7B``, ``124m``."""


def gpu(name: str | Gpu, catalog: Catalog = BUILT_IN) -> Gpu:
    """Return a GPU of the catalogue: ``gpu("H100-SXM")``, ``gpu("A100 PCIe 80GB")``.

    Raises:
        SpecError: if no GPU or several GPUs match, naming these or the nearest name.
    """
    return catalog.gpu(name) if isinstance(name, str) else read(Gpu, name, "gpu")


def server(
    name: str | Server, nodes: int = 1, gpus_per_node: int | None = None, catalog: Catalog = BUILT_IN
) -> Hardware:
    """Return servers of the catalogue to train on: ``server("p5.48xlarge", nodes=2)``.

    Args:
        name: the server's name or alias, in any case.
        nodes: how many of them.
        gpus_per_node: GPUs that are used on each node; by default all.
        catalog: where to look; by default what comes with fsdp-bench.

    Raises:
        SpecError: for an unknown name, naming the nearest name, and for more GPUs per node than the server has.
    """
    entry = _server(name, catalog)
    each = entry.gpus_per_node if gpus_per_node is None else gpus_per_node
    return Hardware(server=entry, gpu=catalog.gpu_of(entry), num_nodes=nodes, gpus_per_node=each)


_GPUS = re.compile(r"\s*([1-9]\d*)\s*(?:x|×|\s)\s*(\S.*)", re.IGNORECASE)  # noqa: RUF001


def _server(name: str | Server, catalog: Catalog) -> Server:
    found: Server = catalog.server(name) if isinstance(name, str) else read(Server, name, "server")
    return found


def cluster_of(text: str, catalog: Catalog = BUILT_IN) -> Hardware:
    """Return so many of a GPU, ``8 x H100-SXM``, in the first server of the catalogue that has them.

    Raises SpecError for an unknown GPU, for one that no server has, and for a number that fills no whole servers.
    """
    found = _GPUS.fullmatch(_text("gpus", text))
    if found is None:
        raise SpecError(f"gpus: {shown(text)} is not allowed; how many of which GPU, like '8 x H100-SXM'")
    count, kind = int(found[1]), catalog.gpu(found[2])
    entry = next((each for each in catalog.servers() if catalog.gpu(each.gpu) == kind), None)
    if entry is None:
        raise SpecError(f"gpus: the catalogue has no server with {kind.name}; name the GPU alone: gpu={kind.name!r}")
    each = min(count, entry.gpus_per_node)
    nodes, rest = divmod(count, each)
    if rest:
        raise SpecError(f"gpus: {count} is not allowed; a multiple of the {each} GPUs of a {entry.name}")
    return Hardware(server=entry, gpu=catalog.gpu_of(entry), num_nodes=nodes, gpus_per_node=each)


def model(
    name: str | Path | Model,
    sequence_length: int = 1,
    family: Family | str = Family.LLAMA,
    catalog: Catalog = BUILT_IN,
    code: str | None = None,
) -> Model:
    """Return a model: its dimensions if it is the benchmark's own code, else its recorded code.

    Args:
        name: a name of the catalogue (``"Llama-3.1-8B"``), a size (``"7B"``: the nearest of the size ladder), or the
            path of a Hugging Face ``config.json``, or of a recorded model (``.recorded.json.gz``).
        sequence_length: number of positions that the model must have at least, and of tokens for which a code with a
            sliding window is meant.
        family: if ``name`` is a size: ``llama`` or ``gpt2``.
        catalog: where to look; by default what comes with fsdp-bench.
        code: whose code: ``huggingface``, ``torchtitan`` or ``benchmark``. By default Hugging Face's for a config.json
            and for what the benchmark has no code of, else the benchmark's.

    Raises:
        NotRecorded: for a config.json of which no recording comes with fsdp-bench.
        SpecError: for an unknown name, naming the nearest name, for a model that cannot be expressed exactly, and
            for a sequence longer than the learned positions.
    """
    if code not in (None, *CODES):
        raise SpecError(f"code: {shown(code)} is not allowed; {', '.join(CODES)}")
    if isinstance(name, RecordedModel):
        return name
    folder = FOLDERS.get(code or "huggingface", FOLDERS["huggingface"])
    if isinstance(name, ModelShape):
        shape = name
    elif str(name).endswith((".recorded.json", ".recorded.json.gz", ".recorded.json.xz")):
        return recorded_model(read_recorded(Path(name)), Path(name).name.partition(".")[0])
    elif not isinstance(name, Path) and SIZE.fullmatch(_text("model", name)):
        family = Family(family)
        shape = nearest_size(family, parse_count(name, "model"), positions=max(sequence_length, POSITIONS[family]))
        return with_code(shape, sequence_length, code) if code in FOLDERS else shape
    else:
        is_file = isinstance(name, Path) or name.endswith(".json")
        if code != "benchmark" and (is_file or code is not None or not catalog.model(str(name)).supported):
            config, named = named_config(name, catalog)
            return recorded_architecture(config, sequence_length, named, folder)
        shape = read_hf_config(Path(name)) if is_file else catalog.model(str(name)).shape()
    if shape.family is Family.GPT2 and sequence_length > shape.max_position_embeddings:
        raise SpecError(
            f"seq: {sequence_length} is not allowed; {shape.name} has {shape.max_position_embeddings} learned positions"
        )
    return shape


def named_config(
    named: str | Path, catalog: Catalog = BUILT_IN, attention: str | None = None
) -> tuple[dict[str, Any], str]:
    """Return the config.json of a model of the catalogue or of a file, and the model's name.

    ``attention`` is transformers' attn_implementation; None leaves it as it is there.

    Raises SpecError for a file that is none, and an unknown name.
    """
    if isinstance(named, Path) or named.endswith(".json"):
        config = read_config(Path(named))
        name = config_name(config, Path(named))
    else:
        entry = catalog.model(named)
        config, name = entry.hf_config(), entry.name
    if attention is not None:
        return {**config, ATTENTION: attention}, f"{name} with {attention} attention"
    return config, name


def adapted_model(named: str | Path, sequence_length: int, lora: LoRA, catalog: Catalog = BUILT_IN) -> RecordedModel:
    """Return a model with PEFT's adapters.

    Raises NotRecorded if no built-in recording holds for it; SpecError as ``named_config``.
    """
    config, name = named_config(named, catalog)
    return recorded_architecture(config, sequence_length, name_with(name, lora), ADAPTERS, lora)


def name_with(name: str, lora: LoRA | None) -> str:
    """Return the name of a model with adapters, or without."""
    return name if lora is None else f"{name} with {lora.title}"


def with_code(shape: ModelShape, sequence_length: int, code: str | None) -> RecordedModel:
    """Return the benchmark's dimensions in other code. Raises NotRecorded if no recording holds for them."""
    return recorded_architecture(config_of_shape(shape), sequence_length, shape.name, FOLDERS[code or "huggingface"])


def in_other_code(
    name: str | Path | Model, found: Model, sequence_length: int, catalog: Catalog = BUILT_IN
) -> Model | None:
    """Return the model that ``model`` found in other code, Hugging Face's or else the benchmark's; None without any."""
    if isinstance(found, ModelShape):
        with suppress(NotRecorded):
            return with_code(found, sequence_length, "huggingface")
    elif found.code.origin.lora is None and found.code.architecture is not None and not found.code.architecture.side:
        with suppress(SpecError):
            code = "benchmark" if code_of(found) == "huggingface" else "huggingface"
            other = model(name, sequence_length, catalog=catalog, code=code)
            return None if other is found else other
    return None


def config_of_shape(shape: ModelShape) -> dict[str, Any]:
    """Return the config.json of a model with the benchmark's dimensions."""
    names = config_names(shape.family.value)
    fields = {names[field]: getattr(shape, field) for field in names if hasattr(shape, field)}
    return {"model_type": shape.family.value, **fields}


def _text(field: str, name: object) -> str:
    if not isinstance(name, str):
        raise SpecError(f"{field}: {shown(name)} is not allowed; a name of the catalogue")
    return name


class Placement(NamedTuple):
    """The hardware of a run and its world size. The number of nodes is None if only the world size is known."""

    hardware: Hardware | None
    num_nodes: int | None
    gpus_per_node: int
    world_size: int

    def sizes(self, strategy: ShardingStrategy, shard_size: int | None) -> dict[str, int]:
        """Return the world size and, for a hybrid strategy on several nodes, the shard size: the GPUs of one node."""
        sizes = {"world_size": self.world_size}
        if shard_size is not None:
            sizes["shard_size"] = shard_size
        elif strategy.is_hybrid and (self.num_nodes or 1) > 1 and self.gpus_per_node > 1:
            sizes["shard_size"] = self.gpus_per_node
        return sizes


def place_names(hardware: Hardware | None) -> tuple[str | None, str | None, int | None, int | None]:
    """Return the names of the server and the GPU, the number of nodes and of GPUs on each; None for what is unknown."""
    if hardware is None or not hardware.has_server:
        return None, hardware.gpu.name if hardware else None, None, None
    return hardware.name, hardware.gpu.name, hardware.num_nodes, hardware.gpus_per_node


def find_placement(
    gpu_name: str | Gpu | None = None,
    server_name: str | Server | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    world_size: int | None = None,
    catalog: Catalog = BUILT_IN,
) -> Placement:
    """Return a run's hardware from names and counts. Raises SpecError for unknown names, or contradicting counts."""
    nodes = read(Count | None, nodes, "nodes")
    gpus_per_node = read(Count | None, gpus_per_node, "gpus_per_node")
    world_size = read(Count | None, world_size, "world_size")
    if server_name is not None and gpu_name is not None:
        raise SpecError("server and gpu each name the GPU; keep one")
    if world_size is not None and nodes is not None:
        raise SpecError("world_size and nodes each say how many GPUs; keep one")
    if server_name is None and gpu_name is None and catalog.power is not None:
        raise SpecError("power: no GPU is named; --server NAME or --gpu NAME")
    if server_name is None:
        found_nodes, each, world = _counts(nodes, gpus_per_node, world_size, None)
        alone = None if gpu_name is None else Hardware.of_gpu(gpu(gpu_name, catalog))
        return Placement(alone, found_nodes, each, world)
    entry = _server(server_name, catalog)
    found_nodes, each, world = _counts(nodes, gpus_per_node, world_size, entry.gpus_per_node)
    assert found_nodes is not None
    return Placement(server(entry, found_nodes, each, catalog), found_nodes, each, world)


def _counts(
    nodes: int | None, gpus_per_node: int | None, world_size: int | None, available: int | None
) -> tuple[int | None, int, int]:
    """Return nodes, GPUs per node and in total; ``available`` are the server's GPUs, None if none is named."""
    if world_size is None:
        if gpus_per_node is None and available is None and (nodes or 1) > 1:
            raise SpecError("nodes: without a server, gpus_per_node is needed too")
        nodes, each = nodes or 1, gpus_per_node or available or 1
        return nodes, each, nodes * each
    if gpus_per_node is None and available is None:
        return None, world_size, world_size
    each = gpus_per_node or min(available or world_size, world_size)
    if world_size % each:
        raise SpecError(f"world_size: {world_size} is not allowed; a multiple of the {each} GPUs of a node")
    return world_size // each, each, world_size
