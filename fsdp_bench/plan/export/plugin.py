"""The settings that accelerate's FSDP plugin can express, which Hugging Face's Trainer uses, too.

Read in accelerate 1.15: utils/dataclasses.py, FullyShardedDataParallelPlugin; utils/fsdp_utils.py, fsdp2_prepare_model
and fsdp2_apply_ac; accelerator.py, prepare_model.
"""

from typing import Any

from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.pieces import DTYPES, changed, is_mixed, of_fully_shard_alone
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Api, BackwardPrefetch, Checkpointing, Offload, Reentrant, TrainSetup, Wrap
from fsdp_bench.spec.units import format_gib

_PYTORCH = "--export pytorch has it"
_ENDS = "under fsdp2 accelerate makes units of the embedding and of the norm and the head, as --wrap block-and-ends"


def as_accelerate_shards(chosen: Chosen, kind: str) -> tuple[Chosen, tuple[str, ...]]:
    """Return what accelerate makes of a setting, with notes. Raises SpecError if it cannot, or that does not fit."""
    setup = chosen.setup
    if (reason := _why_not(chosen)) is not None:
        raise SpecError(f"export {kind}: {reason}")
    on_host = host_note(chosen, kind)
    if setup.api is Api.FSDP1 or setup.wrap is Wrap.BLOCK_AND_ENDS:
        return chosen, (on_host,)
    found, note = changed(chosen, kind, _ENDS, wrap=Wrap.BLOCK_AND_ENDS)
    return found, (note, on_host)


def _why_not(chosen: Chosen) -> str | None:
    setup = chosen.setup
    if setup.is_bare:
        return f"one GPU needs no fsdp_config; --export huggingface trains without one, and {_PYTORCH}"
    if setup.is_ddp:
        return f"DistributedDataParallel has no fsdp_config; {_PYTORCH}, and so has --api fsdp1 NO_SHARD with one"
    if setup.compile:
        return f"accelerate does not compile blocks alone as --compile does; {_PYTORCH}"
    if setup.checkpointing is Checkpointing.SELECTIVE:
        return f"accelerate has no selective checkpointing; use --checkpointing full, or {_PYTORCH}"
    if setup.checkpointing_policy is not None:
        return f"accelerate checkpoints every block; leave out the policy, or {_PYTORCH}"
    if setup.offload is Offload.OPTIMIZER:
        return f"offload optimizer is not known to work with accelerate; {_PYTORCH}"
    if setup.precision.needs_grad_scaler:
        return f"accelerate's fp16 adds autocast and reduces in fp16; use bf16-mixed, or {_PYTORCH}"
    if setup.activation_offload and (setup.api is Api.FSDP1 or setup.checkpointing is not Checkpointing.FULL):
        return f"accelerate offloads activations under fsdp2 with --checkpointing full alone; {_PYTORCH}"
    return _why_not_fsdp1(chosen) if setup.api is Api.FSDP1 else _why_not_fsdp2(chosen)


def _why_not_fsdp1(chosen: Chosen) -> str | None:
    setup = chosen.setup
    if setup.wrap is Wrap.BLOCK:
        if setup.strategy.is_hybrid and setup.shard_group_size != chosen.gpus_per_node:
            return (
                f"accelerate's FSDP1 shards hybrid strategies over the {chosen.gpus_per_node} GPUs of a node, not"
                f" {setup.shard_group_size}; use that --shard-size, or {_PYTORCH}"
            )
        return None
    return f"accelerate does not make the units of --wrap {setup.wrap.value}; use block, or {_PYTORCH}"


def _why_not_fsdp2(chosen: Chosen) -> str | None:
    setup = chosen.setup
    if setup.wrap not in (Wrap.BLOCK, Wrap.BLOCK_AND_ENDS):
        return f"accelerate does not make the units of --wrap {setup.wrap.value}; use block-and-ends, or {_PYTORCH}"
    if chosen.modules.ends is None:
        return (
            "under fsdp2 accelerate puts an embedding that is also the head into one unit with the norm, which is not"
            f" predicted; use --api fsdp1, or {_PYTORCH}"
        )
    found = of_fully_shard_alone(setup)
    return None if found is None else f"accelerate has no {found} under fsdp2; {_PYTORCH}"


def strategy_name(setup: TrainSetup) -> str:
    """Return accelerate's name of FSDP1's strategy, which has no underscore before it."""
    return setup.strategy.value.lstrip("_")


def policy_text(setup: TrainSetup) -> str | None:
    """Return the mixed precision as an object of torch.distributed.fsdp; None if all dtypes are the stored one.

    accelerate's own ``mixed_precision: bf16`` reduces in bf16, adds autocast, and returns fp32 logits.
    """
    if not is_mixed(setup):
        return None
    kind = "MixedPrecision" if setup.api is Api.FSDP1 else "MixedPrecisionPolicy"
    precision = setup.precision
    return f"{kind}(param_dtype={DTYPES[precision.compute]}, reduce_dtype={DTYPES[precision.reduce]})"


PRECISION_NOTE = (
    "mixed precision is given to the FSDP plugin, in Python, and mixed_precision is 'no': with bf16 accelerate reduces"
    " gradients in bf16 and adds autocast and fp32 copies of the logits"
)


def hybrid_sizes(setup: TrainSetup) -> tuple[int, int] | None:
    """Return how often fully_shard replicates and over how many ranks it shards; None for strategies of one group."""
    if not setup.strategy.is_hybrid or setup.api is Api.FSDP1:
        return None
    return setup.world_size // setup.shard_group_size, setup.shard_group_size


def fsdp_fields(chosen: Chosen) -> dict[str, Any]:
    """Return a setting as fields of fsdp_config; accelerate's config has each with ``fsdp_`` before.

    Offload, and the strategy of FSDP1, have other names in both.
    """
    setup, prefetch = chosen.setup, chosen.setup.backward_prefetch
    found: dict[str, Any] = {
        "version": 1 if setup.api is Api.FSDP1 else 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": chosen.modules.block_class,
        "activation_checkpointing": setup.checkpointing is Checkpointing.FULL and setup.reentrant is Reentrant.NO,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    if setup.api is Api.FSDP2:
        return found | {"reshard_after_forward": setup.strategy.reshards_after_forward}
    return found | {
        "backward_prefetch": "NO_PREFETCH" if prefetch is BackwardPrefetch.NONE else prefetch.value,
        "forward_prefetch": setup.forward_prefetch,
        "use_orig_params": setup.use_orig_params,
        "sync_module_states": False,
    }


def host_note(chosen: Chosen, kind: str) -> str:
    """Note the host memory of ranks that each build the whole model. Raises SpecError if a node has less."""
    needed = chosen.question.model.num_parameters * chosen.setup.precision.store_bytes * chosen.gpus_per_node
    hardware = chosen.question.hardware
    there = hardware.server.host_memory_bytes if hardware else None
    text = f"every rank builds the whole model in host memory, {format_gib(needed)} on a node"
    if there is not None and needed > there:
        raise SpecError(f"export {kind}: {text} of {format_gib(there)}; --export pytorch builds it in parts")
    return text
