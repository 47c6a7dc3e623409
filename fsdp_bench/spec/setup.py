"""TrainSetup: all settings of a training step, with PyTorch's names; combinations that cannot run."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta
from msgspec.structs import force_setattr

from fsdp_bench.spec.checked import CaseInsensitiveEnum, Checked, Count, Positive
from fsdp_bench.spec.checkpointing_policy import CheckpointingPolicy, read_policy, written
from fsdp_bench.spec.errors import SpecError, nearest, shown


class ShardingStrategy(CaseInsensitiveEnum):
    """PyTorch's sharding strategies (torch.distributed.fsdp.ShardingStrategy), stored by name, never by number."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "_HYBRID_SHARD_ZERO2"

    @classmethod
    def aliases(cls) -> dict[str, str]:
        """Return the aliases: ZeRO stages, common abbreviations, and accelerate's numbers 1 to 5."""
        return {
            "fsdp": "FULL_SHARD",
            "zero3": "FULL_SHARD",
            "zero2": "SHARD_GRAD_OP",
            "shard-grad": "SHARD_GRAD_OP",
            "ddp": "NO_SHARD",
            "hsdp": "HYBRID_SHARD",
            "hybrid-shard-zero2": "_HYBRID_SHARD_ZERO2",
            "1": "FULL_SHARD",
            "2": "SHARD_GRAD_OP",
            "3": "NO_SHARD",
            "4": "HYBRID_SHARD",
            "5": "_HYBRID_SHARD_ZERO2",
        }

    @classmethod
    def field(cls) -> str:
        """Return the name of the field in sweep files and on the command line."""
        return "strategy"

    @property
    def is_hybrid(self) -> bool:
        """Whether the strategy shards inside groups and replicates between them."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether a unit's unsharded parameters are freed between forward and backward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class Api(CaseInsensitiveEnum):
    """The wrapper: fsdp1 is FullyShardedDataParallel; fsdp2 is fully_shard, or DistributedDataParallel for NO_SHARD.

    On one GPU NO_SHARD under fsdp2 is the model alone.
    """

    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"


class Offload(CaseInsensitiveEnum):
    """Whether parameters, gradients and optimizer states are in host memory, or the optimizer alone."""

    NONE = "none"
    PARAMS = "params"
    OPTIMIZER = "optimizer"
    """torchao.optim.CPUOffloadOptimizer: states, and copies of parameters and gradients, in host memory."""


class Checkpointing(CaseInsensitiveEnum):
    """Activation checkpointing: none, selective (outputs of costly operators are saved), or full (whole blocks)."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Reentrant(CaseInsensitiveEnum):
    """Whether checkpointing is reentrant (torch.utils.checkpoint, use_reentrant), and where: torch's default is not.

    Forward then runs a block without a graph; backward runs all of it again and calls torch.autograd.backward inside.
    """

    NO = "no"
    INSIDE = "inside"
    """Inside of the block's unit, whose hooks run once: transformers' GradientCheckpointingLayer."""
    AROUND = "around"
    """Around the block's unit, whose hooks run in both forwards: transformers before it had GradientCheckpointingLayer.

    Under fsdp1 a unit that is resharded after forward is gathered once more; under fsdp2 it stays unsharded until its
    backward has run (FSDPParamGroup.post_forward, is_bw)."""

    @classmethod
    def field(cls) -> str:
        """Return the name of the field in sweep files and on the command line."""
        return "reentrant"


class OptimizerKind(CaseInsensitiveEnum):
    """AdamW in PyTorch's three implementations, plain SGD (foreach), and optimizers with smaller states."""

    ADAMW_FOREACH = "adamw-foreach"
    ADAMW_FUSED = "adamw-fused"
    ADAMW_FOR_LOOP = "adamw-for-loop"
    SGD = "sgd"
    ADAFACTOR = "adafactor"
    """torch.optim.Adafactor, which is a for-loop unless told otherwise."""
    ADAMW_8BIT = "adamw-8bit"
    """torchao.optim.AdamW8bit: one byte a moment, a step that torch.compile compiles."""
    MUON = "muon"
    """torch.optim.Muon of all matrices, and AdamW (foreach) of the other parameters."""

    @classmethod
    def aliases(cls) -> dict[str, str]:
        """Return the aliases. ``adamw`` is PyTorch's default on a GPU: foreach."""
        return {"adamw": "adamw-foreach"}

    @property
    def is_adamw_of_torch(self) -> bool:
        """Whether it is one of the implementations of torch.optim.AdamW."""
        return self in (OptimizerKind.ADAMW_FOREACH, OptimizerKind.ADAMW_FUSED, OptimizerKind.ADAMW_FOR_LOOP)

    @classmethod
    def field(cls) -> str:
        """Return the name of the field in sweep files and on the command line."""
        return "optimizer"


