"""The setups that cannot run, and why: rules that need neither a model nor hardware."""

from collections.abc import Iterator
from itertools import chain

from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.vocabulary import (
    Api,
    BackwardPrefetch,
    Checkpointing,
    Float8,
    Offload,
    OptimizerKind,
    Reentrant,
    ShardingStrategy,
    Wrap,
)

SELECTIVE_AROUND_UNITS = (
    "units inside blocks (wrap = size): torch's selective checkpointing counts their views and profiler annotations as"
    " operators and fails when it recomputes more of them than in forward; use wrap = block, a larger min_num_params,"
    " fsdp1 with limit_all_gathers = false and without forward_prefetch and offload, or checkpointing full or none"
)
"""torch/utils/checkpoint.py, _CachedTorchDispatchMode: "invocation index ... encountered during backward but not found
in storage". Not every step fails: found where query, key and value projections are units that are resharded after
forward, and under SHARD_GRAD_OP where gradients are accumulated without being reduced."""


POLICY_AROUND_UNITS = (
    "checkpointing_policy: around units inside blocks (wrap = size) a policy also saves the wrapper's own casts and"
    " copies, which is not predicted; use wrap = block, a larger min_num_params, or the default policy"
)

ADAPTERS_ARE_FSDP1 = "wrap = block-and-adapters is of fsdp1, whose units have one dtype; use wrap = block with fsdp2"
"""The reason against fsdp2."""

NO_ADAPTERS = (
    "wrap = block-and-adapters: the model has no frozen parameters, so every module would be a unit; use wrap = block"
)
"""The reason against a model without adapters."""

PREFETCHED_ADAPTERS = (
    "forward_prefetch with wrap = block-and-adapters is not predicted: it gathers an adapter before PEFT asks for its"
    " dtype, and what then runs was not recorded; leave forward_prefetch out"
)
"""The reason against adapters that are gathered ahead."""

TIED_ENDS = (
    "wrap = block-and-ends: the head of this model is its embedding (tie_word_embeddings), and torch needs a shared"
    " parameter in one unit, here the root; use wrap = block"
)
"""fully_shard, FSDPState._validate_no_duplicate_params; FSDP1 frees a unit's parameters before their second use."""

FLOAT8_MULTIPLE = 16
"""Sizes of matrices in float8 must be multiples of this (torch._scaled_mm)."""
FLOAT8_CAPABILITY = 8.9
"""The lowest compute capability with matrix products in float8."""


def impossible(setup: TrainSetup, device: str) -> str | None:
    """Return why a setup cannot run on ``cuda`` or ``cpu``; None if it can. Each reason names an alternative."""
    reasons = chain(
        _against_groups(setup),
        _against_offload(setup, device),
        _against_optimizer_offload(setup, device),
        _against_checkpointing(setup),
        _against_loss(setup, device),
        _against_activation_offload(setup, device),
        _against_options(setup),
        _against_resharding(setup),
        _against_fp32_head(setup),
        _against_precision(setup, device),
        _against_float8(setup, device),
        _against_optimizer(setup),
        _against_optimizer_in_backward(setup),
    )
    return next(reasons, None)


def _without_fsdp(setup: TrainSetup) -> str:
    """Return what trains the model under NO_SHARD of fsdp2, for a sentence."""
    what = "a model without FSDP on one GPU" if setup.is_bare else "DistributedDataParallel"
    return f"{what} (NO_SHARD under fsdp2)"


