"""Published rows as a model, a setup and hardware; their peaks and outcomes.

docs/validation/published.txt, which tests/docs compares, has every row: its setup, what is assumed, what is
predicted, or why it is left out. Expected values are in the row, in its comment, or what the source prints.
"""

import msgspec
import pytest

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading
from fsdp_bench.simulate.operators.kernels import CrossEntropy
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import LinkKind
from fsdp_bench.spec.setup import Loss, OptimizerKind
from fsdp_bench.spec.units import GIB
from tests.conftest import message_of
from tools.validate.published import peaks as published
from tools.validate.published.cases import CaseInputs, PublishedCase, cluster_of, read_network
from tools.validate.published.peaks import PredictedPeaks, compare_case, compare_fits
from tools.validate.published.setups import plan_case


def _reason(inputs: CaseInputs, **changed: object) -> str:
    return message_of(lambda: plan_case(msgspec.structs.replace(inputs, **changed)))


def test_an_mpt_row_is_gpt2_with_what_llm_foundry_does(cases: dict[str, PublishedCase]) -> None:
    plan = plan_case(cases["mpt_7b_h100_80gb_8g_s32768_mb2_ac"].inputs)
    # 32 blocks of 12 D^2 + 13 D (norms and biases), the last norm, 50368 tokens and 32768 positions, D = 4096.
    width = 4096
    assert plan.model.num_parameters == 32 * (12 * width**2 + 13 * width) + 2 * width + (50368 + 32768) * width
    assert plan.model.num_parameters == 6784688128  # as printed
    assert plan.setup.optimizer is OptimizerKind.ADAMW_FOR_LOOP
    assert plan.setup.gradient_accumulation_steps == 2
    assert plan.setup.sync_every_micro_batch
    assert plan.setup.loss is Loss.FLASH_ATTN


def test_a_blank_reduce_dtype_is_what_the_framework_does(cases: dict[str, PublishedCase]) -> None:
    """Composer's DEFAULT gives FSDP no reduce_dtype beside bf16 parameters stored in fp32: FSDP1 then reduces bf16."""
    inputs = cases["mpt_13b_h100_80gb_16g_s2048_mb2"].inputs
    assert (inputs.stored_dtype, inputs.reduce_dtype) == ("fp32", None)
    precision = plan_case(inputs).setup.precision
    assert (precision.store, precision.compute, precision.reduce) == ("fp32", "bf16", "bf16")
    assert any("reduce_dtype not in the row: the compute dtype" in fact for fact in plan_case(inputs).assumptions)


def test_a_blank_dtype_is_unknown_where_the_frameworks_code_was_not_read(cases: dict[str, PublishedCase]) -> None:
    inputs = cases["ibm_7b_A100_compile-no"].inputs
    assert _reason(inputs, reduce_dtype=None) == "the source does not state reduce_dtype"
    assert _reason(inputs, stored_dtype=None) == "the source does not state stored_dtype"


def test_mpt_logs_two_metrics_of_its_logits_and_ibms_loss_takes_them_as_they_are(
    cases: dict[str, PublishedCase],
) -> None:
    mpt, ibm = (plan_case(cases[name].inputs) for name in ("mpt_1b_a100_40gb_16g_s2048_mb8", "ibm_7b_A100_compile-no"))
    assert (mpt.kernels.metrics_on_logits, ibm.kernels.metrics_on_logits) == (2, 0)
    assert ibm.kernels.cross_entropy is CrossEntropy.SAME_DTYPE
    assert cases["mpt_1b_a100_40gb_16g_s2048_mb8"].inputs.stored_dtype is None
    assert mpt.setup.precision.store == "fp32"  # composer's bf16 is autocast


def test_the_stated_parameters_tell_whether_the_head_is_tied(cases: dict[str, PublishedCase]) -> None:
    plan = plan_case(cases["tune_ladder_3"].inputs)
    assert plan.model.num_parameters == 3212749824
    assert plan.model.tie_word_embeddings


def test_dimensions_that_do_not_give_the_stated_parameters_are_refused(cases: dict[str, PublishedCase]) -> None:
    assert "1,000 parameters" in _reason(cases["ibm_7b_A100_compile-no"].inputs, num_parameters=1000)


def test_code_of_another_compiler_is_not_taken_for_eager(cases: dict[str, PublishedCase]) -> None:
    inputs = cases["litgpt_tinyllama_fsdp_eager"].inputs
    assert _reason(inputs, compiled="thunder") == "code compiled by thunder is not modelled"
    assert _reason(inputs, compiled=None) == "the source does not state compiled"