class Loss(CaseInsensitiveEnum):
    """The computation of the cross-entropy: on the whole fp32 logits, chunk by chunk, compiled, or in fused kernels."""

    PLAIN = "plain"
    CHUNKED = "chunked"
    COMPILED = "compiled"
    FLASH_ATTN = "flash-attn"
    """flash_attn.losses.cross_entropy.CrossEntropyLoss, which is llm-foundry's ``fused_crossentropy``."""
    LIGER = "liger"
    """LigerCrossEntropyLoss: the gradient overwrites the logits in forward."""
    LIGER_FUSED_LINEAR = "liger-fused-linear"
    """LigerFusedLinearCrossEntropyLoss: the head and the loss, and their gradients, chunk by chunk in forward."""

    UNSLOTH_FP32 = "unsloth-fp32"
    """unsloth's fast_cross_entropy_loss on fp32 logits, as in fms-acceleration: they become their gradient in backward.

    Trials compute it with torch's operators, some rows at a time: the same memory, but not the kernel's speed."""

    @property
    def is_fused(self) -> bool:
        """Whether it runs, or stands for, kernels that another package wrote in Triton."""
        return self in (Loss.FLASH_ATTN, Loss.LIGER, Loss.LIGER_FUSED_LINEAR, Loss.UNSLOTH_FP32)

    @property
    def includes_head(self) -> bool:
        """Whether it takes the head's input and weight instead of logits, inside of the model's forward."""
        return self is Loss.LIGER_FUSED_LINEAR


class Float8(CaseInsensitiveEnum):
    """torchao.float8's recipes (Float8LinearConfig.from_recipe_name), in which linear layers compute in float8.

    A tensor is scaled, so that its largest absolute value is that of the dtype, and cast before each matrix product.
    """

    NONE = "none"
    TENSORWISE = "tensorwise"
    """One scale a tensor."""
    ROWWISE = "rowwise"
    """A scale for each row of the one factor and each column of the other."""
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    """The same, with the gradients of weights computed in bf16."""


class Wrap(CaseInsensitiveEnum):
    """The FSDP units: each block, alone or with both ends of the model or the adapters, subtrees by size, or one.

    With ``block`` the root holds the embedding, the final norm and the head. ``block-and-ends`` makes units of them:
    under fsdp2 the embeddings are one and the final norm and the head another, which is not resharded after forward, as
    in torchtitan; under fsdp1, which wraps modules one by one, the token embedding and the head are, and the rest stays
    in the root. ``block-and-adapters`` is PEFT's fsdp_auto_wrap_policy: beside the blocks every module without children
    whose weight is trained, which makes each of LoRA's two matrices a unit. As in accelerate the model then runs under
    autocast, too: PEFT casts inputs to the dtype of its matrices, which they are not yet gathered in.
    """

    BLOCK = "block"
    BLOCK_AND_ENDS = "block-and-ends"
    BLOCK_AND_ADAPTERS = "block-and-adapters"
    SIZE = "size"
    NONE = "none"

    @property
    def has_blocks(self) -> bool:
        """Whether each block is one unit."""
        return self in (Wrap.BLOCK, Wrap.BLOCK_AND_ENDS)


