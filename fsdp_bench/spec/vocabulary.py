"""The words of TrainSetup: strategies, wrappers, offload, checkpointing, optimizers, losses; and Precision."""

from __future__ import annotations

import re

from fsdp_bench.spec.checked import CaseInsensitiveEnum
from fsdp_bench.spec.errors import SpecError, nearest, shown


class ShardingStrategy(
    CaseInsensitiveEnum,
    field="strategy",
    aliases={
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
    },
):
    """torch.distributed.fsdp's strategies, stored by name. Aliases: ZeRO stages, abbreviations, accelerate's 1 to 5."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "_HYBRID_SHARD_ZERO2"

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


class OptimizerKind(CaseInsensitiveEnum, field="optimizer", aliases={"adamw": "adamw-foreach"}):
    """AdamW (``adamw`` is PyTorch's default, foreach), SGD (foreach), and optimizers with smaller states."""

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

    @property
    def is_adamw_of_torch(self) -> bool:
        """Whether it is one of the implementations of torch.optim.AdamW."""
        return self in (OptimizerKind.ADAMW_FOREACH, OptimizerKind.ADAMW_FUSED, OptimizerKind.ADAMW_FOR_LOOP)


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


class BackwardPrefetch(
    CaseInsensitiveEnum, field="backward_prefetch", aliases={"pre": "BACKWARD_PRE", "post": "BACKWARD_POST"}
):
    """When backward all-gathers the next unit's parameters (torch.distributed.fsdp.BackwardPrefetch)."""

    BACKWARD_PRE = "BACKWARD_PRE"
    BACKWARD_POST = "BACKWARD_POST"
    NONE = "none"


_DTYPES = ("fp32", "bf16", "fp16")
_DTYPE_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
NAMED_PRECISIONS = {
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
        """Build from three dtype names, each ``fp32``, ``bf16`` or ``fp16``. Raises SpecError for any other dtype."""
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
        """Read a name or STORED/COMPUTE/REDUCE. Raises SpecError, naming the precisions that exist."""
        folded = text.strip().lower().replace("_", "-") if isinstance(text, str) else ""
        folded = _PRECISION_ALIASES.get(folded, folded)
        if folded in NAMED_PRECISIONS:
            return cls(*NAMED_PRECISIONS[folded])
        parts = folded.split("/")
        if len(parts) == 3:
            return cls(*parts)
        allowed = f"one of {', '.join(NAMED_PRECISIONS)}, or STORED/COMPUTE/REDUCE like 'bf16/bf16/fp32'"
        if _NARROW.fullmatch(folded):
            raise SpecError(f"precision: {shown(text)} is not supported, only dtypes of 16 and 32 bits are; {allowed}")
        raise SpecError(f"precision: {shown(text)} is not allowed; {allowed}{nearest(folded, NAMED_PRECISIONS)}")

    @property
    def name(self) -> str:
        """The name if there is one, else STORED/COMPUTE/REDUCE."""
        triple = (self.store, self.compute, self.reduce)
        for name, named in NAMED_PRECISIONS.items():
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
