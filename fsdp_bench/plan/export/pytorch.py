"""train_fsdp.py: a training script with torch and transformers alone, for torchrun."""

from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import File, environment, text_of, torchrun
from fsdp_bench.plan.export.pieces import base_dtype, forward_text, is_mixed, optimizer_text, refuse_loss, with_adapters
from fsdp_bench.plan.export.plugin import host_note
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.recorded import NO_ENDS
from fsdp_bench.spec.setup import Api, Checkpointing, Reentrant, TrainSetup, Wrap

KIND = "pytorch"
NAME = "train_fsdp.py"


def script(chosen: Chosen, notes: tuple[str, ...]) -> list[File]:
    """Return the script. Raises SpecError for what is not exported."""
    setup = chosen.setup
    refuse_loss(setup, chosen.architecture, chosen.config)
    optimizer = optimizer_text(setup, "model.parameters()" if chosen.lora is None else "trained(model)")
    is_quantized = chosen.lora is not None and chosen.lora.is_quantized
    # FSDP1 would part a tied head from its embedding. Linear layers in 4 bits are built on the GPU: they take values.
    on_host = setup.api is Api.FSDP1 and chosen.modules.is_tied and not is_quantized
    _refuse_wrap(chosen)
    notes = (*notes, *((host_note(chosen, KIND),) if on_host else ()), *environment(chosen))
    # Under fsdp2 layers are quantized once the model is sharded. Before, a GPU would hold all of it in 4 bits, and what
    # that leaves in the caching allocator cannot be emptied: shards lie in the segments of the whole layers.
    fills = is_quantized and setup.uses_fully_shard
    built_on, why_there = _place(setup, on_host, is_quantized and not fills)
    text = text_of(
        NAME,
        "Training with PyTorch",
        chosen,
        notes,
        fills=fills,
        built_on=built_on,
        why_there=why_there,
        is_on_meta=not on_host and not is_quantized,
        is_mixed=is_mixed(setup),
        ends=_ends(chosen),
        base="model" if chosen.lora is None else "model.get_base_model()",
        base_dtype=base_dtype(setup, chosen.lora),
        with_adapters=with_adapters(setup),
        forward=forward_text(setup),
        optimizer=optimizer,
        has_scaler=setup.precision.needs_grad_scaler,
        keeps_gradients=setup.gradient_accumulation_steps > 1
        and not setup.sync_every_micro_batch
        and not setup.is_bare,
        checkpoints_around=setup.reentrant is Reentrant.AROUND and setup.checkpointing is not Checkpointing.NONE,
    )
    return [File(KIND, NAME, text, torchrun(chosen, NAME), notes)]


def _refuse_wrap(chosen: Chosen) -> None:
    setup = chosen.setup
    exported = (Wrap.BLOCK, Wrap.BLOCK_AND_ENDS, Wrap.NONE, Wrap.SIZE)
    if setup.wrap not in (exported if chosen.lora is None else (*exported, Wrap.BLOCK_AND_ADAPTERS)):
        raise SpecError(f"export: wrap {setup.wrap.value} is not exported; use block")
    if setup.wrap is Wrap.SIZE and setup.uses_fully_shard:
        raise SpecError("export: wrap size under fsdp2 is not exported; use block, or --api fsdp1")


def _place(setup: TrainSetup, on_host: bool, is_quantized_first: bool) -> tuple[str, str]:
    """Return the device on which the model is built, as Python, and why there."""
    if setup.is_ddp and not is_quantized_first:
        return "device", "the whole model" if setup.is_bare else "the same on every rank"
    if on_host:
        return (
            '"cpu"',
            "FSDP1 would part the head from the embedding on meta: each rank needs host memory for all of it",
        )
    return '"meta"', "without data" if is_quantized_first else "without data: each rank allocates its shards alone"


def _ends(chosen: Chosen) -> tuple[list[str], list[str]]:
    """Return the modules of the units around the blocks, as Python; empty without such units."""
    if chosen.setup.wrap is not Wrap.BLOCK_AND_ENDS or chosen.setup.is_ddp:
        return [], []
    ends = chosen.modules.ends
    if ends is None:
        raise SpecError(f"export: {NO_ENDS}")
    return [f"model.{name}" for name in ends.before], [f"model.{name}" for name in ends.after]
