"""The model that predicts a trial: its own, or a recording of its code, which is made here; and a trial in one line."""

import hashlib
from functools import cache

from fsdp_bench.catalog.recorded import recorded_model
from fsdp_bench.plan.recording import RecordingError, record, recorded_config
from fsdp_bench.plan.setup_text import setup_line
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import MachineError, SpecError
from fsdp_bench.spec.model_code import ModelCode, TrainedModel
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import UserModule
from fsdp_bench.spec.subprocesses.model_code import RecordingSpec
from fsdp_bench.sweep.config.models import source_of
from fsdp_bench.sweep.machine import package_version

ON_A_CPU = "a model's code is recorded as CUDA's operators run it; trials on a CPU are not predicted"


def predictable_model(trial: TrialRecord) -> Model:
    """Return what predicts a trial; other code is recorded.

    Raises SpecError if it cannot be predicted, MachineError if it cannot be recorded here.
    """
    model = trial.model
    if not isinstance(model, ModelCode):
        return model
    if trial.hardware == "cpu":
        raise SpecError(ON_A_CPU)
    for package, version in model.versions.items():
        if (here := package_version(package)) != version:
            raise MachineError(f"{model.name}: trained with {package} {version}; here is {here or 'none'}")
    recorded = _recorded(model, trial.setup.sequence_length, trial.setup.activation_offload)
    if (reason := why_impossible(recorded, trial.setup, "cuda")) is not None:
        raise SpecError(reason)
    return recorded


@cache
def _recorded(model: ModelCode, sequence_length: int, activation_offload: bool) -> RecordedModel:
    try:
        if model.config is not None:
            code = recorded_config(model.config, sequence_length, lambda what: None, model.lora, activation_offload)
            return recorded_model(code, model.name)
        module = UserModule(function=str(model.function), block=model.transformer_block, folder=model.folder)
        if hashlib.sha256(source_of(module).encode()).hexdigest()[:16] != model.source:
            raise MachineError(f"{model.name}: the file of {model.function} has changed since it was trained")
        spec = RecordingSpec(module=module, sequence_length=sequence_length, activation_offload=activation_offload)
        return recorded_model(record(spec), model.name)
    except RecordingError as error:
        raise MachineError(str(error)) from None


def cell_label(model: TrainedModel | RecordedModel, setup: TrainSetup, rank: int = 0) -> str:
    """Return a model and a setup in one line, with every field that is seldom changed and is here."""
    width = f" x {model.hidden_size}" if model.hidden_size else " layers"  # a recording for one size names none
    where = f", rank {rank}" if rank else ""
    return f"{model.kind}, {model.num_hidden_layers}{width}, {setup_line(setup)}{where}"
