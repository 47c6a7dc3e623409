"""Losses and policies of checkpointing, also those of other scripts: memory and traffic, by hand from shapes.

Which recorded models take a loss in place of their own, and refusals.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from fsdp_bench.simulate.events import Event, Kind, Work
from fsdp_bench.simulate.losses import rows_of_a_chunk
from fsdp_bench.simulate.operators.kernels import CUDA, CrossEntropy
from fsdp_bench.simulate.repeat import Log
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import Loss, TrainSetup
from tests.shapes import memory_of, recorded, shape

FUSED = [Loss.FLASH_ATTN, Loss.LIGER, Loss.LIGER_FUSED_LINEAR, Loss.UNSLOTH_FP32]
TOKENS, VOCABULARY, WIDTH = 2 * 1024, 32000, 256
LOGITS = TOKENS * VOCABULARY
WIDE = shape(
    **{"num_hidden_layers": 2, "hidden_size": WIDTH, "num_key_value_heads": 2, "intermediate_size": 512},
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 1024},
)
OTHERS = [kind for kind in Loss if kind is not Loss.PLAIN]
NARROW = {
    **{"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": VOCABULARY},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
}


def _setup(**fields: Any) -> TrainSetup:
    given = {"world_size": 8, "precision": "bf16-mixed", "micro_batch_size": 2, "sequence_length": 1024}
    return TrainSetup(**(given | fields))


@pytest.fixture(scope="module", params=["benchmark", "recorded"])
def model(request: pytest.FixtureRequest) -> ModelShape | RecordedModel:
    return WIDE if request.param == "benchmark" else recorded("Llama-3.2-1B", 1024, **NARROW)


@pytest.mark.parametrize(
    ("loss", "bytes_a_logit"),
    [
        ("plain", 4 + 4 + 4),  # log-softmax in fp32, its gradient, and that of fp32 logits
        ("compiled", 2 + 2),
        ("flash-attn", 2 + 2),
        ("liger", 2),  # the gradient overwrites them
        ("unsloth-fp32", 4 + 2),  # the gradient overwrites the fp32 copy, and is then cast
    ],
)
@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_logits_take_the_bytes_that_a_loss_keeps_of_them(
    model: ModelShape | RecordedModel, loss: str, bytes_a_logit: int, api: str
) -> None:
    logits = memory_of(model, _setup(loss=loss, api=api), CUDA).breakdown_bytes["logits"]
    assert logits == pytest.approx(bytes_a_logit * LOGITS, rel=0.002)  # and vectors of a number a token


def test_logits_take_half_in_a_script_that_does_not_cast_them_to_fp32() -> None:
    """The logarithms, their gradient, and the gradient of the logits: all in bf16."""
    kernels = dataclasses.replace(CUDA, cross_entropy=CrossEntropy.SAME_DTYPE)
    logits = memory_of(WIDE, _setup(), kernels).breakdown_bytes["logits"]
    assert logits == pytest.approx((2 + 2 + 2) * LOGITS, rel=0.002)


def test_the_fused_loss_reads_the_logits_twice_and_writes_their_gradient() -> None:
    log = SimulatedSteps(WIDE, _setup(loss="flash-attn"), CUDA).step()
    sent = {event.work.name: event.work.num_bytes for event in log.last_step() if event.work is not None}
    # bf16 logits, targets in int64; losses, sums of rows and squares of these in fp32
    assert sent["cross_entropy_fwd_kernel"] == 2 * LOGITS + (8 + 3 * 4) * TOKENS
    assert sent["cross_entropy_bwd_kernel"] == 2 * LOGITS + 4 * TOKENS + 8 * TOKENS + 2 * LOGITS
    assert not [name for name in sent if "softmax" in name or "nll" in name]


def test_with_the_head_in_the_loss_no_tensor_is_as_large_as_the_logits(model: ModelShape | RecordedModel) -> None:
    log = SimulatedSteps(model, _setup(loss="liger-fused-linear"), CUDA).step()
    largest = max(event.num_bytes for event in log.last_step() if event.kind is Kind.ALLOCATE and event.label != "cat")
    assert largest < 2 * LOGITS


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(1, 1), (2, 1), (125, 1), (126, 2), (TOKENS, 32), (100_000, 1024)],
    # By Liger's fused_linear_cross_entropy_forward: next_power_of_2(cdiv(tokens, cdiv(vocabulary, width))), where
    # cdiv(32000, 256) is 125: of 2048 tokens a part is 17, of 100000 it is 800.
)
def test_chunks_are_a_power_of_two_and_never_more_than_there_is(tokens: int, rows: int) -> None:
    assert rows_of_a_chunk(tokens, WIDTH, VOCABULARY) == rows
    assert rows_of_a_chunk(3, 64, 64) == 3


@pytest.mark.parametrize("loss", FUSED)
def test_an_impossible_loss_is_refused_with_an_alternative(loss: Loss) -> None:
    assert "use plain or chunked" in impossible(_setup(loss=loss), "cpu")
    ends = impossible(_setup(loss=loss, wrap="block-and-ends"), "cuda")
    assert (ends is not None) == (loss is Loss.LIGER_FUSED_LINEAR)
    assert ends is None or "use wrap = block or none" in ends
    assert why_impossible(WIDE, _setup(loss=loss, api="fsdp2", strategy="ddp", wrap="size"), "cuda") is None


CAUSAL = ["gpt2", "Qwen3-0.6B", "Mixtral-8x7B", "gpt-oss-20b", "DeepSeek-V3", "Gemma-3-1B"]
OF_THE_MODEL = {
    "t5-small": "T5ForConditionalGeneration does not predict the next token",
    "bert-base-uncased": "BertForMaskedLM does not predict the next token",
    "ViT-B-16": "ViTForImageClassification does not predict the next token",
}


@pytest.mark.parametrize(
    ("name", "loss", "said"),
    [
        *((name, loss, "None") for name in CAUSAL for loss in OTHERS),
        *((name, "chunked", said) for name, said in OF_THE_MODEL.items()),
        # Gemma 2 computes tanh of its logits, which a loss on logits gets and a loss that includes the head leaves out.
        ("Gemma-2-2B", "liger", "None"),
        ("Gemma-2-2B", "liger-fused-linear", "changes its logits after the head"),
    ],
)
def test_causal_language_models_take_every_loss_and_others_keep_their_own(name: str, loss: Loss, said: str) -> None:
    length = 512 if name in OF_THE_MODEL else 1024
    assert said in str(why_impossible(recorded(name, length), _setup(loss=loss, sequence_length=length), "cuda"))


@pytest.mark.parametrize(
    ("architecture", "config", "loss", "said"),
    [
        ("LlamaForCausalLM", {}, "liger-fused-linear", None),
        ("GPT2LMHeadModel", {}, "chunked", None),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 30.0}, "liger", None),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 30.0}, "liger-fused-linear", "use liger"),
        ("GraniteForCausalLM", {"logits_scaling": 8.0}, "liger-fused-linear", "changes its logits by logits_scaling"),
        ("MixtralForCausalLM", {"output_router_logits": True}, "liger", "adds its routers' loss"),
        ("T5ForConditionalGeneration", {}, "chunked", "is no causal language model"),
    ],
)
def test_trials_refuse_what_would_be_another_loss(
    architecture: str, config: dict[str, Any], loss: str, said: str | None
) -> None:
    model = ModelCode(
        name="m", code="huggingface", architecture=architecture, num_parameters=1, num_hidden_layers=1, config=config
    )
    reason = model.why_impossible(_setup(loss=loss), "cuda")
    assert reason is None if said is None else said in str(reason)


def test_metrics_on_logits_are_further_cross_entropies_in_fp32_and_keep_the_logits() -> None:
    """Each reads the 16-bit logits, writes them in fp32, reads those, and writes their logarithms."""
    setup = _setup(loss="flash-attn")
    kernels = dataclasses.replace(CUDA, metrics_on_logits=2)
    without, logged = (SimulatedSteps(WIDE, setup, each).step() for each in (CUDA, kernels))
    more = _bytes_of_operators(logged) - _bytes_of_operators(without)
    assert more == pytest.approx(2 * (2 + 4 + 4 + 4) * LOGITS, rel=0.001)  # and numbers of each token
    assert _left_behind(logged) - _left_behind(without) == 2 * LOGITS


def test_metrics_on_logits_are_the_peak_where_logits_outweigh_activations() -> None:
    """Kept logits in bf16, the same in fp32, and their logarithms: more than blocks that are computed again."""
    setup = _setup(loss="flash-attn", checkpointing="full")
    logged = memory_of(WIDE, setup, dataclasses.replace(CUDA, metrics_on_logits=1))
    assert (logged.peak_phase, logged.peak_operator) == ("loss", "aten::nll_loss_forward")
    assert logged.breakdown_bytes["logits"] >= (2 + 4 + 4) * LOGITS


def _bytes_of_operators(log: Log) -> int:
    """Bytes that a step's operators read and write."""
    return sum(work.num_bytes for work in _works(log.last_step()))


