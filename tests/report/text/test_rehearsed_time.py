"""The text that ``fsdp-bench rehearse --time`` prints of a step."""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import Any

import msgspec

from fsdp_bench.catalog.lookup import find_placement
from fsdp_bench.plan.rehearsal import Rehearsal, rehearsal_document
from fsdp_bench.report.text.rehearsal import report_text, several
from tests.plan.rehearsed_time.steps import INT64, StepWriter
from tests.report.test_rehearsal_text import rehearsal

EIGHT = tuple(range(8))


def of_step(step: StepWriter | None, **changes: Any) -> Rehearsal:
    found = replaced(rehearsal(), asks_time=True, **changes)
    issued = None if step is None else step.read()
    return replaced(found, report=msgspec.structs.replace(found.report, issued=issued))


def step_of(*more: str) -> StepWriter:
    step = StepWriter()
    step.product(4096, 4096, 4096)
    weight, indices = step.tensor(1000, 16), step.tensor(512, dtype=INT64)
    step.operator("aten::embedding", (step.tensor(512, 16),), weight=(weight,), indices=(indices,))
    step.collective("allgather_base", 10**9, EIGHT)
    for name in more:
        step.operator(name, (step.tensor(8),), self=(step.tensor(8),))
    return step


def text(found: Rehearsal) -> str:
    """Return the text with its wrapped lines joined."""
    return " ".join(report_text(found).split())


def test_the_step_says_which_of_its_numbers_are_rehearsed_and_which_predicted() -> None:
    found = text(of_step(step_of()))
    assert "step time" in found
    assert "tokens/s per GPU, MFU" in found
    assert "(rehearsed: what step 4 issued; predicted: how long that takes)" in found
    assert "The script never ran on a GPU" in found
    assert "the GPU's datasheet and NCCL's model of its links" in found
    assert "512 in a step, which are what its embedding looks up" in found
    assert "aten::mm nn compute 1" in found
    assert "published runs were predicted" in found  # the range


def test_operators_of_unknown_time_are_named_and_counted() -> None:
    found = text(of_step(step_of("mylib::attention", "mylib::attention", "aten::linalg_qr")))
    assert "step time unknown, as nobody documents how long some of it takes; all else takes" in found
    assert "unknown: mylib::attention, 2 times; aten::linalg_qr, 1 time" in found


def test_without_a_server_it_says_what_tells_the_links() -> None:
    gpu = find_placement("H100-SXM", None, None, None, 8).hardware
    found = text(of_step(step_of(), hardware=gpu))
    assert "unknown: all_gather of 8 ranks, 1 time --server NAME says which links collectives and copies have" in found


def test_without_a_step_it_says_why() -> None:
    found = of_step(None)
    assert "step time unknown: a step after the first is needed" in text(found)
    document = rehearsal_document(found)
    assert document["time"] is None
    assert document["why_no_time"].startswith("a step after the first is needed")


def test_tokens_that_are_unknown_can_be_given() -> None:
    step = StepWriter()
    step.product(4096, 4096, 4096)
    assert "tokens/s unknown (--tokens-per-step N)" in text(of_step(step))
    assert "tokens/s per GPU" in text(of_step(step, tokens_per_step=4096))


def test_several_ranks_have_a_column_of_step_times() -> None:
    header, first, second = several([of_step(step_of()), of_step(step_of("mylib::attention"))]).splitlines()[-3:]
    assert "step time" in header
    assert " ms" in first
    assert "unknown" in second


def test_without_time_nothing_of_it_is_printed() -> None:
    assert "step time" not in report_text(rehearsal())
    assert rehearsal_document(rehearsal())["time"] is None
