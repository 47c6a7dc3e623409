"""The page of a rehearsed script, and of several combinations: ``rehearse --html``."""

from dataclasses import replace as replaced
from datetime import date
from typing import Any

from msgspec.structs import replace

from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.plan.script.rehearsals import Answered
from fsdp_bench.plan.script.variants import Variant
from fsdp_bench.report.html.blocks import Page
from fsdp_bench.report.html.rehearsal import each_page, rehearsal_page
from fsdp_bench.report.html.write import html
from fsdp_bench.spec.subprocesses.rehearsal import GpuRead, HeldLine, RehearsalOutcome, SourceLine
from fsdp_bench.spec.units import GIB
from tests.report.html.samples import IMAGE, SCRIPT, STYLE, ParsedPage
from tests.report.test_rehearsal_text import FAILURE, OUT, of_step, rehearsal, span, step_of

COMMAND = "torchrun train.py --bs 4"


def parsed(page: Page) -> ParsedPage:
    return ParsedPage(html(page, date(2026, 11, 27)))


def page_of(*found: Rehearsal) -> ParsedPage:
    return parsed(rehearsal_page(found, COMMAND))


def hostile() -> Rehearsal:
    """Return a rehearsal whose script has names that a browser would run."""
    line = SourceLine(f"{SCRIPT}.py", 3, IMAGE, STYLE)
    step = step_of(SCRIPT)
    step.operator(f"aten::{IMAGE}", (step.tensor(8),), self=(step.tensor(8),))
    read = GpuRead(line=line, user_line=line, operator=STYLE, decides_sizes=True, count=2, num_bytes=8)
    found = rehearsal(
        outcome=RehearsalOutcome.OUT_OF_MEMORY,
        failure=replace(FAILURE, message=STYLE),
        sentence=SCRIPT,
        lines_at_peak=(HeldLine(line=line, user_line=line, num_bytes=GIB, num_tensors=1),),
        reads=(read,),
        notes=(IMAGE,),
        unsupported={STYLE: 1},
        torch=SCRIPT,
        device_name=STYLE,
        allocator_settings=IMAGE,
        issued=step.read(),
    )
    return replaced(found, asks_time=True)


def test_the_answer_is_first_then_memory_and_the_lines_that_hold_it() -> None:
    found = page_of(rehearsal())
    answer = "Fits (rehearsed): peak 22.0 GiB allocated, in backward of step 2, 30.0 GiB reserved"
    assert answer in found.text
    assert found.text.index(answer) < found.text.index(COMMAND) < found.text.index("Memory of rank 0 (rehearsed)")
    assert "22.0 GiB held at the peak, in backward of step 2, by the line that allocated it (rehearsed)" in found.text
    assert [text for text, _ in found.column("line")] == ["transformers/loss.py:42", "backward, by autograd"]
    assert [text for text, _ in found.column("called from")] == ["train.py:17", ""]
    assert [number for _, number in found.column("size")] == [str(5 * GIB), str(GIB)]
    titles = found.attributes("title")
    assert "transformers/loss.py:42, in loss: , from train.py:17, GiB: 5" in titles
    assert "other lines, rounding to blocks, GiB: 16" in titles  # 22 less 5 and 1
    assert "peak; 5.0 GiB by transformers/loss.py:42" in titles
    assert [text for text, _ in found.column("backward", table=1)] == ["20.0 GiB", "22.0 GiB"]


def test_each_stream_of_the_step_is_drawn_if_its_time_is_known() -> None:
    step = step_of()
    step.add("hook", name="fsdp2 _pre_forward")
    known = page_of(of_step(step))
    assert "Step 4 of rank 0, stream by stream (predicted)" in known.text
    assert "hooks and operators of the host" in known.text
    assert "aten::mm nn" in [text for text, _ in known.column("work", table=2)]
    unknown = page_of(of_step(step_of("mylib::attention", "mylib::attention")))
    assert "stream by stream" not in unknown.text
    assert unknown.column("work", table=2) == [("mylib::attention", None)]
    assert unknown.column("times", table=2) == [("2", "2")]
    assert "Unknown: a step after the first is needed" in page_of(of_step(None)).text


def test_of_several_ranks_the_worst_is_shown_beside_a_table_of_all() -> None:
    low = rehearsal(rank=1, spans=(span(1, "load", 2, reserved=3), span(2, "backward", 3, reserved=4)))
    found = page_of(low, rehearsal())
    assert "Rank 0 decides: fits (rehearsed)" in found.text
    assert found.column("rank") == [("1", "1"), ("0", "0")]
    assert [number for _, number in found.column("reserved")] == [str(4 * GIB), str(30 * GIB)]


def test_what_does_not_fit_has_what_would_help() -> None:
    text = page_of(rehearsal(**OUT)).text
    assert "Does not fit (rehearsed): out of memory" in text
    assert "try: PYTORCH_ALLOC_CONF=expandable_segments:True" in text


def test_a_script_without_memory_history_and_one_that_never_used_the_gpu_have_pages() -> None:
    assert "Memory of rank 0" not in page_of(rehearsal(curve=None, lines_at_peak=None)).text
    changes: dict[str, Any] = {"spans": (), "num_steps": 0, "curve": (), "lines_at_peak": ()}
    failed = rehearsal(outcome=RehearsalOutcome.FAILED, failure=FAILURE, **changes)
    assert "Unknown whether it fits: the script failed" in page_of(failed).text


def test_nothing_of_a_script_is_more_than_text() -> None:
    found = page_of(hostile())
    assert (found.count("script"), found.count("img"), found.count("style")) == (1, 0, 1)
    for name in (SCRIPT, IMAGE, STYLE):
        assert name in found.text
    assert "may follow from it: not to be trusted" in found.text


def test_combinations_are_a_table_above_the_best_one() -> None:
    def answered(batch: str, found: Rehearsal | None, reason: str | None = None) -> Answered:
        variant = Variant({"batch": batch}, ("torchrun", "train.py", batch), "torchrun train.py {batch}", None)
        return Answered(variant, () if found is None else (found,), reason)

    tokens = replaced(of_step(step_of()), tokens_per_step=10**6)
    answers = [answered("1", of_step(step_of())), answered("2", tokens), answered("9", None, f"no such file {SCRIPT}")]
    page = parsed(each_page(answers))
    assert "Fastest that fits: batch 2" in page.text
    assert [text for text, _ in page.column("batch")] == ["2", "1", "9"]
    assert "torchrun train.py 2" in page.text
    assert f"no such file {SCRIPT}" in page.text
    assert "The best: batch 2" in page.text
