"""A published case as a model, a setup and hardware of this package, or the reason why it cannot be one.

Blank cells of a row are filled from the framework's code and listed as assumptions. If that code was not read, the case
is not compared, with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from fsdp_bench.catalog import loader
from fsdp_bench.catalog.architectures import recorded_architecture
from fsdp_bench.simulate.operators.kernels import CUDA, CrossEntropy, Kernels
from fsdp_bench.spec.checkpointing_policy import EVERY_SECOND_PRODUCT
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import (
    Api,
    BackwardPrefetch,
    Checkpointing,
    Loss,
    Offload,
    OptimizerKind,
    Precision,
    Reentrant,
    ShardingStrategy,
    TrainSetup,
)
from tools.validate.published.cases import CaseInputs, gpu_of, has_step


@dataclass(frozen=True)
class Framework:
    """Facts about a framework's code and defaults."""

    max_grad_norm: float | None
    facts: tuple[str, ...]
    """Facts, each with its place in the code."""
    model_family: Family = Family.LLAMA
    optimizers: Mapping[str, OptimizerKind] = field(
        default_factory=lambda: {"AdamW": OptimizerKind.ADAMW_FOREACH, "fused AdamW": OptimizerKind.ADAMW_FUSED}
    )
    cross_entropy: CrossEntropy = CrossEntropy.FP32_LOGITS
    metrics_on_logits: int = 0
    """See simulate.operators.kernels.Kernels."""
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    loss: Loss = Loss.PLAIN
    reentrant: Reentrant = Reentrant.NO
    """Of full checkpointing."""
    recomputes_every_second_product: str | None = None
    """The place in the code, if selective checkpointing recomputes every second matrix product."""
    stored_if_blank: tuple[str, str] | None = None
    """The dtype of stored parameters if the row does not say, and its place in the code."""
    reduces_in_compute_dtype_if_blank: str | None = None
    """The place in the code, if gradients are reduced in the compute dtype when the row does not say."""
    syncs_every_micro_batch: bool = True
    is_huggingfaces: bool = False
    """Whether it trains transformers' code, whose recordings are predicted, of a model of the catalogue."""
    cuda: str | None = None
    """The version of CUDA with which the torch of that time is built: of its cuBLAS. None: a recent one."""


LLM_FOUNDRY = "llm-foundry-mpt"
_CUDA_12_1 = "version of CUDA not stated: cuBLAS of 12.1"

