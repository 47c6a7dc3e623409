"""The text that ``fsdp-bench rehearse`` prints."""

from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.lookup import find_placement, server
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.headroom import Headroom
from fsdp_bench.plan.rehearsal import Rehearsal, worst_of
from fsdp_bench.plan.rehearsal_document import rehearsal_document
from fsdp_bench.rates.communicators import communicators_of
from fsdp_bench.report.charts.rehearsal import rehearsal_slide
from fsdp_bench.report.charts.slide import draw
from fsdp_bench.report.text.prediction import retries_text
from fsdp_bench.report.text.rehearsal import place, report_text, several, verdict_line
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup
from fsdp_bench.spec.subprocesses.rehearsal import (
    GpuRead,
    HeldLine,
    PhasePeaks,
    RehearsalOutcome,
    RehearsalReport,
    ScriptFailure,
    SourceLine,
)
from fsdp_bench.spec.units import GIB
from tests.plan.rehearsed_time.conftest import INT64, StepWriter

EIGHT = tuple(range(8))
OWN, INNER = SourceLine("train.py", 17, "<module>"), SourceLine("/env/site-packages/transformers/loss.py", 42, "loss")


def span(step: int, phase: str, gib: float, reserved: float = 30.0, retries: int = 0) -> PhasePeaks:
    sizes = {"allocated_bytes": int(gib * GIB), "active_bytes": int(gib * GIB), "reserved_bytes": int(reserved * GIB)}
    return PhasePeaks(step=step, phase=phase, **sizes, num_alloc_retries=retries, num_ooms=0)


REPORT = RehearsalReport(
    outcome=RehearsalOutcome.STOPPED,
    failure=None,
    sentence="python train.py: run as rank 0 of 8 on one node",
    rank=0,
    world_size=8,
    gpus_per_node=8,
    num_steps=2,
    spans=(span(1, "load", 2), span(1, "forward", 9), span(1, "backward", 20), span(2, "backward", 22)),
    lines_at_peak=(
        HeldLine(line=INNER, user_line=OWN, num_bytes=5 * GIB, num_tensors=3),
        HeldLine(line=None, user_line=None, num_bytes=GIB, num_tensors=1),
    ),
    curve=((1, 0, 0), (2, 9 * GIB, 10 * GIB), (3, 22 * GIB, 30 * GIB), (4, 2 * GIB, 30 * GIB)),
    step_ends_us=((1, "forward", 1), (1, "backward", 2), (2, "backward", 4)),
    reads=(),
    num_known_reads=0,
    unsupported={},
    stops_at_unsupported=True,
    process_groups={"0": 8},
    collectives=(("0", "allgather_base", 4),),
    peak_host_bytes=GIB,
    peak_unwritten_host_bytes=31 * GIB,
    notes=(),
    torch="2.13.0+cu130",
    cuda="13.0",
    device_name="NVIDIA H100 80GB HBM3",
    allocator_settings=None,
)
FAILURE = ScriptFailure(type="OutOfMemoryError", message="CUDA out of memory.", line=INNER, user_line=OWN, traceback="")


OUT: dict[str, Any] = {"outcome": RehearsalOutcome.OUT_OF_MEMORY, "failure": FAILURE}


def retried(count: int) -> dict[str, Any]:
    """Return a report's spans with two allocation retries in the first step, and so many in all."""
    return {"spans": (span(1, "forward", 3, retries=2), span(2, "forward", 3, retries=count))}


def rehearsal(**changes: Any) -> Rehearsal:
    return Rehearsal(replace(REPORT, **changes), server("p5.48xlarge"), Headroom(2 * GIB, "assumed"))


