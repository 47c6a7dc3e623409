"""TrainSetup: all settings of a training step, with PyTorch's names. Each field says here all about itself."""

from typing import Annotated, TypedDict

from msgspec import Meta
from msgspec.structs import force_setattr

from fsdp_bench.spec.checked import Checked, Count, Positive
from fsdp_bench.spec.checkpointing_policy import CheckpointingPolicy, read_policy, written
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.field import SHARDING, WRAPPING, Field, fields_of, in_order_of_help
from fsdp_bench.spec.vocabulary import (
    FP32,
    Api,
    BackwardPrefetch,
    Checkpointing,
    Float8,
    Loss,
    Offload,
    OptimizerKind,
    Precision,
    Reentrant,
    ShardingStrategy,
    Wrap,
)

MOST_RANKS = 2**20
MOST_TOKENS = 2**34
"""Upper limit of tokens in one forward pass of one GPU, so that tensor sizes stay within int64."""


class TrainSetup(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a training step but model and hardware; text in any case: ``TrainSetup(strategy="zero3")``.

    Raises SpecError if a value has another type or is out of range, or two values contradict each other.
    """

    strategy: Annotated[
        ShardingStrategy,
        Field(
            "--strategy NAME",
            "FULL_SHARD (zero3), SHARD_GRAD_OP (zero2), NO_SHARD (ddp), HYBRID_SHARD (hsdp), _HYBRID_SHARD_ZERO2, or 1"
            " to 5.",
            group=SHARDING,
            seldom=False,
            has_column=False,
            labelled=True,
            planned=True,
        ),
    ] = ShardingStrategy.FULL_SHARD
    api: Annotated[
        Api,
        Field(
            "--api fsdp1|fsdp2",
            "FullyShardedDataParallel or fully_shard, which is the default of Hugging Face's code.",
            group=SHARDING,
            seldom=False,
            labelled=True,
            is_plain=True,
            planned=True,
        ),
    ] = Api.FSDP1
    precision: Annotated[
        Precision,
        Field(
            "--precision NAME",
            "fp32, bf16-mixed (bf16), bf16-mixed-bf16-reduce, fp16-mixed (fp16), bf16-true, or STORED/COMPUTE/REDUCE.",
            seldom=False,
            labelled=True,
            is_plain=True,
            docs="`fp32`, `bf16-mixed` (`bf16`), `bf16-mixed-bf16-reduce`, `fp16-mixed` (`fp16`), `bf16-true`, or"
            " STORED/COMPUTE/REDUCE",
            docs_default='`"bf16-mixed"`',
        ),
    ] = FP32
    offload: Annotated[
        Offload,
        Field(
            "--offload MODE",
            "none; params: parameters, gradients and optimizer in host memory; or optimizer: it alone.",
            group=SHARDING,
            seldom=False,
            labelled=True,
            planned=True,
            docs="`optimizer` is torchao's (see [optimizers](reference/settings.md#optimizers-that-save-memory))",
        ),
    ] = Offload.NONE
    checkpointing: Annotated[
        Checkpointing,
        Field(
            "--checkpointing MODE",
            "none, selective or full.",
            seldom=False,
            column="check-\npointing",
            labelled=True,
            planned=True,
        ),
    ] = Checkpointing.NONE
    checkpointing_policy: Annotated[
        str | None,
        Field(
            "--checkpointing-policy TEXT",
            "With selective: every-second-product (torchtitan's), or operators that are saved, as aten.mm,aten.silu."
            " With full: every-2-blocks.",
            since="2026-11-23",
            column="policy",
            docs="what is saved instead of the default: with `selective`, `every-second-product` or operators such as"
            ' `"aten.mm,aten.silu"`; with `full`, `every-2-blocks` (see'
            " [policies](reference/settings.md#policies-of-activation-checkpointing))",
        ),
    ] = None
    """The outputs that checkpointing saves (spec/checkpointing_policy.py). By default those of matrix products and
    attention (selective), or none inside of a block (full)."""
    reentrant: Annotated[
        Reentrant,
        Field(
            "--reentrant no|inside|around",
            "Whether full checkpointing is reentrant (use_reentrant=True): inside of FSDP's units, or around them as in"
            " older transformers.",
            since="2026-11-26",
            docs='with `checkpointing = "full"`: inside of FSDP\'s units or around them, as `use_reentrant=True`'
            " ([guide](reference/settings.md#reentrant-checkpointing))",
        ),
    ] = Reentrant.NO
    """Transformers' default before version 5 is reentrant."""
    activation_offload: Annotated[
        bool,
        Field(
            "--activation-offload",
            "Keep what blocks save for backward in pinned host memory (torch's offload_wrapper).",
            since="2026-11-23",
            docs="true: what blocks save for backward is in pinned host memory meanwhile"
            " ([guide](reference/settings.md#activation-offload)); needs a GPU",
        ),
    ] = False
    """torch's offload_wrapper, which is save_on_cpu, moves the inputs of a checkpointed block, and of others all that
    they save, parameters included."""
    optimizer: Annotated[
        OptimizerKind,
        Field(
            "--optimizer NAME",
            "adamw-foreach (adamw), adamw-fused, adamw-for-loop, adamw-8bit, adafactor, muon or sgd.",
            before="activation_offload",
            seldom=False,
            is_plain=True,
            docs="`adamw-8bit` is torchao's (see [optimizers](reference/settings.md#optimizers-that-save-memory))",
        ),
    ] = OptimizerKind.ADAMW_FOREACH
    optimizer_in_backward: Annotated[
        bool,
        Field(
            "--optimizer-in-backward",
            "Update each parameter as soon as its gradient is reduced, and free the gradient.",
            since="2026-11-23",
            needs_fsdp=True,
            not_exported="leave it out",
            docs="true: each parameter is updated as soon as its gradient is reduced, and the gradient is freed",
        ),
    ] = False
    """One optimizer a parameter, called in backward (torchtitan's early_step_in_backward, torchtune's
    optimizer_in_bwd)."""
    world_size: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_RANKS)],
        Field(
            None,
            'ranks; `"gpus"`: as many as the machine has GPUs',
            seldom=False,
            has_column=False,
            short="ranks",
            labelled=True,
        ),
    ] = 1
    shard_size: Annotated[
        Count | None,
        Field(
            "--shard-size N",
            "GPUs that share one copy under a hybrid strategy; by default a node's when there are several.",
            group=SHARDING,
            before="offload",
            has_column=False,
            short="shard group",
            labelled=True,
            needs_fsdp=True,
            docs="ranks that share one copy of the parameters, for the hybrid strategies",
            docs_default="half of the world; on several nodes a node",
        ),
    ] = None
    """Number of ranks over which a hybrid strategy shards each copy of the parameters.

    By default half of all; on several nodes of a known server the GPUs of one node (catalog/lookup.py)."""
    micro_batch_size: Annotated[
        Count,
        Field(
            "--batch N",
            "Sequences per GPU in one forward pass.",
            seldom=False,
            short="batch",
            docs="sequences of one rank in one forward pass",
        ),
    ] = 1
    sequence_length: Annotated[
        Count,
        Field(
            "--seq N",
            "Tokens in a sequence.",
            seldom=False,
            short="sequence",
            docs_default="4096, or all positions of a model with fewer",
        ),
    ] = 1024
    gradient_accumulation_steps: Annotated[
        Count,
        Field("--accumulate N", "Micro-batches in one optimizer step.", column="accu-\nmulate", short="accumulate"),
    ] = 1
    sync_every_micro_batch: Annotated[
        bool,
        Field(
            "--sync-every-micro-batch/--no-sync",
            "Reduce gradients in every micro-batch (default) or only in the last (default of Hugging Face's code, as"
            " its Trainer does).",
            docs="false: gradients are reduced in the last micro-batch only (`no_sync`)",
        ),
    ] = True
    max_grad_norm: Annotated[Positive | None, Field("--max-grad-norm X", "Clip gradients to this norm.")] = None
    loss: Annotated[
        Loss,
        Field(
            "--loss plain|chunked|compiled|flash-attn|liger|liger-fused-linear|unsloth-fp32",
            "How the cross-entropy is computed.",
            planned=True,
            docs="`plain` is cross-entropy of the whole fp32 logits, `chunked` computes it in pieces, and the last four"
            " are kernels of other packages ([guide](reference/settings.md#the-loss))",
        ),
    ] = Loss.PLAIN
    compile: Annotated[bool, Field("--compile", "Compile the blocks with torch.compile.")] = False
    float8: Annotated[
        Float8,
        Field(
            "--float8 none|tensorwise|rowwise",
            "Compute the blocks' linear layers in float8, by torchao's recipe of that name; needs --compile.",
            since="2026-11-25",
            not_planned="no published run bounds its errors",
            not_exported="leave it out, and call torchao's convert_to_float8_training",
            docs="the blocks' linear layers compute in float8, by torchao's recipe of that name"
            " ([guide](reference/compile.md#float8)); needs `compile`",
        ),
    ] = Float8.NONE
    """The head's linear layer stays in bf16, as with torchtitan's ``filter_fqns = ["output"]``. Weights are gathered in
    bf16 (``enable_fsdp_float8_all_gather = False``)."""
    wrap: Annotated[
        Wrap,
        Field(
            "--wrap block|block-and-ends|block-and-adapters|size|none",
            "What becomes an FSDP unit; the ends are the embedding and the head; with adapters each matrix of LoRA's is"
            " one, as by PEFT's fsdp_auto_wrap_policy.",
            group=WRAPPING,
            docs="what becomes an FSDP unit: each block, alone or with others (see below), each subtree over a size, or"
            " nothing but the model",
        ),
    ] = Wrap.BLOCK
    min_num_params: Annotated[
        Count,
        Field(
            "--min-num-params 100M",
            "Smallest unit, with --wrap size.",
            group=WRAPPING,
            is_magnitude=True,
            docs='with `wrap = "size"`: parameters from which a subtree becomes a unit',
        ),
    ] = 100_000_000
    """Torch's default."""
    reshard_after_forward: Annotated[
        Annotated[int, Meta(ge=2, le=MOST_RANKS)] | None,
        Field(
            "--reshard-after-forward N",
            "Ranks over which fsdp2 shards a unit between forward and backward; by default all.",
            group=WRAPPING,
            since="2026-11-23",
            docs="fsdp2 with FULL_SHARD: the number of ranks, a divisor of the world, over which a unit stays sharded"
            " between forward and backward; by default all",
        ),
    ] = None
    """By default the strategy decides: all ranks of the shard group (FULL_SHARD, HYBRID_SHARD), or not sharded. Fewer
    ranks, such as a node's, take more memory, and the all-gather in backward stays among them."""
    reshard_last_block: Annotated[
        bool,
        Field(
            "--reshard-last-block/--no-reshard-last-block",
            "Reshard the last block after forward, too (fsdp2); on by default.",
            group=WRAPPING,
            since="2026-11-23",
            docs="false: fsdp2 keeps the last block gathered between forward and backward, as torchtitan does",
        ),
    ] = True
    """Backward needs the last block first, so torchtitan keeps it gathered."""
    fp32_head: Annotated[
        bool,
        Field(
            "--fp32-head",
            "Compute the head in fp32, with --wrap block-and-ends.",
            group=WRAPPING,
            since="2026-11-23",
            docs="with `block-and-ends`: the head's unit computes in fp32, under fsdp2 with the final norm",
        ),
    ] = False
    """The head's unit has its own mixed precision policy. Under fsdp2 the final norm is in that unit, too."""
    backward_prefetch: Annotated[
        BackwardPrefetch,
        Field("--backward-prefetch MODE", "BACKWARD_PRE (pre), BACKWARD_POST (post) or none.", group=WRAPPING),
    ] = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: Annotated[
        bool, Field("--forward-prefetch", "Gather the next unit early in forward, too.", group=WRAPPING)
    ] = False
    limit_all_gathers: Annotated[
        bool,
        Field("--limit-all-gathers/--no-limit-all-gathers", "FSDP1's rate limiter; on by default.", group=WRAPPING),
    ] = True
    use_orig_params: Annotated[
        bool,
        Field("--use-orig-params/--no-use-orig-params", "FSDP1's original parameters; on by default.", group=WRAPPING),
    ] = True
    learning_rate: Annotated[
        Annotated[float, Meta(ge=0)], Field(None, "of the optimizer", has_column=False, of_step=False)
    ] = 1e-4
    seed: Annotated[int, Field(None, "of weights and data", has_column=False, of_step=False)] = 0

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

    def changed(self, *without: str) -> list[Field]:
        """Return the fields that are printed only where they differ from their default, and do, but for some."""
        seldom = (one for one in FIELDS.values() if one.seldom and one.has_column and one.name not in without)
        return [one for one in seldom if getattr(self, one.name) != one.default]

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
        """Sizes of the groups: ``shard``, ``replicate``, ``world``, ``post_forward`` (``reshard_after_forward``)."""
        shard = self.shard_group_size
        sizes = {"shard": shard, "replicate": self.world_size // shard, "world": self.world_size}
        return sizes | ({"post_forward": self.reshard_after_forward} if self.reshard_after_forward else {})

    @property
    def policy(self) -> CheckpointingPolicy:
        """The outputs and blocks that checkpointing saves."""
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


class SetupFields(TypedDict, total=False):
    """The fields of TrainSetup as arguments of Python functions, for type checkers. Enums can be given as text."""

    strategy: ShardingStrategy | str
    api: Api | str
    precision: Precision | str
    offload: Offload | str
    checkpointing: Checkpointing | str
    checkpointing_policy: str | None
    reentrant: Reentrant | str
    optimizer: OptimizerKind | str
    activation_offload: bool
    optimizer_in_backward: bool
    world_size: int
    shard_size: int | None
    micro_batch_size: int
    sequence_length: int
    gradient_accumulation_steps: int
    sync_every_micro_batch: bool
    max_grad_norm: float | None
    loss: Loss | str
    compile: bool
    float8: Float8 | str
    wrap: Wrap | str
    min_num_params: int
    reshard_after_forward: int | None
    reshard_last_block: bool
    fp32_head: bool
    backward_prefetch: BackwardPrefetch | str
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    learning_rate: float
    seed: int


FIELDS = fields_of(TrainSetup)
"""The fields of TrainSetup by name, each with all that is to be known about it."""
OPTIONS = {str(one.option): one for one in in_order_of_help(FIELDS)}
"""The fields that have an option, by the option's name, in the order of the help."""
PLANNED = tuple(name for name, one in FIELDS.items() if one.planned)
"""The fields among several values of which a plan chooses."""