FRAMEWORKS = {
    "torchtitan-pr165": Framework(
        1.0,
        (
            "units: each block and the root; use_orig_params (torchtrain/parallelisms/parallelize_llama.py)",
            "gradients clipped to norm 1.0 (train.py, training.max_norm)",
            f"{_CUDA_12_1} (torch 2.3 and the nightly builds of March 2024)",
        ),
        cuda="12.1",
        recomputes_every_second_product="torchtrain/parallelisms/parallelize_llama.py, mm_count % 2",
    ),
    "torchtitan-h100-202412": Framework(
        1.0,
        (
            "units: each block and the root (torchtitan/parallelisms/parallelize_llama.py)",
            "gradients clipped to norm 1.0 (train.py, training.max_norm)",
            "version of CUDA not stated: cuBLAS of 12.4 (torch 2.6 and the nightly builds of December 2024)",
        ),
        cuda="12.4",
        recomputes_every_second_product="torchtitan/parallelisms/parallelize_llama.py, mm_count % 2",
    ),
    "fms-acceleration": Framework(
        1.0,
        (
            "gradients clipped to norm 1.0 (transformers/training_args.py, max_grad_norm)",
            "transformers' code as recorded, of version 5 instead of 4.48; flash-attn 2 with a window as long as the"
            " sequence: causal (transformers/integrations/flash_attention.py)",
            "checkpointing is reentrant and around FSDP's units (transformers 4.48, modeling_utils.py,"
            " gradient_checkpointing_enable; models/mistral/modeling_mistral.py, MistralModel.forward)",
            "version of CUDA not stated: cuBLAS of 12.1 (torch 2.4.1)",
        ),
        reentrant=Reentrant.AROUND,
        optimizers={"AdamW (adamw_torch)": OptimizerKind.ADAMW_FOREACH},
        is_huggingfaces=True,
        cuda="12.1",
    ),
    "litgpt-thunder": Framework(
        None,
        (
            "units: Block and the root; no_sync but in the last micro-batch; gradients not clipped"
            " (extensions/thunder/pretrain.py)",
            "use_orig_params (lightning/fabric/strategies/fsdp.py)",
        ),
        syncs_every_micro_batch=False,
    ),
    "torchtune": Framework(None, ("gradients not clipped (full_finetune_single_device, clip_grad_norm: null)",)),
    "ibm-fms-fsdp": Framework(
        1.0,
        (
            "gradients clipped; the loss is computed on logits in the compute dtype (fms_fsdp/utils/train_utils.py:"
            " CrossEntropyLoss on the model's output)",
            f"{_CUDA_12_1} (torch 2.2 and 2.3, early 2024)",
        ),
        cuda="12.1",
        cross_entropy=CrossEntropy.SAME_DTYPE,
    ),
    LLM_FOUNDRY: Framework(
        1.0,
        (
            "the stated parameters are those of gpt2 with this vocabulary and sequence length: learned positions and"
            " biases (llmfoundry/models/mpt/configuration_mpt.py: learned_pos_emb True, no_bias False)",
            "the loss is flash-attn's fused cross-entropy (llmfoundry/models/mpt/modeling_mpt.py:"
            " loss_fn 'fused_crossentropy')",
            "decoupled_adamw is a loop over tensors (composer/optim/decoupled_weight_decay.py); gradients clipped,"
            " and reduced in every micro-batch (composer/trainer/dist_strategy.py: no_sync is for DDP only)",
            f"{_CUDA_12_1} or older (torch 1.13 to 2.1, 2023)",
            "cross-entropy and perplexity are logged: two more cross-entropies of the logits, in fp32, after each"
            " backward (llmfoundry/models/mpt/modeling_mpt.py, train_metrics; composer/trainer/trainer.py,"
            " _eval_train_metrics)",
            "BACKWARD_POST (composer/trainer/dist_strategy.py, backward_prefetch); on 128 H100 and more BACKWARD_PRE"
            " and forward_prefetch (scripts/train/benchmarking/sweep.py)",
        ),
        cuda="12.1",
        metrics_on_logits=2,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        model_family=Family.GPT2,
        optimizers={"decoupled_adamw": OptimizerKind.ADAMW_FOR_LOOP},
        loss=Loss.FLASH_ATTN,
        stored_if_blank=("fp32", "composer/core/precision.py: 'bf16' is autocast"),
        reduces_in_compute_dtype_if_blank=(
            "composer/trainer/mosaic_fsdp_utils.py, get_mixed_precision: DEFAULT sets no reduce_dtype, for which FSDP1"
            " takes param_dtype, torch/distributed/fsdp/flat_param.py, _init_param_reduce_dtypes"
        ),
    ),
}
_UNREAD = Framework(None, ())


@dataclass(frozen=True)
class Plan:
    """A published case as a model, a setup and hardware."""

    model: Model
    setup: TrainSetup
    gpu: Gpu | None
    """None if the catalogue or the row does not state its memory; then a GPU of unlimited memory is assumed."""
    kernels: Kernels
    packed: bool
    assumptions: tuple[str, ...]


def plan_case(inputs: CaseInputs, checkpointing: Checkpointing | None = None) -> Plan:
    """Return a case as a model, a setup and hardware, with all assumptions.

    ``checkpointing`` replaces that of the row, to predict blocks with and without it separately.

    Raises SpecError for a case that cannot be predicted, with the reason.
    """
    inputs, assumed = _filled_in(inputs)
    if (reason := _ruled_out(inputs, checkpointing)) is not None:
        raise SpecError(reason)
    return _plan(inputs, _model(inputs), checkpointing or _CHECKPOINTING[inputs.checkpointing or ""], assumed)


