"""torchtitan_config.py: a function that returns torchtitan's Trainer.Config, for its ``--module`` and ``--config``.

Read in torchtitan 0.3.0, which has functions in Python where earlier versions had TOML files: config/manager.py,
config/configs.py, distributed/fsdp.py (apply_fsdp_to_decoder), distributed/activation_checkpoint.py and
components/loss.py.
"""

from typing import Any

from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import File, environment, text_of, torchrun
from fsdp_bench.plan.export.pieces import changed, of_fully_shard_alone
from fsdp_bench.spec.checkpointing_policy import EVERY_SECOND_PRODUCT
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Checkpointing, Loss, Offload, OptimizerKind, Reentrant, TrainSetup, Wrap

KIND = "torchtitan"
NAME = "torchtitan_config.py"
VERSION = "0.3.0"
MAX_NORM = 1.0
"""torchtitan's default. It always clips."""

_FAMILIES = {"llama": ("llama3", "Llama3Model", "ComplexRoPE"), "qwen3": ("qwen3", "Qwen3Model", "CosSinRoPE")}
_IMPLEMENTATIONS = {
    OptimizerKind.ADAMW_FOREACH: "foreach",
    OptimizerKind.ADAMW_FUSED: "fused",
    OptimizerKind.ADAMW_FOR_LOOP: "for-loop",
}
_POLICIES = {Checkpointing.NONE: "", Checkpointing.FULL: "FullAC", Checkpointing.SELECTIVE: "SelectiveAC"}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def config(chosen: Chosen, notes: tuple[str, ...]) -> list[File]:
    """Return the file. Raises SpecError for what torchtitan does not have, and where what it makes does not fit."""
    if (reason := _why_not(chosen)) is not None:
        raise SpecError(f"export {KIND}: {reason}")
    chosen, changes = _as_torchtitan_trains(chosen)
    own = [f"for torchtitan {VERSION}; earlier versions read TOML files"]
    own.append("attention is FlexAttention, which torchtitan runs; what is predicted is F.scaled_dot_product_attention")
    if chosen.setup.checkpointing is Checkpointing.FULL:
        own.append("torchtitan recomputes a block to its end (early_stop=False); predicted is torch's early stop")
    notes = (*notes, *changes, *own, *environment(chosen))
    text = _text(chosen, notes)
    start = torchrun(chosen, "-m torchtitan.train --module torchtitan_config --config chosen_setting")
    return [File(KIND, NAME, text, start, notes)]


def _why_not(chosen: Chosen) -> str | None:
    setup, precision = chosen.setup, chosen.setup.precision
    if chosen.config.get("model_type") not in _FAMILIES:
        return f"only {' and '.join(_FAMILIES)} have torchtitan's code here, not {chosen.config.get('model_type')}"
    if not setup.uses_fully_shard:
        return "torchtitan has fully_shard alone: use --api fsdp2 with a strategy that shards"
    if chosen.modules.is_tied:
        return (
            "torchtitan puts an embedding that is also the head into one unit with the norm, which is not predicted;"
            " --export pytorch"
        )
    if precision.reduce != "fp32" or precision.store not in _DTYPES or precision.compute not in _DTYPES:
        return f"torchtitan reduces in fp32, and has no fp16; use bf16-mixed, not {precision}"
    return _why_not_checkpointing(setup) or _why_not_step(setup) or _why_not_units(setup)


def _why_not_checkpointing(setup: TrainSetup) -> str | None:
    is_rule = setup.checkpointing_policy == EVERY_SECOND_PRODUCT
    if setup.checkpointing is Checkpointing.SELECTIVE and not is_rule:
        return f"its selective checkpointing is --checkpointing-policy {EVERY_SECOND_PRODUCT}"
    if setup.reentrant is not Reentrant.NO:
        return "torchtitan's checkpointing is not reentrant; leave --reentrant out"
    if setup.checkpointing is Checkpointing.FULL and setup.checkpointing_policy is not None:
        return "torchtitan checkpoints every block; leave out the policy"
    return "torchtitan has no offload of activations" if setup.activation_offload else None


def _why_not_step(setup: TrainSetup) -> str | None:
    if setup.loss not in (Loss.PLAIN, Loss.COMPILED):
        return f"loss {setup.loss.value} is not torchtitan's, whose chunks include the head; use plain or compiled"
    if setup.optimizer not in _IMPLEMENTATIONS or setup.offload is Offload.OPTIMIZER:
        return "torchtitan is exported with AdamW alone: adamw, adamw-fused or adamw-for-loop"
    if setup.gradient_accumulation_steps > 1 and not setup.sync_every_micro_batch:
        return "torchtitan reduces gradients in every micro-batch; leave out --no-sync"
    return None


def _why_not_units(setup: TrainSetup) -> str | None:
    if setup.wrap not in (Wrap.BLOCK, Wrap.BLOCK_AND_ENDS):
        return f"torchtitan does not make the units of --wrap {setup.wrap.value}; use block-and-ends"
    found = of_fully_shard_alone(setup)
    return None if found is None else f"torchtitan {VERSION} has no {found}"


def _as_torchtitan_trains(chosen: Chosen) -> tuple[Chosen, tuple[str, ...]]:
    """Return the setting as torchtitan trains it, predicted anew where it differs, and a note about that."""
    fields: dict[str, Any] = {}
    options = []
    if chosen.setup.wrap is Wrap.BLOCK:
        fields["wrap"] = Wrap.BLOCK_AND_ENDS
        options.append("--wrap block-and-ends")
    if chosen.setup.max_grad_norm is None:
        fields["max_grad_norm"] = MAX_NORM
        options.append(f"--max-grad-norm {MAX_NORM:g}")
    if not fields:
        return chosen, ()
    found, note = changed(chosen, KIND, f"torchtitan trains with {' and '.join(options)}", **fields)
    return found, (note,)


def _text(chosen: Chosen, notes: tuple[str, ...]) -> str:
    setup, fields = chosen.setup, chosen.full_config
    module, model, rope = _FAMILIES[str(chosen.config["model_type"])]
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    theta = (fields.get("rope_parameters") or {}).get("rope_theta") or fields.get("rope_theta") or 10000.0
    facts = {
        "module": module,
        "model": model,
        "rope": rope,
        "fields": fields,
        "sizes": [int(fields[name]) for name in names],
        "theta": float(theta),
        "policy": _POLICIES[setup.checkpointing],
        "components": [*(["model"] if setup.compile else []), *(["loss"] if setup.loss is Loss.COMPILED else [])],
        "dtypes": _DTYPES,
        "implementation": _IMPLEMENTATIONS[setup.optimizer],
    }
    return text_of(NAME, f"Config of torchtitan {VERSION}", chosen, notes, has_imports=True, **facts)