def test_retries_are_counted_in_the_first_steps_and_in_each_later_one() -> None:
    assert retries_text(0, 0) == "0 allocation retries"
    assert retries_text(1, 0) == "1 allocation retry in the first 4 steps, none later"
    assert retries_text(19, 6) == "19 allocation retries in the first 4 steps, up to 6 in each later one"
    assert retries_text(2, None) == "2 allocation retries in the first 4 steps, unknown later"


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        (
            *({}, Verdict.FITS),
            "fits (rehearsed): peak 22.0 GiB allocated, in backward of step 2, 30.0 GiB reserved; 79.2 GiB",
        ),
        (retried(2), Verdict.RUNS_WITH_RETRIES, "2 allocation retries, none of them in the last step"),
        (retried(3), Verdict.RUNS_WITH_RETRIES, "3 allocation retries, 1 of them in the last step"),
        (OUT, Verdict.DOES_NOT_FIT, "memory, in backward of step 2, at train.py:17 (transformers/loss.py:42)"),
        ({"outcome": RehearsalOutcome.FAILED, "failure": replace(FAILURE, type="KeyError")}, None, "with KeyError at"),
        ({"num_steps": 1}, None, "only one step ran"),
        ({"unsupported": {"x": 1}, "stops_at_unsupported": False}, Verdict.FITS, "fits"),
        ({"num_steps": 0}, None, "never made an optimizer step"),
        ({"num_steps": 0, "spans": ()}, None, "never used the GPU"),
        ({"spans": ()}, None, "never used the GPU"),
        ({"unsupported": {"cusolverDnCreate": 1}}, None, "called cusolverDnCreate, which the stand-in does not have"),
    ],
)
def test_each_end_of_a_script_has_its_verdict(changes: dict[str, Any], verdict: Verdict | None, words: str) -> None:
    found = rehearsal(**changes)
    assert found.verdict is verdict
    assert words in verdict_line(found)
    assert report_text(found).startswith(verdict_line(found))
    assert rehearsal_document(found).fits == (None if verdict is None else verdict is Verdict.FITS)


@pytest.mark.parametrize(
    ("outcome", "ended"),
    [(RehearsalOutcome.TIMED_OUT, "ended by --timeout"), (RehearsalOutcome.INTERRUPTED, "interrupted")],
)
def test_a_script_that_was_ended_has_its_peaks_and_no_verdict(outcome: RehearsalOutcome, ended: str) -> None:
    found = rehearsal(outcome=outcome)
    assert found.verdict is None
    assert f"the script was {ended} after 2 optimizer steps; until then: peak 22.0" in verdict_line(found)
    assert rehearsal_document(found).memory.peak_allocated_bytes == 22 * GIB
    assert replaced(found, max_gpu_bytes=GIB).verdict is Verdict.DOES_NOT_FIT  # more time would not help


def test_a_script_that_fails_before_it_uses_the_gpu_has_no_facts_of_the_allocator() -> None:
    failed = rehearsal(outcome=RehearsalOutcome.FAILED, failure=FAILURE, spans=(), num_steps=0, lines_at_peak=())
    text = report_text(failed)
    assert "failed after 0 optimizer steps" in text
    assert not [word for word in ("allocator", "NCCL", "kept free", "host memory") if word in text]


@pytest.mark.parametrize(("called", "goes_on"), [("cublasSgetrfBatched", True), ("cusolverDnCreate", False)])
def test_going_on_is_proposed_only_where_it_helps(called: str, goes_on: bool) -> None:
    assert ("try: --unsupported warn" in report_text(rehearsal(unsupported={called: 1}))) is goes_on


def test_a_limit_of_the_users_own_counts_what_is_kept_free() -> None:
    assert replaced(rehearsal(), max_gpu_bytes=32 * GIB).verdict is Verdict.FITS
    assert replaced(rehearsal(), max_gpu_bytes=32 * GIB - 1).verdict is Verdict.DOES_NOT_FIT


def test_the_first_step_and_the_steady_state_are_told_apart() -> None:
    document = rehearsal_document(rehearsal())
    assert document.headroom_bytes == document.server.gpu_memory_bytes - 30 * GIB
    assert document.memory.first_step.allocated_bytes == 20 * GIB
    assert document.memory.steady_state.allocated_bytes == 22 * GIB
    assert (document.memory.peak_step, document.memory.peak_phase) == (2, "backward")
    assert document.host.peak_bytes_of_real_run == 32 * GIB


