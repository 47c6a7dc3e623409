"""accelerate.yaml: the config of ``accelerate launch``; and train_accelerate.py: a training loop that it starts.

The dtypes of mixed precision are in the script: accelerate's config can name one dtype alone, for the parameters and
the reduction (accelerate 1.15, FullyShardedDataParallelPlugin.set_mixed_precision), and adds autocast.
"""

import json
from typing import Any

from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import File, environment, header, prefix, text_of
from fsdp_bench.plan.export.pieces import forward_text, optimizer_text, refuse_loss
from fsdp_bench.plan.export.plugin import (
    PRECISION_NOTE,
    as_accelerate_shards,
    fsdp_fields,
    hybrid_sizes,
    policy_text,
    strategy_name,
)
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Api, Offload, Reentrant

KIND = "accelerate"
CONFIG_NAME = "accelerate.yaml"
NAME = "train_accelerate.py"


def config_and_script(chosen: Chosen, notes: tuple[str, ...]) -> list[File]:
    """Return the config and the script. Raises SpecError for what accelerate does not have."""
    if chosen.setup.reentrant is not Reentrant.NO:
        raise SpecError(
            f"export {KIND}: accelerate's checkpointing is not reentrant; --export pytorch or huggingface has it"
        )
    chosen, changes = as_accelerate_shards(chosen, KIND)
    notes = (*notes, *changes, *environment(chosen))
    own = [f"{PRECISION_NOTE}; {NAME} has it, another script needs its FullyShardedDataParallelPlugin"]
    own = own if policy_text(chosen.setup) else []
    if not chosen.setup.limit_all_gathers:
        own.append(f"limit_all_gathers is no option of the config; {NAME} turns it off")
    machines = " --machine_rank NODE --main_process_ip HEAD_NODE --main_process_port 29500" * (chosen.num_nodes > 1)
    start = f"{prefix(chosen)}accelerate launch --config_file {CONFIG_NAME}{machines} {NAME}"
    return [
        File(KIND, CONFIG_NAME, _config(chosen, (*notes, *own)), None, (*notes, *own)),
        File(KIND, NAME, _script(chosen, notes), start, ()),
    ]


def _config(chosen: Chosen, notes: tuple[str, ...]) -> str:
    setup = chosen.setup
    fields: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "no",
        "num_machines": chosen.num_nodes,
        "num_processes": setup.world_size,
        "fsdp_config": _fsdp_config(chosen),
    }
    if (sizes := hybrid_sizes(setup)) is not None:
        fields["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": sizes[0],
            "parallelism_config_dp_shard_size": sizes[1],
        }
    return header("Config of accelerate launch", chosen, notes) + _yaml(fields)


def _fsdp_config(chosen: Chosen) -> dict[str, Any]:
    setup = chosen.setup
    fields = {**fsdp_fields(chosen), "offload_params": setup.offload is Offload.PARAMS}
    fields |= {"activation_checkpointing_offload": True} if setup.activation_offload else {}
    if setup.api is Api.FSDP1:
        fields |= {"sharding_strategy": strategy_name(setup), "cpu_ram_efficient_loading": False}
    return {f"fsdp_{name}": value for name, value in fields.items()}


def _yaml(fields: dict[str, Any], indent: str = "") -> str:
    """Return YAML of words, numbers and nested tables. Text is quoted, so that 'no' stays text."""
    text = ""
    for name, value in fields.items():
        inner = isinstance(value, dict)
        text += f"{indent}{name}:" + ("\n" + _yaml(value, indent + "  ") if inner else f" {json.dumps(value)}\n")
    return text


def _script(chosen: Chosen, notes: tuple[str, ...]) -> str:
    setup = chosen.setup
    refuse_loss(setup, chosen.architecture, chosen.config)
    policy = policy_text(setup)
    given = [] if policy is None else ["mixed_precision_policy=precision"]
    given += [] if setup.limit_all_gathers else ["limit_all_gathers=False"]
    return text_of(
        NAME,
        "Training with accelerate",
        chosen,
        notes,
        policy=policy,
        given=given,
        optimizer=optimizer_text(setup),
        forward=forward_text(setup),
        config_name=CONFIG_NAME,
    )
