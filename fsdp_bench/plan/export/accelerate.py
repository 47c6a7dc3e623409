"""accelerate.yaml: the config of ``accelerate launch``; and train_accelerate.py: a training loop that it starts.

The dtypes of mixed precision are in the script: accelerate's config can name one dtype alone, for the parameters and
the reduction (accelerate 1.15, FullyShardedDataParallelPlugin.set_mixed_precision), and adds autocast.
"""

from __future__ import annotations

import json
from typing import Any

from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import File, environment, header, prefix, text_of
from fsdp_bench.plan.export.pieces import forward_text, optimizer_text, refuse_loss
from fsdp_bench.plan.export.plugin import (
    PRECISION_NOTE,
    as_accelerate_shards,
    hybrid_sizes,
    policy_text,
    reshards,
    strategy_name,
)
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Api, BackwardPrefetch, Checkpointing, Offload, Reentrant

KIND = "accelerate"
CONFIG_NAME = "accelerate.yaml"
NAME = "train_accelerate.py"


def config_and_script(chosen: Chosen, notes: tuple[str, ...]) -> list[File]:
    """Return the config and the script.

    Raises:
        SpecError: for what accelerate does not have.
    """
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
    fields: dict[str, Any] = {"fsdp_version": 1 if setup.api is Api.FSDP1 else 2}
    fields["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    fields["fsdp_transformer_layer_cls_to_wrap"] = chosen.modules.block_class
    fields["fsdp_offload_params"] = setup.offload is Offload.PARAMS
    fields["fsdp_activation_checkpointing"] = setup.checkpointing is Checkpointing.FULL
    if setup.activation_offload:
        fields["fsdp_activation_checkpointing_offload"] = True
    if setup.api is Api.FSDP2:
        return fields | {"fsdp_reshard_after_forward": reshards(setup), "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    prefetch = setup.backward_prefetch
    return fields | {
        "fsdp_sharding_strategy": strategy_name(setup),
        "fsdp_backward_prefetch": "NO_PREFETCH" if prefetch is BackwardPrefetch.NONE else prefetch.value,
        "fsdp_forward_prefetch": setup.forward_prefetch,
        "fsdp_use_orig_params": setup.use_orig_params,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_sync_module_states": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


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