_SINGLE_GPU = "single GPU"
_APIS = {"FSDP1": Api.FSDP1, "FSDP2": Api.FSDP2, "DDP": Api.FSDP2, _SINGLE_GPU: Api.FSDP2, "none": Api.FSDP2}
_OFFLOAD = {"no": Offload.NONE, "params": Offload.PARAMS, "FSDP CPU offload (params+opt)": Offload.PARAMS}
_CHECKPOINTING = {"none": Checkpointing.NONE, "full": Checkpointing.FULL, "selective_op": Checkpointing.SELECTIVE}
_SOME_BLOCKS = "selective_block"
_NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "num_gpus",
    "num_nodes",
    "sharding",
    "stored_dtype",
    "offload",
    "checkpointing",
    "compiled",
    "optimizer",
    "micro_batch_size",
    "sequence_length",
)


def is_large_mpt(inputs: CaseInputs) -> bool:
    """Return whether llm-foundry's sweep.py made a row, for 128 H100 and more: with other settings than the rest."""
    return inputs.family == LLM_FOUNDRY and inputs.gpu.startswith("H100") and (inputs.num_gpus or 0) >= 128


def _filled_in(inputs: CaseInputs) -> tuple[CaseInputs, tuple[str, ...]]:
    """Fill blanks of a case from the framework's code; return the case and the assumptions."""
    framework = FRAMEWORKS.get(inputs.family, _UNREAD)
    stored, compute, reduce = inputs.stored_dtype, inputs.compute_dtype, inputs.reduce_dtype
    assumed = []
    if stored is None and framework.stored_if_blank is not None:
        stored, place = framework.stored_if_blank
        assumed.append(f"dtype of stored parameters not in the row: {stored} ({place})")
    if inputs.api == _SINGLE_GPU and stored is not None and None in (compute, reduce):
        assumed.append(f"one GPU: computes in the stored {stored}, and reduces nothing")
        compute, reduce = compute or stored, reduce or stored
    if reduce is None and framework.reduces_in_compute_dtype_if_blank is not None:
        reduce = compute
        assumed.append(
            f"reduce_dtype not in the row: the compute dtype ({framework.reduces_in_compute_dtype_if_blank})"
        )
    if inputs.gradient_accumulation_steps is None:
        assumed.append("gradient accumulation not stated: none")
    if inputs.num_parameters is None:
        assumed.append("number of parameters not stated: the head is not tied to the embedding")
    filled = msgspec.structs.replace(inputs, stored_dtype=stored, compute_dtype=compute, reduce_dtype=reduce)
    return filled, tuple(assumed)


def _ruled_out(inputs: CaseInputs, checkpointing: Checkpointing | None) -> str | None:
    framework = FRAMEWORKS.get(inputs.family, _UNREAD)
    is_llama = "llama" in inputs.model.lower() or framework.is_huggingfaces
    if framework.model_family is Family.LLAMA and not is_llama:
        return f"{inputs.model}: neither llama nor gpt2 as train/models/transformer.py builds them"
    if "fp8" in (inputs.precision or ""):
        return "fp8 is Transformer Engine's here, of which was not read what it saves and casts; torchao's is modelled"
    if inputs.offload is not None and inputs.offload not in _OFFLOAD:
        compiled = " in compiled code" if inputs.compiled == "yes" else ""
        return f"offload of {inputs.offload}{compiled} is not modelled"
    if inputs.optimizer is not None and inputs.optimizer not in framework.optimizers:
        return f"optimizer {inputs.optimizer} is not modelled"
    if has_step(inputs, "+opt in backward"):
        return "the optimizer's step inside backward is modelled under FSDP alone"
    if inputs.api not in _APIS:
        return f"{inputs.api} is not modelled"
    if inputs.compiled not in (None, "yes", "no"):
        return f"code compiled by {inputs.compiled} is not modelled"
    if inputs.checkpointing == _SOME_BLOCKS and checkpointing is None:
        return "some blocks are checkpointed; the source does not say which fraction"
    blank = [name for name in (*_NEEDED, "compute_dtype", "reduce_dtype") if getattr(inputs, name) is None]
    if inputs.checkpointing not in (None, _SOME_BLOCKS, *_CHECKPOINTING):
        return f"checkpointing {inputs.checkpointing} is not modelled"
    return f"the source does not state {', '.join(blank)}" if blank else None