class BackwardPrefetch(CaseInsensitiveEnum):
    """When backward all-gathers the next unit's parameters (torch.distributed.fsdp.BackwardPrefetch)."""

    BACKWARD_PRE = "BACKWARD_PRE"
    BACKWARD_POST = "BACKWARD_POST"
    NONE = "none"

    @classmethod
    def aliases(cls) -> dict[str, str]:
        """Return the aliases: short forms."""
        return {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST"}

    @classmethod
    def field(cls) -> str:
        """Return the name of the field in sweep files and on the command line."""
        return "backward_prefetch"


_DTYPES = ("fp32", "bf16", "fp16")
_DTYPE_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_NAMED_PRECISIONS = {
    "fp32": ("fp32", "fp32", "fp32"),
    "bf16-mixed": ("fp32", "bf16", "fp32"),
    "bf16-mixed-bf16-reduce": ("fp32", "bf16", "bf16"),
    "fp16-mixed": ("fp32", "fp16", "fp32"),
    "bf16-true": ("bf16", "bf16", "bf16"),
}
_PRECISION_ALIASES = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}
"""Names as in accelerate and Lightning."""
_NARROW = re.compile(r"(mx|nv)?(fp|float|int|nf|e4m|e5m)-?[2348]\b.*")
"""Names of dtypes with fewer than 16 bits."""


