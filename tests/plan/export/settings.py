"""A small Llama and its settings, as tests export them."""

from collections.abc import Sequence
from typing import Any

from fsdp_bench.catalog import loader
from fsdp_bench.catalog.architectures import ADAPTERS, FOLDER, recorded_architecture
from fsdp_bench.catalog.lookup import model, server
from fsdp_bench.plan.export.chosen import Chosen, chosen_by_prediction
from fsdp_bench.plan.export.export import export_each
from fsdp_bench.plan.export.files import File
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.setup import TrainSetup
from tests.shapes import llama_config

CONFIG = llama_config(hidden_size=256, intermediate_size=512, vocab_size=1024)
COMMAND = "fsdp-bench predict --hf-config config.json"


def chosen(
    config: dict[str, Any] | None = None,
    expandable_segments: bool = False,
    lora: LoRA | None = None,
    hardware: Hardware | None = None,
    **fields: Any,
) -> Chosen:
    """Return a setting of a small model on H100s: by default bf16-mixed, 8 ranks, 256 tokens."""
    config = config or CONFIG
    hardware = hardware or Hardware.of_gpu(loader.gpu("H100-SXM"))
    setup = TrainSetup(**{"world_size": 8, "precision": "bf16-mixed", "sequence_length": 256, **fields})
    folder = FOLDER if lora is None else ADAPTERS
    shape = recorded_architecture(config, setup.sequence_length, "tiny", folder, lora)
    question = Question(shape, setup, hardware, expandable_segments=expandable_segments)
    return chosen_by_prediction(answer(question), config, COMMAND)


def chosen_on_servers(num_nodes: int, **fields: Any) -> Chosen:
    """Return a setting of Llama-3.1-8B in Hugging Face's code on servers of 8 H100s."""
    cluster = server("p5.48xlarge", num_nodes)
    setup = TrainSetup(
        **{"world_size": cluster.world_size, "precision": "bf16-mixed", "sequence_length": 4096, **fields}
    )
    question = Question(model("Llama-3.1-8B", 4096, code="huggingface"), setup, cluster)
    return chosen_by_prediction(answer(question), loader.BUILT_IN.model("Llama-3.1-8B").hf_config(), COMMAND)


def export(kinds: Sequence[str], chosen: Chosen) -> list[File]:
    """Return the files of a setting; raise if one of the kinds cannot express it."""
    files, refused = export_each(kinds, chosen)
    if refused:
        raise refused[0]
    return files
