"""Chosen: the setting to export, what was predicted of it, and the modules of the model that is trained."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import msgspec

from fsdp_bench.catalog.architectures import FOLDERS, NotRecorded, recorded_architecture
from fsdp_bench.plan.defaults import USUAL_GPUS_PER_NODE
from fsdp_bench.plan.prediction import Prediction, answer
from fsdp_bench.plan.purchase.offer import MICRO_BATCHES, SettingOffer
from fsdp_bench.plan.question import Question
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.config import complete
from fsdp_bench.spec.recording.model import RecordedModel, code_of, lora_of
from fsdp_bench.spec.recording.recorded import Ends, RecordedCode
from fsdp_bench.spec.setup import TrainSetup


@dataclass(frozen=True)
class Modules:
    """The modules of a causal language model of transformers, by their names."""

    blocks: str
    """The list of blocks: ``model.layers``."""
    block_class: str
    ends: Ends | None
    """Those before the blocks and those behind them; None where the head is the embedding."""
    is_tied: bool


@dataclass(frozen=True)
class Chosen:
    """One setting to export. Its model is built by transformers, or by torchtitan, from ``config``."""

    question: Question
    """The model, the setup and the hardware. The setup is what the exported files train."""
    prediction: Prediction
    tokens_per_second_per_gpu: float | None
    config: Mapping[str, Any]
    command: str

    @property
    def setup(self) -> TrainSetup:
        """The setup."""
        return self.question.setup

    @property
    def num_nodes(self) -> int:
        """The servers."""
        return max(self.setup.world_size // self.gpus_per_node, 1)

    @property
    def gpus_per_node(self) -> int:
        """GPUs on each server; 8 where nothing says it. Raises SpecError if the GPUs do not fill servers of 8."""
        hardware, world = self.question.hardware, self.setup.world_size
        if hardware is not None and hardware.has_server:
            return hardware.gpus_per_node
        if world > USUAL_GPUS_PER_NODE and world % USUAL_GPUS_PER_NODE:
            raise SpecError(f"export: nothing says how {world} GPUs are spread over servers; name a --server")
        return min(USUAL_GPUS_PER_NODE, world)

    @property
    def code(self) -> str:
        """Whose code the prediction is for: ``huggingface``, ``torchtitan`` or ``benchmark``."""
        return code_of(self.question.model)

    @cached_property
    def modules(self) -> Modules:
        """The modules in transformers' code. Raises SpecError unless it is a causal model with one list of blocks."""
        code = self._recorded
        name = code.origin.architecture
        if len(code.num_blocks) != 1 or not name.endswith(("ForCausalLM", "LMHeadModel")):
            raise SpecError(f"export: {name} is not exported; causal language models with one list of blocks are")
        (path,) = code.num_blocks
        return Modules(path, code.block, code.ends, bool(self.full_config.get("tie_word_embeddings")))

    @property
    def lora(self) -> LoRA | None:
        """The adapters that are trained; None for the whole model."""
        return lora_of(self.question.model)

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return int(self.full_config["vocab_size"])

    @cached_property
    def full_config(self) -> Mapping[str, Any]:
        """The config with the defaults of its class."""
        architecture = self._recorded.architecture
        return complete(self.config, architecture.config_class) if architecture else self.config

    @property
    def architecture(self) -> str:
        """The class of the model in transformers."""
        return self._recorded.origin.architecture

    @cached_property
    def _recorded(self) -> RecordedCode:
        model = self.question.model
        if isinstance(model, RecordedModel) and model.code.origin.code == "huggingface":
            return model.code
        return recorded_architecture(self.config, self.setup.sequence_length, model.name).code

    def with_setup(self, setup: TrainSetup) -> Self:
        """Return the same with another setup, predicted anew. Raises SpecError if it cannot run, or does not fit."""
        question = replace(self.question, setup=setup)
        if question.impossible:
            raise SpecError(question.impossible)
        found = self._anew(question)
        if found.prediction.fits is False:
            raise SpecError("that does not fit (predicted)")
        return found

    def in_code(self, code: str) -> Self | None:
        """Return the same setting of the model in other code, predicted anew; None if that is not known."""
        try:
            length, name = self.setup.sequence_length, self.question.model.name
            model = recorded_architecture(self.config, length, name, FOLDERS[code])
        except NotRecorded:
            return None
        question = replace(self.question, model=model)
        return None if question.impossible else self._anew(question)

    def _anew(self, question: Question) -> Self:
        # as many micro-batches as need the memory of a step with all of them
        steps = min(question.setup.gradient_accumulation_steps, MICRO_BATCHES)
        few = msgspec.structs.replace(question.setup, gradient_accumulation_steps=steps)
        found = answer(replace(question, setup=few))
        speed = found.speed.tokens_per_second_per_gpu
        return replace(self, question=question, prediction=found, tokens_per_second_per_gpu=speed)


def chosen_by_prediction(prediction: Prediction, config: Mapping[str, Any], command: str) -> Chosen:
    """Return what ``predict`` answers."""
    speed = prediction.speed.tokens_per_second_per_gpu
    return Chosen(prediction.question, prediction, speed, config, command)


def chosen_by_offer(offer: SettingOffer, config: Mapping[str, Any], command: str) -> Chosen:
    """Return the winner of a plan."""
    question = replace(offer.prediction.question, setup=offer.timed.setup)
    return Chosen(question, offer.prediction, offer.timed.tokens_per_second_per_gpu, config, command)