def test_headroom_is_unknown_where_a_rehearsal_does_not_say_what_is_needed() -> None:
    """With allocation retries the cache was emptied; before the first allocation nothing was needed yet."""
    retried = rehearsal_document(rehearsal(spans=(span(1, "backward", 60, reserved=70, retries=2),)))
    unused = rehearsal_document(rehearsal(spans=()))
    assert (retried.verdict, retried.headroom_bytes) == ("runs_with_retries", None)
    assert (unused.fits, unused.headroom_bytes) == (None, None)


def test_lines_that_hold_memory_are_named_below_their_folder_of_packages() -> None:
    text = report_text(rehearsal())
    assert "5.0 GiB        3  transformers/loss.py:42" in text
    assert "1.0 GiB        1  backward, by autograd" in text
    assert place(OWN) == "train.py:17"


def test_unknown_values_that_were_read_are_said_and_known_ones_too() -> None:
    assert "read no value from the GPU" in report_text(rehearsal())
    assert "read 3 small integers from the GPU, each as in training" in report_text(rehearsal(num_known_reads=3))
    read = GpuRead(line=INNER, user_line=OWN, operator="nonzero", decides_sizes=True, count=4, num_bytes=32)
    shown = " ".join(report_text(rehearsal(reads=(read,))).split())
    assert "nonzero at train.py:17 (transformers/loss.py:42), 4 times: sizes may follow from these values" in shown
    assert shown.startswith("unknown whether it fits: train.py:17 reads values from the GPU that may decide sizes")


def test_nccls_memory_is_of_the_groups_that_the_script_made() -> None:
    assert [one.num_ranks for one in rehearsal().communicators.each] == [8]
    gathers = (("1", "allgather_base", 4), ("2", "allreduce", 4), ("0", "barrier", 1))
    ranks = {"0": EIGHT, "1": (0, 1, 2, 3), "2": (0, 4)}
    sizes = {group: len(of) for group, of in ranks.items()}
    of_three = replaced(
        rehearsal(process_groups=sizes, collectives=gathers, group_ranks=ranks), hardware=server("p5.48xlarge")
    )
    setup = TrainSetup(world_size=8, shard_size=4, strategy=ShardingStrategy.HYBRID_SHARD)
    assert of_three.communicators == communicators_of(setup, server("p5.48xlarge"))
    messages = replace(of_three.report, peers=(4,))
    assert replaced(of_three, report=messages).communicators is None
    assert rehearsal(process_groups={"0": 8, "1": 3}).communicators is None


def test_an_all_reduce_may_need_nvlink_sharp_beside_gathers() -> None:
    """Tensor parallelism gathers and adds up in one group; what that needs at most is what hybrid sharding's needs."""
    where, ranks = server("p5.48xlarge"), {"tp": (0, 1), "dp": (0, 2, 4, 6)}
    both = (("tp", "allgather_base", 4), ("tp", "allreduce", 1), ("dp", "allgather_base", 4))
    report = replace(REPORT, process_groups={"tp": 2, "dp": 4}, collectives=both, group_ranks=ranks)
    found = Rehearsal(report, where, Headroom(0, "stated")).communicators
    assert [(one.purpose, one.num_ranks) for one in found.each] == [("shard", 4), ("replicate", 2), ("barriers", 8)]
    assert found.num_bytes is not None


def test_a_rank_that_does_not_fit_decides_before_an_unknown_one_and_is_named() -> None:
    fits, larger = rehearsal(), rehearsal(rank=3, spans=(span(1, "forward", 9, reserved=50),))
    unknown = rehearsal(rank=5, outcome=RehearsalOutcome.FAILED, failure=FAILURE, spans=())
    too_large = rehearsal(rank=7, **OUT)
    ranks = [fits, larger, unknown, too_large]
    assert [worst_of(ranks[:count]) for count in (2, 3, 4)] == ranks[1:]
    assert several(ranks[:2]).startswith("rank 3 decides: fits (rehearsed)")
    assert several(ranks[:3]).startswith("rank 5 decides: unknown")
    assert several(ranks[:3]).splitlines()[-1].split() == ["5", *["unknown"] * 3]  # it never used the GPU


