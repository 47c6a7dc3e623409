"""Models in the sizes that a test needs: the benchmark's, a config.json, recorded ones; and predictions of a setup."""

from typing import Any

from fsdp_bench.catalog.architectures import recorded_architecture
from fsdp_bench.catalog.loader import model
from fsdp_bench.plan.estimate import MemoryPrediction, predict_memory
from fsdp_bench.plan.prediction import Prediction, answer
from fsdp_bench.plan.question import Question
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import TrainSetup


def shape(**fields: Any) -> ModelShape:
    """Return a Llama of three blocks with four heads of 16, or what the fields say instead."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 512}
    return ModelShape(**{"name": "test", "family": Family.LLAMA, **sizes, **fields})


def llama_config(**fields: Any) -> dict[str, Any]:
    """Return the config.json of a Llama of four blocks with four heads of 16, or what the fields say instead."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 200}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **fields}


def recorded(name: str, sequence_length: int = 512, **sizes: Any) -> RecordedModel:
    """Return a model of the catalogue in Hugging Face's code, in other sizes where the test names them."""
    return recorded_architecture(model(name).hf_config() | sizes, sequence_length, name)


def memory_of(model: Model, setup: TrainSetup, kernels: Kernels = CUDA, rank: int | None = None) -> MemoryPrediction:
    """Return the predicted memory of ``rank``, by default of the rank with the highest peak."""
    return predict_memory(SimulatedSteps(model, setup, kernels), rank)


def estimate_of(model: Model, setup: TrainSetup, hardware: Hardware | None = None, **given: Any) -> Prediction:
    return answer(Question(model, setup, hardware, **given))