@pytest.mark.parametrize(
    ("stated", "kind", "gigabytes"),
    [
        ("400 Gb/s per node", LinkKind.INFINIBAND, 50),
        ("1600 Gbps/node RoCE", LinkKind.ROCE, 200),
        ("EFA 400 Gb/s per node", LinkKind.EFA, 50),
        ("8 x 200 Gbit/s InfiniBand per node", LinkKind.INFINIBAND, 200),
        ("3.2 Tb/s per node", LinkKind.INFINIBAND, 400),
        ("100 GB/s per node", LinkKind.INFINIBAND, 100),
    ],
)
def test_networks_are_read_as_sources_write_them(stated: str, kind: LinkKind, gigabytes: int) -> None:
    network = read_network(stated, "a source")
    assert network.kind is kind
    assert network.bandwidth_bytes_per_second == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize("stated", ["fast", "EFA 400 Gb/s", "400 Gb/s per GPU", "400 Gb per node"])
def test_a_network_that_says_not_what_a_node_has_is_refused(stated: str) -> None:
    with pytest.raises(SpecError, match="what a node has"):
        read_network(stated, "a source")


def test_a_network_that_is_not_stated_stays_unknown(cases: dict[str, PublishedCase]) -> None:
    assert cluster_of(cases["mpt_7b_h100_80gb_512g_s2048_mb6"].inputs).server.inter_node is None


H100_GIB = 95.0396
"""The memory that torchtitan prints for the GPU of PR 165, and of which its peaks are percentages."""


def test_reserved_memory_that_retries_keep_within_the_gpu_is_compared_with_nothing(
    cases: dict[str, PublishedCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = AllocatorReading(1, {}, 2, 3, num_alloc_retries=4, out_of_memory=None, full_in_phase=None)
    monkeypatch.setattr(published, "predict_case", lambda _plan: PredictedPeaks(reading, "forward", "aten::mm"))
    active, reserved = compare_case(cases["pr165_FSDP1_full_eager"])
    assert (active.predicted_bytes, reserved.predicted_bytes) == (2, None)
    assert "retries" in (reserved.reason or "")


def test_the_inputs_of_a_prediction_have_no_measured_field() -> None:
    words = ("measured", "peak", "tokens_per", "seconds", "flops", "mfu", "outcome")
    assert not [field for field in CaseInputs.__struct_fields__ if any(word in field for word in words)]


@pytest.mark.parametrize(
    ("case", "kind", "printed_gib"),
    [
        # torchtitan PR 165 prints percentages of the GPU.
        ("pr165_FSDP1_full_eager", "max_active", 0.2481 * H100_GIB),
        ("pr165_FSDP1_selective_op_eager", "max_active", 0.5298 * H100_GIB),
        ("pr165_FSDP2_full_eager", "max_active", 0.2392 * H100_GIB),
        ("pr165_FSDP2_selective_op_eager", "max_active", 0.5213 * H100_GIB),
        # torchtune's README prints GiB, litgpt's prints GB of 10^9 bytes.
        ("tune_ladder_1", "max_active", 60.0),
        ("litgpt_tinyllama_fsdp_eager", "max_allocated", 22.13e9 / GIB),
        ("litgpt_tinyllama_ddp_eager", "max_allocated", 32.04e9 / GIB),
        ("litgpt_tinyllama_1gpu_eager", "max_allocated", 29.84e9 / GIB),
    ],
)
def test_eager_live_bytes_are_met_once_the_frameworks_own_tensors_are_named(
    cases: dict[str, PublishedCase], case: str, kind: str, printed_gib: float
) -> None:
    (row,) = (row for row in compare_case(cases[case]) if row.kind == kind)
    assert row.with_terms_bytes / GIB == pytest.approx(printed_gib, rel=0.002)


def test_a_case_that_does_not_fit_has_no_peak_and_a_reason(cases: dict[str, PublishedCase]) -> None:
    case = cases["pr165_FSDP2_compile_SAC_bs16"]
    larger = msgspec.structs.replace(case.inputs, micro_batch_size=32)
    (row,) = compare_case(msgspec.structs.replace(case, inputs=larger))
    assert row.predicted_bytes is None
    assert "not to fit" in (row.reason or "")


def test_a_run_on_a_gpu_that_is_too_small_does_not_fit(cases: dict[str, PublishedCase]) -> None:
    """36 GiB of the 40 GB GPU with 6 sequences: three times as many activations are more than it has."""
    case = cases["mpt_3b_a100_40gb_32g_s2048_mb6"]
    inputs = msgspec.structs.replace(case.inputs, micro_batch_size=18)
    (row,) = compare_fits([msgspec.structs.replace(case, inputs=inputs)])
    assert row.predicted is Verdict.DOES_NOT_FIT