def test_the_chart_is_drawn_and_needs_the_memory_history(tmp_path: Path) -> None:
    draw(rehearsal_slide(rehearsal()), tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    with pytest.raises(SpecError, match="no memory history"):
        rehearsal_slide(rehearsal(curve=None))


# -- the time of a step: ``rehearse --time`` --------------------------------------------------------------------------


EIGHT = tuple(range(8))


def of_step(step: StepWriter | None, **changes: Any) -> Rehearsal:
    timed = replaced(rehearsal(issued=None if step is None else step.read()), asks_time=True)
    return replaced(timed, **changes)


def step_of(*more: str) -> StepWriter:
    step = StepWriter()
    step.product(4096, 4096, 4096)
    weight, indices = step.tensor(1000, 16), step.tensor(512, dtype=INT64)
    step.operator("aten::embedding", (step.tensor(512, 16),), weight=(weight,), indices=(indices,))
    step.add("phase", name="backward")
    step.collective("allgather_base", 10**9, EIGHT)
    for name in more:
        step.operator(name, (step.tensor(8),), self=(step.tensor(8),))
    return step


def joined_text(found: Rehearsal) -> str:
    """Return the text with its wrapped lines joined."""
    return " ".join(report_text(found).split())


def test_the_step_says_which_of_its_numbers_are_rehearsed_and_which_predicted() -> None:
    found = joined_text(of_step(step_of()))
    assert "step time" in found
    assert "tokens/s per GPU, MFU" in found
    assert "(rehearsed: what step 4 issued; predicted: how long that takes)" in found
    assert "The script never ran on a GPU" in found
    assert "the GPU's datasheet and NCCL's model of its links" in found
    assert "512 in a step, which are what its embedding looks up" in found
    assert "aten::mm nn compute 1" in found
    assert "runs on one node are expected to be predicted" in found  # the range


def test_operators_of_unknown_time_are_named_and_counted() -> None:
    found = joined_text(of_step(step_of("mylib::attention", "mylib::attention", "aten::linalg_qr")))
    assert "step time unknown, as nobody documents how long some of it takes; all else takes" in found
    assert "unknown: mylib::attention, 2 times; aten::linalg_qr, 1 time" in found


def test_without_a_server_it_says_what_tells_the_links() -> None:
    gpu = find_placement("H100-SXM", None, None, None, 8).hardware
    found = joined_text(of_step(step_of(), hardware=gpu))
    assert "unknown: all_gather of 8 ranks, 1 time --server NAME says which links collectives and copies have" in found


def test_without_a_step_it_says_why() -> None:
    found = of_step(None)
    assert "step time unknown: a step after the first is needed" in joined_text(found)
    document = rehearsal_document(found)
    assert document.time is None
    assert document.why_no_time.startswith("a step after the first is needed")


def test_tokens_that_are_unknown_can_be_given() -> None:
    step = StepWriter()
    step.product(4096, 4096, 4096)
    assert "tokens/s unknown (--tokens-per-step N)" in joined_text(of_step(step))
    assert "tokens/s per GPU" in joined_text(of_step(step, tokens_per_step=4096))


def test_several_ranks_have_a_column_of_step_times() -> None:
    header, first, second = several([of_step(step_of()), of_step(step_of("mylib::attention"))]).splitlines()[-3:]
    assert "step time" in header
    assert " ms" in first
    assert "unknown" in second


def test_a_stage_alone_names_the_ranks_to_be_run() -> None:
    step = StepWriter()
    step.collective("recv", 100, (0, 4), peer=4, is_asynchronous=True)
    report = replace(REPORT, issued=step.read(), peers=(4,))
    found = report_text(Rehearsal(report, server("p5.48xlarge"), Headroom(0, "stated"), asks_time=True))
    assert "as it depends on pipeline stages that were not rehearsed" in " ".join(found.split())
    assert "--ranks stages runs one rank of each stage: 0,4" in found


def test_without_time_nothing_of_it_is_printed() -> None:
    assert "step time" not in report_text(rehearsal())
    assert rehearsal_document(rehearsal()).time is None