def _against_groups(setup: TrainSetup) -> Iterator[str]:
    """Yield why a hybrid strategy cannot run: it needs at least 2 shard groups of at least 2 ranks."""
    if not setup.strategy.is_hybrid:
        return
    world, shard = setup.world_size, setup.shard_size or setup.world_size // 2
    needs = f"{setup.strategy.value} needs at least 2 groups of at least 2 ranks"
    if world < 4:
        yield f"{needs}, not world size {world}; use 4 or more ranks"
    if 1 < shard < world and world % shard == 0:
        return
    largest = next((size for size in range(world // 2, 1, -1) if world % size == 0), None)
    if largest is None:
        yield f"{needs}, and {world} ranks cannot be cut into equal groups; use another world size"
    if shard == world:
        yield f"{needs}; shard size {shard} of {world} ranks leaves one group; use a shard size of {largest} or less"
    if shard == 1:
        yield f"{needs}; shard size 1 shards nothing; use a shard size of 2 to {largest}"
    yield f"{needs}; {world} ranks cannot be cut into groups of {shard}; use a shard size of {largest} or less"


def _against_offload(setup: TrainSetup, device: str) -> Iterator[str]:
    if setup.offload is Offload.PARAMS:
        if setup.api is Api.FSDP1 and setup.gradient_accumulation_steps > 1 and setup.sync_every_micro_batch:
            yield (
                "FSDP1's CPUOffload loses gradients that are accumulated outside no_sync (torch's documentation of"
                " FullyShardedDataParallel); use no_sync (--no-sync, sync_every_micro_batch = false), or api fsdp2"
            )
        if setup.api is Api.FSDP1 and device == "cpu":
            yield "FSDP1's CPUOffload needs an accelerator to offload from; api fsdp2 offloads on a CPU too"
        if setup.is_ddp:
            yield f"{_without_fsdp(setup)} has no CPU offload; api fsdp1 has"


def _against_optimizer_offload(setup: TrainSetup, device: str) -> Iterator[str]:
    if setup.offload is not Offload.OPTIMIZER:
        return
    if device == "cpu":
        yield "torchao's CPUOffloadOptimizer needs a GPU to offload from; offload params under fsdp2 runs on a CPU"
    if not setup.uses_fully_shard:
        yield (
            "torchao's CPUOffloadOptimizer needs gradients that are reduced when they are accumulated, as fully_shard's"
            " are; use api fsdp2 with a strategy that shards, or offload params"
        )
    if not setup.optimizer.is_adamw_of_torch:
        yield f"offload optimizer steps torch's AdamW on the CPU, not {setup.optimizer.value}; use adamw-fused"
    if setup.max_grad_norm is not None:
        yield "torchao's CPUOffloadOptimizer copies gradients before they are clipped; leave out max_grad_norm"
    if setup.precision.needs_grad_scaler:
        yield "torchao's CPUOffloadOptimizer copies gradients before they are unscaled; use bf16-mixed"


def _against_checkpointing(setup: TrainSetup) -> Iterator[str]:
    """Yield why the kind of checkpointing has no such policy, cannot be reentrant, or is not predicted.

    In one unit of all blocks, or units of parts of a block, each block's backward reduces a whole unit's gradients.
    """
    kind, policy, reentrant = setup.checkpointing, setup.checkpointing_policy, f"reentrant {setup.reentrant.value}"
    if policy is not None:
        if kind is Checkpointing.NONE:
            yield f"checkpointing_policy: nothing is checkpointed that {policy} could be about; use selective or full"
        if setup.policy.is_of_blocks and kind is not Checkpointing.FULL:
            yield f"checkpointing_policy: {policy} chooses blocks that are checkpointed fully; use checkpointing full"
        if not setup.policy.is_of_blocks and kind is Checkpointing.FULL:
            yield (
                f"checkpointing_policy: checkpointing full saves no operator's output, as {policy} says; use selective"
            )
    if setup.reentrant is Reentrant.NO:
        return
    if kind is not Checkpointing.FULL:
        yield f"{reentrant} is a kind of full checkpointing; use checkpointing full"
    if setup.compile or setup.activation_offload:
        what = "compile" if setup.compile else "activation_offload"
        yield f"{reentrant} with {what} is not predicted; use one of them"
    if setup.wrap in (Wrap.NONE, Wrap.SIZE) and not setup.is_ddp:
        yield f"{reentrant} needs blocks as units: wrap = block, not {setup.wrap.value}"


def _against_loss(setup: TrainSetup, device: str) -> Iterator[str]:
    if setup.loss.is_fused and device == "cpu":
        yield f"loss {setup.loss.value} runs Triton's kernels, which need a GPU; use plain or chunked"
    if setup.loss.includes_head and not setup.is_ddp and setup.wrap not in (Wrap.BLOCK, Wrap.NONE):
        yield (
            f"loss {setup.loss.value} reads the head's weight outside of the head's forward, so that the head cannot be"
            f" a unit, as with wrap = {setup.wrap.value}; use wrap = block or none"
        )


def _against_activation_offload(setup: TrainSetup, device: str) -> Iterator[str]:
    if setup.activation_offload and device == "cpu":
        yield "activation_offload copies from a GPU to the host; on a CPU checkpointing saves memory"
    if setup.activation_offload and setup.compile:
        yield "activation_offload works by hooks of saved tensors, which with compile are not tested; use one of them"


def _against_options(setup: TrainSetup) -> Iterator[str]:
    """Yield why the api lacks one of the options. Such options are refused, not ignored."""
    if setup.api is Api.FSDP1:
        if setup.compile and not setup.use_orig_params:
            yield "compiling under FSDP1 needs use_orig_params = true"
        if setup.optimizer is OptimizerKind.ADAMW_FUSED and setup.precision.needs_grad_scaler:
            yield (
                "torch's ShardedGradScaler (fp16 under fsdp1) fails with a fused optimizer: its overflow flag has the"
                " wrong shape; use adamw-foreach, or fsdp2"
            )
        return
    if setup.strategy is ShardingStrategy.NO_SHARD and setup.forward_prefetch:
        yield f"{_without_fsdp(setup)} gathers nothing, so forward_prefetch means nothing"
    if not setup.limit_all_gathers:
        yield "fsdp2 has no rate limiter to turn off; limit_all_gathers = false needs fsdp1"
    if not setup.use_orig_params:
        yield "fsdp2 always keeps the original parameters; use_orig_params = false needs fsdp1"
    if setup.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        yield "fsdp2 prefetches before the gradient computation (BACKWARD_PRE) or not at all; BACKWARD_POST needs fsdp1"


def _against_resharding(setup: TrainSetup) -> Iterator[str]:
    """Yield why units cannot be resharded after forward as reshard_after_forward and reshard_last_block say."""
    ranks, strategy = setup.reshard_after_forward, setup.strategy
    if ranks is not None:
        if setup.api is Api.FSDP1:
            yield "FullyShardedDataParallel reshards to all ranks; reshard_after_forward = N needs fsdp2"
        if strategy is not ShardingStrategy.FULL_SHARD:
            yield f"reshard_after_forward = N replaces FULL_SHARD's resharding to all ranks, not {strategy.value}'s"
        if setup.wrap is Wrap.NONE:
            yield "wrap = none: the root is the only unit, and torch never reshards it after forward"
        if ranks >= setup.world_size or setup.world_size % ranks:
            allowed = [str(size) for size in range(2, setup.world_size // 2 + 1) if setup.world_size % size == 0]
            which = f"one of {', '.join(allowed)}" if allowed else "no number is"
            yield f"reshard_after_forward: {ranks} is not allowed with world_size {setup.world_size}; {which}"
    if not setup.reshard_last_block:
        if setup.api is Api.FSDP1:
            yield "FullyShardedDataParallel reshards all units alike; reshard_last_block = false needs fsdp2"
        if not strategy.reshards_after_forward:
            yield f"{strategy.value} reshards no unit after forward, so reshard_last_block = false changes nothing"
        if not setup.wrap.has_blocks:
            yield "reshard_last_block = false needs blocks as units: wrap = block or block-and-ends"


def _against_fp32_head(setup: TrainSetup) -> Iterator[str]:
    if not setup.fp32_head:
        return
    if setup.wrap is not Wrap.BLOCK_AND_ENDS:
        yield "fp32_head: only a unit has its own precision, so the head must be one: wrap = block-and-ends"
    if setup.precision.compute == "fp32":
        yield f"fp32_head: with {setup.precision} the head computes in fp32 as it is"
    if setup.is_ddp:
        yield f"{_without_fsdp(setup)} has no units, of which fp32_head needs one; fsdp1 has"


def _against_precision(setup: TrainSetup, device: str) -> Iterator[str]:
    precision = setup.precision
    if setup.is_ddp and precision.store != "fp32" and precision.compute != precision.store:
        yield f"{_without_fsdp(setup)} computes in the stored dtype or under autocast from fp32, not {precision}"
    if setup.is_ddp and not setup.is_bare:
        if precision.reduce == "bf16" != precision.store and device == "cpu":
            yield "DistributedDataParallel's bf16 compression hook needs NCCL; on a CPU use fsdp1, or reduce in fp32"
        if precision.reduce != precision.store and precision.store != "fp32":
            yield (
                f"DistributedDataParallel reduces in the stored dtype or in a narrower one, not {precision}; use fsdp1"
            )
    if precision.store == "fp16":
        yield "fp16 parameters cannot be trained: the gradient scaler needs fp32 ones; use fp16-mixed"


def _against_float8(setup: TrainSetup, device: str) -> Iterator[str]:
    if setup.float8 is Float8.NONE:
        return
    if device != "cuda":
        yield f"float8 needs a GPU of compute capability {FLOAT8_CAPABILITY} or more; leave it out"
    if not setup.compile:
        yield (
            "float8 without compile runs each scale and cast as a kernel of its own, which takes longer than the"
            " products save, and is not predicted; use compile"
        )
    if setup.precision.compute != "bf16":
        yield f"float8 replaces matrix products in bf16, and {setup.precision} computes in {setup.precision.compute}"
    if (tokens := setup.micro_batch_size * setup.sequence_length) % FLOAT8_MULTIPLE:
        yield f"float8 needs a multiple of {FLOAT8_MULTIPLE} tokens in a micro-batch (torch._scaled_mm), not {tokens}"


def _against_optimizer(setup: TrainSetup) -> Iterator[str]:
    """Yield why the optimizer cannot update what the wrapper hands it."""
    if setup.optimizer is OptimizerKind.ADAFACTOR and setup.uses_fully_shard:
        yield (
            "torch.optim.Adafactor fails on fully_shard's DTensors (it squares norms in place that are partial over the"
            " ranks); use fsdp1, or NO_SHARD"
        )
    is_flat = setup.effective_strategy is not ShardingStrategy.NO_SHARD or not setup.use_orig_params
    if setup.optimizer is OptimizerKind.MUON and setup.api is Api.FSDP1 and is_flat:
        yield (
            "torch.optim.Muon needs matrices, and fsdp1's shards have one dimension; use fsdp2, or NO_SHARD with"
            " use_orig_params = true"
        )
    if setup.optimizer is OptimizerKind.ADAMW_8BIT:
        if setup.offload is not Offload.NONE:
            yield f"torchao's AdamW8bit needs offload none, not {setup.offload.value}; use adamw-fused"
        if setup.precision.needs_grad_scaler:
            yield "the gradient scaler of fp16 with torchao's AdamW8bit is not tested; use bf16-mixed, or adamw-fused"
        if setup.optimizer_in_backward:
            yield "optimizer_in_backward with torchao's AdamW8bit, which compiles its step, is not modelled; use adamw"


def _against_optimizer_in_backward(setup: TrainSetup) -> Iterator[str]:
    if not setup.optimizer_in_backward:
        return
    if setup.gradient_accumulation_steps > 1:
        yield "optimizer_in_backward steps in every backward, so that gradients cannot be accumulated; accumulate 1"
    if setup.max_grad_norm is not None:
        yield "optimizer_in_backward frees each gradient before the norm of all is known; leave out max_grad_norm"
    if setup.precision.needs_grad_scaler:
        yield "optimizer_in_backward steps before the gradient scaler of fp16 has seen all gradients; use bf16-mixed"
    if setup.offload is not Offload.NONE:
        yield f"optimizer_in_backward updates on the GPU, offload {setup.offload.value} on the CPU; use one of them"
    if setup.is_bare:
        yield "optimizer_in_backward without FSDP (NO_SHARD under fsdp2) is not predicted; use fsdp1"
    if setup.is_ddp:
        yield (
            "DistributedDataParallel (NO_SHARD under fsdp2) keeps gradients in buckets, so optimizer_in_backward saves"
            " nothing; use a strategy that shards, or fsdp1"
        )
    if setup.api is Api.FSDP1 and not setup.use_orig_params:
        yield "optimizer_in_backward under fsdp1 needs use_orig_params = true (torch refuses it otherwise)"
