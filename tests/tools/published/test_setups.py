"""Published rows as a model, a setup and hardware. Expected values are in the row or in its comment."""

from __future__ import annotations

import msgspec
import pytest

from fsdp_bench.simulate.operators.kernels import CrossEntropy
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import LinkKind
from fsdp_bench.spec.setup import Api, BackwardPrefetch, Checkpointing, Loss, OptimizerKind, ShardingStrategy
from fsdp_bench.spec.units import GIB
from tests.conftest import message_of
from tools.validate.published.cases import CaseInputs, PublishedCase, cluster_of, read_network
from tools.validate.published.setups import plan_case


def _reason(inputs: CaseInputs, **changed: object) -> str:
    return message_of(lambda: plan_case(msgspec.structs.replace(inputs, **changed)))


def test_torchtitans_row_is_mapped_as_it_stands(cases: dict[str, PublishedCase]) -> None:
    case = cases["pr165_FSDP2_selective_op_eager"]
    plan = plan_case(case.inputs)
    assert plan.model.num_parameters == 6738415616
    assert (plan.model.num_hidden_layers, plan.model.hidden_size, plan.model.intermediate_size) == (32, 4096, 11008)
    setup = plan.setup
    assert (setup.api, setup.strategy, setup.world_size) == (Api.FSDP2, ShardingStrategy.FULL_SHARD, 8)
    assert (setup.precision.name, setup.checkpointing) == ("bf16-mixed", Checkpointing.SELECTIVE)
    assert (setup.micro_batch_size, setup.sequence_length, setup.compile) == (8, 2048, False)
    assert setup.checkpointing_policy == "every-second-product"
    assert plan.gpu.usable_memory_bytes == pytest.approx(95.0396 * GIB, rel=1e-6)
    assert [(peak.kind, peak.num_bytes) for peak in case.measured] == [
        ("max_active", round(49.54 * GIB)),
        ("max_reserved", round(59.41 * GIB)),
    ]


def test_litgpts_row_is_mapped_as_it_stands(cases: dict[str, PublishedCase]) -> None:
    plan = plan_case(cases["litgpt_tinyllama_ddp_eager"].inputs)
    assert plan.model.num_parameters == 1100048384
    assert not plan.model.tie_word_embeddings
    setup = plan.setup
    assert (setup.api, setup.strategy, setup.world_size) == (Api.FSDP2, ShardingStrategy.NO_SHARD, 8)
    assert (setup.precision.name, setup.gradient_accumulation_steps) == ("bf16-true", 16)
    assert not setup.sync_every_micro_batch


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


def test_mpt_gathers_after_a_gradient_computation_but_in_the_large_sweep(cases: dict[str, PublishedCase]) -> None:
    usual, large = (
        plan_case(cases[name].inputs).setup
        for name in ("mpt_1b_a100_40gb_16g_s2048_mb8", "mpt_7b_h100_80gb_512g_s2048_mb6")
    )
    assert (usual.backward_prefetch, usual.forward_prefetch) == (BackwardPrefetch.BACKWARD_POST, False)
    assert (large.backward_prefetch, large.forward_prefetch) == (BackwardPrefetch.BACKWARD_PRE, True)


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


def test_torchtunes_ladder_is_cumulative(cases: dict[str, PublishedCase]) -> None:
    plans = [plan_case(cases[f"tune_ladder_{step}"].inputs) for step in (1, 2, 3, 4)]
    assert [plan.setup.compile for plan in plans] == [False, True, True, True]
    assert [plan.setup.loss for plan in plans] == [Loss.PLAIN, Loss.PLAIN, Loss.CHUNKED, Loss.CHUNKED]
    assert [plan.packed for plan in plans] == [True] * 4


@pytest.mark.parametrize(
    ("case", "because"),
    [
        ("tune_ladder_0", "does not state sequence_length"),
        ("tune_70b_full_8a100", "does not state stored_dtype, checkpointing"),
        ("tune_ladder_5", "inside backward"),
        ("tune_ladder_6", "activations"),
        ("ao_vitg_none", "neither llama nor gpt2"),
        ("ibm_13b_A100_compile-yes", "which fraction"),
        ("mpt_3b_h100_80gb_8g_s2048_mb10_fp8", "fp8 is Transformer Engine's here"),
        ("mpt_1b_h100_80gb_8g_s512_mb56_fp8", "fp8 is Transformer Engine's here"),
    ],
)
def test_a_row_that_cannot_be_mapped_has_a_reason(cases: dict[str, PublishedCase], case: str, because: str) -> None:
    assert because in _reason(cases[case].inputs)


def test_code_of_another_compiler_is_not_taken_for_eager(cases: dict[str, PublishedCase]) -> None:
    inputs = cases["litgpt_tinyllama_fsdp_eager"].inputs
    assert _reason(inputs, compiled="thunder") == "code compiled by thunder is not modelled"
    assert _reason(inputs, compiled=None) == "the source does not state compiled"


def test_assumptions_are_listed(cases: dict[str, PublishedCase]) -> None:
    listed = "; ".join(plan_case(cases["tune_ladder_1"].inputs).assumptions)
    for assumption in ("AdamW", "accumulation not stated", "memory not stated", "computes in the stored bf16"):
        assert assumption in listed


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