def _left_behind(log: Log) -> int:
    """Bytes that are alive at the end of the log."""
    sizes = {event.number: event.num_bytes for event in log.events if event.kind is Kind.ALLOCATE}
    for event in log.events:
        if event.kind is Kind.FREE:
            del sizes[event.number]
    return sum(sizes.values())


def _works(events: Iterable[Event]) -> list[Work]:
    return [event.work for event in events if event.work is not None]


def _products(setup: TrainSetup) -> list[tuple[int, ...]]:
    works = _works(SimulatedSteps(WIDE, setup, CUDA).step().last_step())
    return [work.dims for work in works if work.name == "aten::mm nt"]  # forward's


def _again(setup: TrainSetup) -> list[tuple[int, ...]]:
    """The products that are computed a second time."""
    found = _products(setup)
    for one in _products(_setup()):
        found.remove(one)
    return sorted(found)


SELECTIVE = _setup(checkpointing="selective")
EVERY_SECOND = _setup(checkpointing="selective", checkpointing_policy="every-second-product")


def test_every_second_product_is_computed_again() -> None:
    """wk, wo and w3 of wq, wk, wv, wo, w1, w3 and w2, in each of two blocks."""
    assert len(_products(SELECTIVE)) == 2 * 7 + 1
    assert not _again(SELECTIVE)
    assert _again(EVERY_SECOND) == sorted([(TOKENS, 128, 256), (TOKENS, 256, 256), (TOKENS, 512, 256)] * 2)


def test_an_operator_that_is_saved_costs_its_output() -> None:
    # silu's is 2 F bytes a token and block.
    silu = _setup(checkpointing="selective", checkpointing_policy=f"aten.silu,{','.join(SELECTIVE.policy.saved)}")
    kept, more = (memory_of(WIDE, setup, CUDA) for setup in (SELECTIVE, silu))
    assert more.peak_allocated_bytes - kept.peak_allocated_bytes == 2 * TOKENS * 512 * 2


def test_every_second_block_recomputes_all_products_but_its_last() -> None:
    policies = (None, "every-2-blocks")
    full, second = (_again(_setup(checkpointing="full", checkpointing_policy=each)) for each in policies)
    assert len(full) == 2 * 6
    assert sorted(second * 2) == full