def _model(inputs: CaseInputs) -> Model:
    """Return the shape. The stated number of parameters shows whether the head is tied to the embedding."""
    if FRAMEWORKS.get(inputs.family, _UNREAD).is_huggingfaces:
        config = {**loader.BUILT_IN.model(inputs.model).hf_config(), "sliding_window": None}
        return recorded_architecture(config, inputs.sequence_length or 0, inputs.model)
    for tied in (False, True):
        shape = ModelShape(
            name=inputs.model,
            family=FRAMEWORKS.get(inputs.family, _UNREAD).model_family,
            num_hidden_layers=inputs.num_hidden_layers or 0,
            hidden_size=inputs.hidden_size or 0,
            num_attention_heads=inputs.num_attention_heads or 0,
            num_key_value_heads=inputs.num_key_value_heads or 0,
            intermediate_size=inputs.intermediate_size or 0,
            vocab_size=inputs.vocab_size or 0,
            max_position_embeddings=inputs.sequence_length or 0,
            tie_word_embeddings=tied,
        )
        if inputs.num_parameters in (None, shape.num_parameters):
            return shape
    raise SpecError(f"the dimensions do not give the stated {inputs.num_parameters:,} parameters")


def _plan(inputs: CaseInputs, model: Model, checkpointing: Checkpointing, assumed: tuple[str, ...]) -> Plan:
    framework = FRAMEWORKS.get(inputs.family, _UNREAD)
    gpu = gpu_of(inputs)
    assumptions = [*framework.facts, *assumed]
    if inputs.optimizer == "AdamW":
        assumptions.append("AdamW's implementation not stated: foreach, PyTorch's choice on a GPU")
    policy = None
    if checkpointing is Checkpointing.SELECTIVE and framework.recomputes_every_second_product is not None:
        place = framework.recomputes_every_second_product
        assumptions.append(f"selective checkpointing recomputes every second matrix product ({place})")
        policy = EVERY_SECOND_PRODUCT
    if gpu is None:
        assumptions.append(f"{inputs.gpu}: memory not stated; a GPU without limit")
    sharding = "NO_SHARD" if inputs.sharding == "none" else inputs.sharding or ""
    strategy, world = ShardingStrategy(sharding), inputs.num_gpus or 0
    is_large = is_large_mpt(inputs)
    setup = TrainSetup(
        strategy=strategy,
        api=_APIS[inputs.api],
        precision=Precision(inputs.stored_dtype or "", inputs.compute_dtype or "", inputs.reduce_dtype or ""),
        offload=_OFFLOAD[inputs.offload or ""],
        checkpointing=checkpointing,
        checkpointing_policy=policy,
        reentrant=framework.reentrant if checkpointing is Checkpointing.FULL else Reentrant.NO,
        optimizer=framework.optimizers[inputs.optimizer or ""],
        world_size=world,
        shard_size=world // (inputs.num_nodes or 1) if strategy.is_hybrid else None,
        micro_batch_size=inputs.micro_batch_size or 0,
        sequence_length=inputs.sequence_length or 0,
        gradient_accumulation_steps=inputs.gradient_accumulation_steps or 1,
        sync_every_micro_batch=framework.syncs_every_micro_batch,
        max_grad_norm=framework.max_grad_norm,
        loss=Loss.CHUNKED if has_step(inputs, "+chunked CE") else framework.loss,
        compile=inputs.compiled == "yes",
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if is_large else framework.backward_prefetch,
        forward_prefetch=is_large,
    )
    kernels = replace(CUDA, cross_entropy=framework.cross_entropy, metrics_on_logits=framework.metrics_on_logits)
    packed = has_step(inputs, "+packed")
    return Plan(model, setup, gpu, kernels, packed, tuple(assumptions))