class Precision:
    """Three dtypes: stored parameters, compute and all-gather, gradient reduction.

    Written (case-insensitive) as a name (``bf16-mixed``) or as three dtypes (``bf16/bf16/fp32``). ``bf16`` and ``fp16``
    mean ``bf16-mixed`` and ``fp16-mixed``, as in accelerate and Lightning. Immutable and hashable.
    """

    __slots__ = ("compute", "reduce", "store")
    store: str
    compute: str
    reduce: str

    def __init__(self, store: str, compute: str, reduce: str) -> None:
        """Build from three dtype names, each ``fp32``, ``bf16`` or ``fp16``.

        Raises:
            SpecError: for any other dtype.
        """
        for part, name, dtype in (
            ("stored", "store", store),
            ("compute", "compute", compute),
            ("reduction", "reduce", reduce),
        ):
            folded = dtype.strip().lower() if isinstance(dtype, str) else dtype
            if folded not in _DTYPES:
                raise SpecError(f"precision: {part} dtype {shown(dtype)} is not allowed; one of {', '.join(_DTYPES)}")
            object.__setattr__(self, name, folded)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Precision is immutable")

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Read a name or STORED/COMPUTE/REDUCE.

        Raises:
            SpecError: naming the precisions that exist.
        """
        folded = text.strip().lower().replace("_", "-") if isinstance(text, str) else ""
        folded = _PRECISION_ALIASES.get(folded, folded)
        if folded in _NAMED_PRECISIONS:
            return cls(*_NAMED_PRECISIONS[folded])
        parts = folded.split("/")
        if len(parts) == 3:
            return cls(*parts)
        allowed = f"one of {', '.join(_NAMED_PRECISIONS)}, or STORED/COMPUTE/REDUCE like 'bf16/bf16/fp32'"
        if _NARROW.fullmatch(folded):
            raise SpecError(f"precision: {shown(text)} is not supported, only dtypes of 16 and 32 bits are; {allowed}")
        raise SpecError(f"precision: {shown(text)} is not allowed; {allowed}{nearest(folded, _NAMED_PRECISIONS)}")

    @property
    def name(self) -> str:
        """The name if there is one, else STORED/COMPUTE/REDUCE."""
        triple = (self.store, self.compute, self.reduce)
        for name, named in _NAMED_PRECISIONS.items():
            if named == triple:
                return name
        return "/".join(triple)

    @property
    def store_bytes(self) -> int:
        """Bytes of one stored parameter."""
        return _DTYPE_SIZE[self.store]

    @property
    def needs_grad_scaler(self) -> bool:
        """Whether gradients can underflow in the compute dtype, so that the loss is scaled."""
        return self.compute == "fp16"

    def __reduce__(self) -> tuple[type[Precision], tuple[str, str, str]]:
        return Precision, (self.store, self.compute, self.reduce)  # copies and pickles are made anew

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Precision) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Precision({self.name})"


FP32 = Precision("fp32", "fp32", "fp32")

MOST_RANKS = 2**20
MOST_TOKENS = 2**34
"""Upper limit of tokens in one forward pass of one GPU, so that tensor sizes stay within int64."""


class TrainSetup(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a training step except model and hardware.

    Text is read case-insensitively in any constructor: ``TrainSetup(strategy="zero3", precision="bf16-mixed")``.

    Raises:
        SpecError: if a value has another type or is out of range, or two values contradict each other.
    """

    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    api: Api = Api.FSDP1
    precision: Precision = FP32
    offload: Offload = Offload.NONE
    checkpointing: Checkpointing = Checkpointing.NONE
    checkpointing_policy: str | None = None
    """What checkpointing saves (spec/checkpointing_policy.py), such as ``every-second-product``, ``every-2-blocks`` or
    ``aten.mm,aten.silu``. By default the outputs of matrix products and attention (selective), of no block (full)."""
    reentrant: Reentrant = Reentrant.NO
    """Whether full checkpointing is reentrant, transformers' default before version 5."""
    activation_offload: bool = False
    """Whether what blocks save for backward is in pinned host memory meanwhile (torch's offload_wrapper, which is
    save_on_cpu): of a checkpointed block its inputs, else all, parameters included."""
    optimizer: OptimizerKind = OptimizerKind.ADAMW_FOREACH
    optimizer_in_backward: bool = False
    """Whether each parameter is updated as soon as its gradient is reduced, which is then freed: one optimizer a
    parameter, called in backward (torchtitan's early_step_in_backward, torchtune's optimizer_in_bwd)."""
    world_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    shard_size: Count | None = None
    """Number of ranks over which a hybrid strategy shards each copy of the parameters.

    By default half of all; on several nodes of a known server the GPUs of one node (catalog/lookup.py)."""
    micro_batch_size: Count = 1
    """Sequences per rank in one forward pass."""
    sequence_length: Count = 1024
    gradient_accumulation_steps: Count = 1
    sync_every_micro_batch: bool = True
    """Whether gradients are reduced after every micro-batch (FSDP2's default) or only after the last (``no_sync``)."""
    max_grad_norm: Positive | None = None
    loss: Loss = Loss.PLAIN
    compile: bool = False
    float8: Float8 = Float8.NONE
    """In which of torchao's recipes the linear layers of the blocks compute; needs compile. The head's stays in bf16,
    as with torchtitan's ``filter_fqns = ["output"]``. Weights are gathered in bf16
    (``enable_fsdp_float8_all_gather = False``)."""
    wrap: Wrap = Wrap.BLOCK
    min_num_params: Count = 100_000_000
    """Minimum number of parameters of a unit with ``wrap = "size"`` (torch's default)."""
    reshard_after_forward: Annotated[int, Meta(ge=2, le=MOST_RANKS)] | None = None
    """Number of ranks over which fully_shard keeps a unit's parameters sharded between forward and backward.

    By default the strategy decides: all ranks of the shard group (FULL_SHARD, HYBRID_SHARD), or not sharded. Fewer
    ranks, such as a node's, take more memory, and the all-gather in backward stays among them."""
    reshard_last_block: bool = True
    """Whether the last block is resharded after forward. Backward needs it first, so torchtitan keeps it gathered."""
    fp32_head: bool = False
    """Whether the head's unit computes in fp32, with its own mixed precision policy; needs block-and-ends.

    Under fsdp2 the final norm is in that unit, too."""
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = True
    learning_rate: Annotated[float, Meta(ge=0)] = 1e-4
    seed: int = 0

    def _check(self) -> None:
        if self.micro_batch_size * self.sequence_length > MOST_TOKENS:
            raise SpecError(
                f"micro_batch_size {self.micro_batch_size} x sequence_length {self.sequence_length}: not allowed;"
                f" up to {MOST_TOKENS} tokens"
            )
        self._check_shard_size()
        if self.checkpointing_policy is not None:
            force_setattr(self, "checkpointing_policy", written(self.checkpointing_policy))

    def _check_shard_size(self) -> None:
        if self.shard_size is None:
            return
        if not self.strategy.is_hybrid:
            raise SpecError(
                f"shard_size: only HYBRID_SHARD and _HYBRID_SHARD_ZERO2 have one, not {self.strategy.value}"
            )
        if self.world_size % self.shard_size:
            raise SpecError(f"shard_size: {self.shard_size} is not allowed; a divisor of world_size {self.world_size}")

    @property
    def shard_group_size(self) -> int:
        """Number of ranks that one copy of the parameters is sharded over; 1 if nothing is sharded."""
        if self.effective_strategy is ShardingStrategy.NO_SHARD:
            return 1
        if self.strategy.is_hybrid:
            return self.shard_size or max(self.world_size // 2, 1)
        return self.world_size

    @property
    def group_sizes(self) -> dict[str, int]:
        """Sizes of the process groups: ``shard``, ``replicate`` (hybrid strategies), ``world``, ``post_forward``.

        ``post_forward`` is that of ``reshard_after_forward``.
        """
        shard = self.shard_group_size
        sizes = {"shard": shard, "replicate": self.world_size // shard, "world": self.world_size}
        return sizes | ({"post_forward": self.reshard_after_forward} if self.reshard_after_forward else {})

    @property
    def policy(self) -> CheckpointingPolicy:
        """What checkpointing saves."""
        return read_policy(self.checkpointing_policy)

    @property
    def head_precision(self) -> Precision:
        """The precision of the head's unit."""
        return Precision(self.precision.store, "fp32", self.precision.reduce) if self.fp32_head else self.precision

    @property
    def effective_strategy(self) -> ShardingStrategy:
        """The strategy that runs. At world size 1 FSDP1 uses NO_SHARD (_init_utils._init_core_state).

        fully_shard keeps its strategy at world size 1: the shard is the whole parameter, and is still all-gathered.
        """
        if self.api is Api.FSDP1 and self.world_size == 1:
            return ShardingStrategy.NO_SHARD
        return self.strategy

    @property
    def is_ddp(self) -> bool:
        """Whether the model is replicated without FSDP (NO_SHARD under fsdp2): by DistributedDataParallel, or bare."""
        return self.api is Api.FSDP2 and self.strategy is ShardingStrategy.NO_SHARD

    @property
    def uses_fully_shard(self) -> bool:
        """Whether fully_shard wraps the model, whose parameters are then DTensors: under fsdp2 unless it is DDP."""
        return self.api is Api.FSDP2 and not self.is_ddp

    @property
    def is_bare(self) -> bool:
        """Whether the model is trained as it is, without FSDP and DistributedDataParallel, which one GPU needs not."""
        return self.is_ddp and self.world_size == 1

    @property
    def compiles(self) -> bool:
        """Whether any part of the step runs through torch.compile."""
        return self.compile or self.loss is Loss.COMPILED

    @property
    def uses_host_memory(self) -> bool:
        """Whether anything of a GPU's training is in host memory."""
        return self.offload is not Offload.NONE or self.activation_offload

    @property
    def compiles_optimizer(self) -> bool:
        """Whether the optimizer's step runs through torch.compile, which torchao's do."""
        return self.optimizer is OptimizerKind.ADAMW_8BIT

    @property
    def global_batch_size(self) -> int:
        """Number of sequences in one optimizer step, over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def tokens_per_step_per_rank(self) -> int:
        """Tokens that one rank trains on in one optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.sequence_length


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


def impossible(setup: TrainSetup, device: str) -> str | None:
    """Return why a setup cannot run on ``cuda`` or ``cpu``; None if it can. Each reason names an alternative."""
    hybrid_reason = _hybrid_impossible(setup)
    if hybrid_reason:
        return hybrid_reason
    if setup.offload is Offload.PARAMS:
        if setup.api is Api.FSDP1 and setup.gradient_accumulation_steps > 1 and setup.sync_every_micro_batch:
            return (
                "FSDP1's CPUOffload loses gradients that are accumulated outside no_sync (torch's documentation of"
                " FullyShardedDataParallel); use no_sync (--no-sync, sync_every_micro_batch = false), or api fsdp2"
            )
        if setup.api is Api.FSDP1 and device == "cpu":
            return "FSDP1's CPUOffload needs an accelerator to offload from; api fsdp2 offloads on a CPU too"
        if setup.is_ddp:
            return f"{_without_fsdp(setup)} has no CPU offload; api fsdp1 has"
    if setup.offload is Offload.OPTIMIZER and (reason := _optimizer_offload_impossible(setup, device)) is not None:
        return reason
    return (
        _policy_impossible(setup)
        or _reentrant_impossible(setup)
        or _loss_impossible(setup, device)
        or _activation_offload_impossible(setup, device)
        or _option_impossible(setup)
        or _reshard_impossible(setup)
        or _head_impossible(setup)
        or _precision_impossible(setup, device)
        or _float8_impossible(setup, device)
        or _optimizer_impossible(setup)
    )


def _without_fsdp(setup: TrainSetup) -> str:
    """Return what trains the model under NO_SHARD of fsdp2, for a sentence."""
    what = "a model without FSDP on one GPU" if setup.is_bare else "DistributedDataParallel"
    return f"{what} (NO_SHARD under fsdp2)"


def _policy_impossible(setup: TrainSetup) -> str | None:
    """Return why the kind of checkpointing has no such policy."""
    policy = setup.checkpointing_policy
    if policy is None:
        return None
    if setup.checkpointing is Checkpointing.NONE:
        return f"checkpointing_policy: nothing is checkpointed that {policy} could be about; use selective or full"
    if setup.policy.is_of_blocks and setup.checkpointing is not Checkpointing.FULL:
        return f"checkpointing_policy: {policy} chooses blocks that are checkpointed fully; use checkpointing full"
    if not setup.policy.is_of_blocks and setup.checkpointing is Checkpointing.FULL:
        return f"checkpointing_policy: checkpointing full saves no operator's output, as {policy} says; use selective"
    return None


def _reentrant_impossible(setup: TrainSetup) -> str | None:
    """Return why checkpointing cannot be reentrant, or is not predicted.

    In one unit of all blocks, or units of parts of a block, each block's backward reduces a whole unit's gradients.
    """
    if setup.reentrant is Reentrant.NO:
        return None
    if setup.checkpointing is not Checkpointing.FULL:
        return f"reentrant {setup.reentrant.value} is a kind of full checkpointing; use checkpointing full"
    if setup.compile or setup.activation_offload:
        what = "compile" if setup.compile else "activation_offload"
        return f"reentrant {setup.reentrant.value} with {what} is not predicted; use one of them"
    if setup.wrap in (Wrap.NONE, Wrap.SIZE) and not setup.is_ddp:
        return f"reentrant {setup.reentrant.value} needs blocks as units: wrap = block, not {setup.wrap.value}"
    return None


def _loss_impossible(setup: TrainSetup, device: str) -> str | None:
    """Return why the loss cannot be computed."""
    if setup.loss.is_fused and device == "cpu":
        return f"loss {setup.loss.value} runs Triton's kernels, which need a GPU; use plain or chunked"
    if setup.loss.includes_head and not setup.is_ddp and setup.wrap not in (Wrap.BLOCK, Wrap.NONE):
        return (
            f"loss {setup.loss.value} reads the head's weight outside of the head's forward, so that the head cannot be"
            f" a unit, as with wrap = {setup.wrap.value}; use wrap = block or none"
        )
    return None


def _activation_offload_impossible(setup: TrainSetup, device: str) -> str | None:
    """Return why saved tensors cannot be kept in host memory."""
    if not setup.activation_offload:
        return None
    if device == "cpu":
        return "activation_offload copies from a GPU to the host; on a CPU checkpointing saves memory"
    if setup.compile:
        return "activation_offload works by hooks of saved tensors, which with compile are not tested; use one of them"
    return None


def _optimizer_offload_impossible(setup: TrainSetup, device: str) -> str | None:
    """Return why torchao's CPUOffloadOptimizer cannot step; None if it can."""
    if device == "cpu":
        return "torchao's CPUOffloadOptimizer needs a GPU to offload from; offload params under fsdp2 runs on a CPU"
    if not setup.uses_fully_shard:
        return (
            "torchao's CPUOffloadOptimizer needs gradients that are reduced when they are accumulated, as fully_shard's"
            " are; use api fsdp2 with a strategy that shards, or offload params"
        )
    if not setup.optimizer.is_adamw_of_torch:
        return f"offload optimizer steps torch's AdamW on the CPU, not {setup.optimizer.value}; use adamw-fused"
    if setup.max_grad_norm is not None:
        return "torchao's CPUOffloadOptimizer copies gradients before they are clipped; leave out max_grad_norm"
    if setup.precision.needs_grad_scaler:
        return "torchao's CPUOffloadOptimizer copies gradients before they are unscaled; use bf16-mixed"
    return None


def _in_backward_impossible(setup: TrainSetup) -> str | None:
    """Return why the optimizer cannot step in backward; None if it can."""
    if setup.gradient_accumulation_steps > 1:
        return "optimizer_in_backward steps in every backward, so that gradients cannot be accumulated; accumulate 1"
    if setup.max_grad_norm is not None:
        return "optimizer_in_backward frees each gradient before the norm of all is known; leave out max_grad_norm"
    if setup.precision.needs_grad_scaler:
        return "optimizer_in_backward steps before the gradient scaler of fp16 has seen all gradients; use bf16-mixed"
    if setup.offload is not Offload.NONE:
        return f"optimizer_in_backward updates on the GPU, offload {setup.offload.value} on the CPU; use one of them"
    if setup.is_bare:
        return "optimizer_in_backward without FSDP (NO_SHARD under fsdp2) is not predicted; use fsdp1"
    if setup.is_ddp:
        return (
            "DistributedDataParallel (NO_SHARD under fsdp2) keeps gradients in buckets, so optimizer_in_backward saves"
            " nothing; use a strategy that shards, or fsdp1"
        )
    if setup.api is Api.FSDP1 and not setup.use_orig_params:
        return "optimizer_in_backward under fsdp1 needs use_orig_params = true (torch refuses it otherwise)"
    return None


def _optimizer_impossible(setup: TrainSetup) -> str | None:
    """Return why the optimizer cannot update what the wrapper hands it; None if it can."""
    if setup.optimizer is OptimizerKind.ADAFACTOR and setup.uses_fully_shard:
        return (
            "torch.optim.Adafactor fails on fully_shard's DTensors (it squares norms in place that are partial over the"
            " ranks); use fsdp1, or NO_SHARD"
        )
    is_flat = setup.effective_strategy is not ShardingStrategy.NO_SHARD or not setup.use_orig_params
    if setup.optimizer is OptimizerKind.MUON and setup.api is Api.FSDP1 and is_flat:
        return (
            "torch.optim.Muon needs matrices, and fsdp1's shards have one dimension; use fsdp2, or NO_SHARD with"
            " use_orig_params = true"
        )
    if setup.optimizer is OptimizerKind.ADAMW_8BIT:
        if setup.offload is not Offload.NONE:
            return f"torchao's AdamW8bit needs offload none, not {setup.offload.value}; use adamw-fused"
        if setup.precision.needs_grad_scaler:
            return "the gradient scaler of fp16 with torchao's AdamW8bit is not tested; use bf16-mixed, or adamw-fused"
        if setup.optimizer_in_backward:
            return "optimizer_in_backward with torchao's AdamW8bit, which compiles its step, is not modelled; use adamw"
    return _in_backward_impossible(setup) if setup.optimizer_in_backward else None


def _option_impossible(setup: TrainSetup) -> str | None:
    """Return why the api lacks one of the options; None if it has all. Such options are refused, not ignored."""
    if setup.api is Api.FSDP1:
        if setup.compile and not setup.use_orig_params:
            return "compiling under FSDP1 needs use_orig_params = true"
        if setup.optimizer is OptimizerKind.ADAMW_FUSED and setup.precision.needs_grad_scaler:
            return (
                "torch's ShardedGradScaler (fp16 under fsdp1) fails with a fused optimizer: its overflow flag has the"
                " wrong shape; use adamw-foreach, or fsdp2"
            )
        return None
    if setup.strategy is ShardingStrategy.NO_SHARD and setup.forward_prefetch:
        return f"{_without_fsdp(setup)} gathers nothing, so forward_prefetch means nothing"
    if not setup.limit_all_gathers:
        return "fsdp2 has no rate limiter to turn off; limit_all_gathers = false needs fsdp1"
    if not setup.use_orig_params:
        return "fsdp2 always keeps the original parameters; use_orig_params = false needs fsdp1"
    if setup.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        return (
            "fsdp2 prefetches before the gradient computation (BACKWARD_PRE) or not at all; BACKWARD_POST needs fsdp1"
        )
    return None


def _reshard_impossible(setup: TrainSetup) -> str | None:
    """Return why units cannot be resharded after forward as reshard_after_forward and reshard_last_block say."""
    ranks, strategy = setup.reshard_after_forward, setup.strategy
    if ranks is not None:
        if setup.api is Api.FSDP1:
            return "FullyShardedDataParallel reshards to all ranks; reshard_after_forward = N needs fsdp2"
        if strategy is not ShardingStrategy.FULL_SHARD:
            return f"reshard_after_forward = N replaces FULL_SHARD's resharding to all ranks, not {strategy.value}'s"
        if setup.wrap is Wrap.NONE:
            return "wrap = none: the root is the only unit, and torch never reshards it after forward"
        if ranks >= setup.world_size or setup.world_size % ranks:
            allowed = [str(size) for size in range(2, setup.world_size // 2 + 1) if setup.world_size % size == 0]
            which = f"one of {', '.join(allowed)}" if allowed else "no number is"
            return f"reshard_after_forward: {ranks} is not allowed with world_size {setup.world_size}; {which}"
    if not setup.reshard_last_block:
        if setup.api is Api.FSDP1:
            return "FullyShardedDataParallel reshards all units alike; reshard_last_block = false needs fsdp2"
        if not strategy.reshards_after_forward:
            return f"{strategy.value} reshards no unit after forward, so reshard_last_block = false changes nothing"
        if not setup.wrap.has_blocks:
            return "reshard_last_block = false needs blocks as units: wrap = block or block-and-ends"
    return None


def _head_impossible(setup: TrainSetup) -> str | None:
    """Return why the head cannot compute in fp32."""
    if not setup.fp32_head:
        return None
    if setup.wrap is not Wrap.BLOCK_AND_ENDS:
        return "fp32_head: only a unit has its own precision, so the head must be one: wrap = block-and-ends"
    if setup.precision.compute == "fp32":
        return f"fp32_head: with {setup.precision} the head computes in fp32 as it is"
    if setup.is_ddp:
        return f"{_without_fsdp(setup)} has no units, of which fp32_head needs one; fsdp1 has"
    return None


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


def _hybrid_impossible(setup: TrainSetup) -> str | None:
    """Return why a hybrid strategy cannot run: it needs at least 2 shard groups of at least 2 ranks."""
    if not setup.strategy.is_hybrid:
        return None
    world, shard = setup.world_size, setup.shard_size or setup.world_size // 2
    needs = f"{setup.strategy.value} needs at least 2 groups of at least 2 ranks"
    if world < 4:
        return f"{needs}, not world size {world}; use 4 or more ranks"
    if 1 < shard < world and world % shard == 0:
        return None
    largest = next((size for size in range(world // 2, 1, -1) if world % size == 0), None)
    if largest is None:
        return f"{needs}, and {world} ranks cannot be cut into equal groups; use another world size"
    if shard == world:
        return f"{needs}; shard size {shard} of {world} ranks leaves one group; use a shard size of {largest} or less"
    if shard == 1:
        return f"{needs}; shard size 1 shards nothing; use a shard size of 2 to {largest}"
    return f"{needs}; {world} ranks cannot be cut into groups of {shard}; use a shard size of {largest} or less"


FLOAT8_MULTIPLE = 16
"""What sizes of matrices in float8 must be multiples of (torch._scaled_mm)."""
FLOAT8_CAPABILITY = 8.9
"""The lowest compute capability with matrix products in float8."""


def _float8_impossible(setup: TrainSetup, device: str) -> str | None:
    """Return why linear layers cannot compute in float8."""
    if setup.float8 is Float8.NONE:
        return None
    if device != "cuda":
        return f"float8 needs a GPU of compute capability {FLOAT8_CAPABILITY} or more; leave it out"
    if not setup.compile:
        return (
            "float8 without compile runs each scale and cast as a kernel of its own, which takes longer than the"
            " products save, and is not predicted; use compile"
        )
    if setup.precision.compute != "bf16":
        return f"float8 replaces matrix products in bf16, and {setup.precision} computes in {setup.precision.compute}"
    if (tokens := setup.micro_batch_size * setup.sequence_length) % FLOAT8_MULTIPLE:
        return f"float8 needs a multiple of {FLOAT8_MULTIPLE} tokens in a micro-batch (torch._scaled_mm), not {tokens}"
    return None


def _precision_impossible(setup: TrainSetup, device: str) -> str | None:
    precision = setup.precision
    if setup.is_ddp and precision.store != "fp32" and precision.compute != precision.store:
        return f"{_without_fsdp(setup)} computes in the stored dtype or under autocast from fp32, not {precision}"
    if setup.is_ddp and not setup.is_bare:
        if precision.reduce == "bf16" != precision.store and device == "cpu":
            return "DistributedDataParallel's bf16 compression hook needs NCCL; on a CPU use fsdp1, or reduce in fp32"
        if precision.reduce != precision.store and precision.store != "fp32":
            return (
                f"DistributedDataParallel reduces in the stored dtype or in a narrower one, not {precision}; use fsdp1"
            )
    if precision.store == "fp16":
        return "fp16 parameters cannot be trained: the gradient scaler needs fp32 ones; use fp16-mixed"
    return None
