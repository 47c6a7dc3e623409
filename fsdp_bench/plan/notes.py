"""Warnings about the assumptions of a prediction."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_bench.catalog.hf_config import sliding_window_note
from fsdp_bench.catalog.recorded import compiled_catalog
from fsdp_bench.plan.question import Question
from fsdp_bench.rates.attention_time import CUDNN, kernel_of
from fsdp_bench.rates.collectives import socket_is_assumed
from fsdp_bench.simulate.operators.kernels import prefers_cudnn
from fsdp_bench.spec.hardware import Gpu
from fsdp_bench.spec.lora import LARGEST_FUSED_PRODUCT
from fsdp_bench.spec.recording.model import RecordedModel


def notes_of(question: Question, why_eager: str | None) -> tuple[str, ...]:
    """Return the warnings. ``why_eager``: why a setup that compiles is predicted for eager mode."""
    setup, model = question.setup, question.model
    notes = []
    if isinstance(model, RecordedModel):
        notes.append(_recorded_note(model))
        lora, num_tokens = model.code.origin.lora, setup.micro_batch_size * setup.sequence_length
        if lora is not None and lora.is_quantized and num_tokens <= LARGEST_FUSED_PRODUCT:
            notes.append(
                f"QLoRA: up to {LARGEST_FUSED_PRODUCT} tokens in a micro-batch bitsandbytes may multiply without"
                " unpacking the weights, by the GPU, and then needs less"
            )
    if why_eager is not None:
        notes.append(f"the setup compiles, and {why_eager}; this is the prediction for eager")
    elif setup.compiles:
        notes.append(
            f"compiled blocks as torch {compiled_catalog().torch} compiles them; what compiling itself takes in the"
            " first step is not predicted"
        )
    gpu = question.gpu
    notes += _of_attention(question)
    if gpu is not None and gpu.cuda is not None and question.is_on_gpu:
        notes.append(_cuda_note(gpu))
    is_assumed = setup.strategy.is_hybrid and setup.shard_size is None and not question.has_server
    if is_assumed and setup.world_size > 1:
        notes.append(
            f"hybrid strategies: nothing says how many GPUs a node has, so shard groups of {setup.shard_group_size}"
            f" of {setup.world_size} ranks are assumed; --gpus-per-node or --shard-size says it"
        )
    longest = model.max_position_embeddings
    if longest is not None and setup.sequence_length > longest:
        notes.append(f"{setup.sequence_length} tokens are beyond the {longest} positions of {model.name}")
    window = question.sliding_window
    if window is not None and setup.sequence_length > window:
        notes.append(sliding_window_note(window))
    hardware = question.hardware
    if question.is_on_gpu and question.profile is None and hardware is not None and socket_is_assumed(hardware):
        notes.append(
            f"nobody documents which GPUs of a {hardware.name} share a processor, or what joins its"
            " processors: that is taken to be no slower than PCIe"
        )
    return tuple(notes)


def _of_attention(question: Question) -> Iterator[str]:
    """Yield what is assumed of fused attention in 16 bits on this GPU."""
    gpu, model, compute = question.gpu, question.model, question.setup.precision.compute
    if model.has_flash_attn:
        yield "attention: the flash-attn package as its source says; compared with no run of it"
        return
    if gpu is None or not question.is_on_gpu or not model.has_fused_attention or compute == "fp32":
        return
    if gpu.is_before_sm80 and model.knows_attention(gpu, compute):
        yield _note_before_sm80(gpu)
    if kernel_of(gpu) == CUDNN:
        yield (
            "attention: the memory of FlashAttention's kernel and the time of cuDNN's, which torch takes on"
            f" {gpu.name} with cuDNN above 9.15"
        )


def _recorded_note(model: RecordedModel) -> str:
    """Return whose code was recorded, and what was assumed of its batch and of what its kernels need."""
    origin = model.code.origin
    whose = {"huggingface": "Hugging Face's", "torchtitan": "torchtitan's"}.get(origin.code, "your own")
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    batch = "full sequences, no attention mask, no cache of keys and values" if model.has_tokens else "images"
    if len(model.counts) > 1:
        batch += ", as many target tokens as source tokens"
    routing = "; balanced routing" if any("_grouped_mm" in name for name in model.some_variant.names) else ""
    if origin.code == "torchtitan":
        batch += "; attention by F.scaled_dot_product_attention, the cross-entropy of all logits at once"
    return f"code: {whose} {origin.architecture}, recorded with {versions}; {batch}{routing}"


FIRST_WITH_CUDA_13 = 7.5
"""The oldest compute capability that torch's builds for CUDA 13 have kernels for (torch.cuda.get_arch_list)."""


def _note_before_sm80(gpu: Gpu) -> str:
    """Say which kernels of attention an older GPU runs, and which builds of torch have kernels for it at all."""
    builds = ""
    if (gpu.compute_capability or 0.0) < FIRST_WITH_CUDA_13:
        builds = f"; torch's builds for CUDA 13 have no kernels for compute capability {gpu.compute_capability}"
    return (
        "attention: torch has no FlashAttention for this GPU; it runs memory-efficient attention in fp16 without"
        f" grouped keys, else single operators, which keep the weights of all heads in fp32{builds}"
    )


def _cuda_note(gpu: Gpu) -> str:
    products = f"matrix products with the older cuBLAS of {gpu.name}'s entry" if gpu.has_older_cublas else ""
    attention = "attention by FlashAttention-2" if prefers_cudnn(gpu) and kernel_of(gpu) != CUDNN else ""
    decided = ", ".join(filter(None, (products, attention))) or "no rate that is known to depend on it"
    return f"CUDA {gpu.cuda}: {decided}"
