"""Two rehearsals compared: lines that moved or were edited are the same lines; bytes and seconds add up."""

import json
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench import Rehearsal, SpecError, compare, estimate
from fsdp_bench.plan.compare.lines import matched
from fsdp_bench.plan.compare.scripts import Gate, ScriptComparison, Status, limit_bytes, read_script
from fsdp_bench.plan.rehearsal_document import RehearsalDocument, rehearsal_document
from fsdp_bench.report.text.compare_scripts import answer, comparison_text, gate_line
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import ExitCode
from fsdp_bench.spec.subprocesses.rehearsal import HeldLine, RehearsalOutcome, SourceLine
from fsdp_bench.spec.units import GIB, MIB
from tests.conftest import json_of, run_command
from tests.report.test_rehearsal_text import FAILURE, OUT, of_step, rehearsal, retried, span, step_of


def line(number: int, text: str = "", function: str = "forward", file: str = "model.py") -> SourceLine:
    return SourceLine(file, number, function, text)


def held(one: SourceLine | None, num_bytes: int, own: SourceLine | None = None) -> HeldLine:
    return HeldLine(line=one, user_line=own or one, num_bytes=num_bytes, num_tensors=1)


def script(*lines: HeldLine, gib: float = 22.0, reserved: float = 30.0, **changes: Any) -> Rehearsal:
    """Return a rehearsal with a peak in the second step that these lines hold."""
    spans = (span(1, "forward", 9, reserved), span(2, "backward", gib, reserved))
    return rehearsal(**{"spans": spans, "lines_at_peak": lines, **changes})


def found_in(folder: str, *lines: HeldLine, **changes: Any) -> RehearsalDocument:
    return replace(rehearsal_document(script(*lines, **changes)), folder=folder)


def compared(a: Any, b: Any) -> ScriptComparison:
    found = compare(a, b)
    assert isinstance(found, ScriptComparison)
    return found


UP, DOWN = "h = self.up(x)", "return self.down(h)"


@pytest.mark.parametrize(
    ("old", "new", "pairs"),
    [
        ([line(10, UP), line(12, DOWN)], [line(13, UP), line(15, DOWN)], [(10, 13), (12, 15)]),
        ([line(10, UP), line(12, UP)], [line(11, UP), line(13, UP), line(15, UP)], [(10, 11), (12, 13)]),
        ([line(10, UP), line(12, DOWN)], [line(10, DOWN), line(12, UP)], [(10, 12), (12, 10)]),
        ([line(10, UP), line(20, UP, "f")], [line(5, UP, "f"), line(30, UP)], [(10, 30), (20, 5)]),
        ([line(10, UP)], [line(10, "h = self.up(x.float())")], [(10, 10)]),
        ([line(10, UP)], [line(10, "del optimizer.state")], []),
        ([line(10, UP)], [line(40, UP, function="_run")], [(10, 40)]),
        ([line(10, UP)], [line(40, UP, file="layers.py")], [(10, 40)]),
        ([line(10, UP)], [line(40, UP, function="_run", file="layers.py")], []),
        ([line(10), line(12)], [line(13), line(15)], [(10, 13), (12, 15)]),
        ([line(10)], [line(13, UP)], [(10, 13)]),
    ],
    ids=[
        *("moved", "repeated", "exchanged", "functions exchanged", "edited", "another", "renamed", "in another file"),
        *("neither", "no text", "text of one"),
    ],
)
def test_lines_are_the_same_whose_text_is_whatever_was_inserted_above(
    old: list[SourceLine], new: list[SourceLine], pairs: list[tuple[int, int]]
) -> None:
    assert sorted((a.line, b.line) for a, b in matched(old, new).items()) == pairs


def test_the_answer_names_the_line_that_grew_and_all_bytes_add_up() -> None:
    """By hand: 22 to 24 GiB; model.py:61 has 1.5 GiB more, autograd 0.25, and 0.25 are held by no line."""
    a = script(held(line(58, UP), 3 * GIB), held(line(59, DOWN), GIB), held(None, 2 * GIB))
    b = script(
        *(held(line(61, UP), 9 * GIB // 2), held(line(62, DOWN), GIB), held(None, 9 * GIB // 4)), gib=24, reserved=33
    )
    found, back = compared(a, b), compared(b, a)
    assert answer(found) == (
        "peak +2.0 GiB allocated, +3.0 GiB reserved: model.py:61 +1.5 GiB, backward, by autograd +256.0 MiB (B less A)"
    )
    assert [(one.name, one.difference) for one in found.lines if one.difference] == [
        ("model.py:61", 1.5 * GIB),
        ("backward, by autograd", GIB / 4),
    ]
    assert found.rest_bytes == GIB / 4
    assert [one.before and one.before.line for one in found.lines] == [58, None, 59]
    assert [one.difference for one in back.lines] == [-one.difference for one in found.lines]
    assert f"model.py:61            3.0 GiB  4.5 GiB    +1.5 GiB  {UP}\n" in comparison_text(found)


def test_an_edited_line_has_its_text_and_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    found = compared(script(held(line(5, UP), GIB)), script(held(line(5, "h = self.up(x.float())"), 2 * GIB), gib=23))
    assert "h = self.up(x.float()) (was h = self.up(x))" in comparison_text(found)


def test_a_line_of_a_library_is_named_with_the_line_that_calls_it() -> None:
    """One line of a library that two lines of the script call counts once for each."""
    inner = line(310, "x * y", file="/env/lib/python3.11/site-packages/transformers/llama.py")
    first, second = line(4, "model(a)", "<module>", "train.py"), line(9, "model(b)", "<module>", "train.py")
    a = script(held(inner, GIB, first), held(inner, GIB, second))
    elsewhere = replace(inner, file="/other/lib/python3.12/site-packages/transformers/llama.py")
    found = compared(a, script(held(elsewhere, 3 * GIB, first), held(elsewhere, GIB, second), gib=24))
    assert [(one.name, one.difference) for one in found.lines] == [
        ("transformers/llama.py:310, called from train.py:4", 2 * GIB),
        ("transformers/llama.py:310, called from train.py:9", 0),
    ]


def test_another_checkout_has_the_same_files() -> None:
    a = found_in("/home/me/project", held(line(5, UP, file="/home/me/project/src/model.py"), GIB))
    b = found_in("/runner/work/project", held(line(5, UP, file="/runner/work/project/src/model.py"), GIB))
    assert compared(a, b).is_equal
    assert answer(compared(a, b)) == "nothing differs between A and B (rehearsed)"
    beside = found_in("/home/me/jobs", held(line(5, UP, file="/home/me/project/src/model.py"), GIB))
    assert [one.name for one in compared(beside, beside).lines] == ["../project/src/model.py:5"]


def test_milliseconds_differ_by_operator() -> None:
    """Reading and writing 512 MiB each, at most at the 3.35 TB/s of an H100's datasheet."""
    more = step_of()
    large = (more.tensor(2**28),)
    more.operator("aten::add", large, self=large)
    a, b = of_step(step_of()), of_step(more)
    found = compared(a, b)
    assert found.step is not None
    added = found.parts[0]
    assert (added.name, added.a) == ("aten::add", 0)
    assert 2**30 / 3.35e12 < added.b < 2 * 2**30 / 3.35e12
    assert "; a step +" in answer(found)
    assert ": aten::add +" in answer(found)
    assert answer(compared(rehearsal(), b)).endswith("; times are unknown of A")


def test_conditions_that_differ_are_listed() -> None:
    found = compared(script(), script(torch="2.14.0", allocator_settings="expandable_segments:True"))
    assert [(one.name, one.b) for one in found.fields] == [
        ("torch", "2.14.0"),
        ("allocator_settings", "expandable_segments:True"),
    ]


def test_peaks_of_different_phases_are_said_to_be() -> None:
    a = script(held(line(5, UP), GIB))
    b = script(held(line(5, UP), 2 * GIB), spans=(span(1, "load", 9), span(2, "optimizer", 23)))
    assert "the peak moves from backward to optimizer, where other" in comparison_text(compared(a, b))


def test_lines_that_are_unknown_are_said_to_be() -> None:
    found = compared(script(lines_at_peak=None), script(held(line(5), GIB), gib=23))
    assert found.lines == ()
    assert "lines that hold memory: unknown of A or B" in comparison_text(found)


def test_a_script_is_compared_with_a_script_alone() -> None:
    with pytest.raises(SpecError, match="B: is no rehearsal of a script, and the other one is"):
        compare(rehearsal(), estimate("gpt2", server="p5.48xlarge"))


# -- files and the command line -------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder: ``a.json``; ``b.json``, which needs 2 GiB more; ``ranks.json`` with both."""
    a = rehearsal_document(script(held(line(58, UP), 3 * GIB)))
    b = rehearsal_document(script(held(line(61, UP), 5 * GIB), gib=24, reserved=32))
    each = {"source": "rehearsed", "best": 0, "rehearsals": [{"ranks": [a, b]}, {"ranks": []}, {"ranks": [a]}]}
    for name, document in {"a": a, "b": b, "ranks": {"ranks": [a, b]}, "each": each}.items():
        (tmp_path / f"{name}.json").write_bytes(to_json(document))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_are_compared_also_one_of_several_ranks_or_commands(files: Path) -> None:
    found = json_of("compare", "a.json", "b.json")
    assert found["answer"] == "peak +2.0 GiB allocated, +2.0 GiB reserved: model.py:61 +2.0 GiB (B less A)"
    (one,) = found["memory"]["lines"]
    assert (one["name"], one["difference_bytes"], one["text"]) == ("model.py:61", 2 * GIB, UP)
    assert one["before"]["line"] == 58
    assert found["memory"]["rest_bytes"] == 0
    assert json_of("compare", "ranks.json#1", "ranks.json#2")["answer"] == found["answer"]
    assert json_of("compare", "each.json#3", "each.json#2")["answer"] == found["answer"]


@pytest.mark.parametrize(
    ("limit", "code", "line"),
    [
        ((), 3, "peak +2.0 GiB allocated, +2.0 GiB reserved, model.py:61 +2.0 GiB; limit 1%"),
        (("--limit", "2GiB"), 0, "peak +2.0 GiB allocated; limit 2GiB"),
        (("--limit", "9%"), 3, "peak +2.0 GiB allocated, model.py:61 +2.0 GiB; limit 9%"),
        (("--limit", "10%"), 0, "peak +2.0 GiB allocated; limit 10%"),
        (("--limit", "0"), 3, "peak +2.0 GiB allocated, +2.0 GiB reserved, model.py:61 +2.0 GiB; limit 0"),
    ],
)
def test_a_baseline_is_a_gate_of_one_line(files: Path, limit: tuple[str, ...], code: int, line: str) -> None:
    """9 % of 22 GiB are 1.98 GiB, 9 % of 30 GiB reserved are 2.7."""
    done = run_command("compare", "--baseline", "a.json", *limit, "b.json")
    assert (done.returncode, done.stdout) == (code, f"{line}\n")
    found = json.loads(run_command("compare", "--baseline", "a.json", *limit, "b.json", "--json").stdout)
    assert (found["line"], found["status"]) == (line, "grew" if code else "passes")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ranks.json a.json", "ranks.json: holds 2 rehearsals; name one: ranks.json#1 to ranks.json#2"),
        ("a.json#2 a.json", "a.json: holds 1 rehearsals; name one: a.json#1 to a.json#1"),
        ("a.json#x a.json", "a.json: holds 1 rehearsals"),
        ("a.json --baseline b.json a.json", "it takes two, A and B, not these (files: 3, rehearsals of commands: 0)"),
        ("--baseline a.json", "it takes two, A and B, not these (files: 1, rehearsals of commands: 0)"),
        ("--baseline a.json b.json --limit 5x", "limit: '5x' has no unit of bytes"),
        ("--baseline a.json b.json --limit -2%", "limit: '-2%' is not allowed; a percentage as 2%"),
        ("--baseline a.json b.json --time", "'--time' goes with a command, which follows --"),
        ("--baseline nothing.json b.json", "nothing.json: cannot be read"),
        ("a.json b.json --limit 2%", "--limit: it counts for --baseline, which is not given"),
        ("a.json --stepz 3 -- python x.py", "No such option '--stepz'"),
        ("a.json --html x.html -- python x.py", "--html is for rehearse alone; leave it out"),
        ("a.json -- python no_such_script.py", "the script 'no_such_script.py' is not in"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(files: Path, words: str, said: str) -> None:
    done = run_command("compare", *words.split())
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


# -- the gate -------------------------------------------------------------------------------------

UNKNOWN: dict[str, Any] = {"num_steps": 0}
IN_AUTOGRAD: dict[str, Any] = {"gib": 25, "lines_at_peak": (held(None, 2 * GIB), held(line(61, UP), GIB))}
CRASHED: dict[str, Any] = {"outcome": RehearsalOutcome.FAILED, "failure": replace(FAILURE, type="KeyError")}


@pytest.mark.parametrize(
    ("before", "now", "status", "said"),
    [
        (None, {}, Status.NEW, "no baseline"),
        ({}, {}, Status.PASSES, "peak allocated as before; limit 1%"),
        ({}, {"gib": 22.1}, Status.PASSES, "peak +102.4 MiB allocated; limit 1%"),
        ({}, {"gib": 23}, Status.GREW, "peak +1.0 GiB allocated"),
        ({}, {"reserved": 31}, Status.GREW, "peak +1.0 GiB reserved"),
        ({}, IN_AUTOGRAD, Status.GREW, "backward, by autograd +2.0 GiB, model.py:61 +1.0 GiB; limit 1%"),
        ({}, {"gib": 20}, Status.PASSES, "peak -2.0 GiB allocated"),
        ({}, OUT, Status.DOES_NOT_FIT, "does not fit: out of memory in backward of step 2 at train.py:17"),
        (None, OUT, Status.DOES_NOT_FIT, "does not fit: out of memory"),
        (OUT, OUT, Status.PASSES, "so does the baseline"),
        (OUT, {"gib": 23}, Status.PASSES, "peak +1.0 GiB allocated"),
        ({}, retried(3), Status.DOES_NOT_FIT, "runs with 3 allocation retries"),
        ({}, UNKNOWN, Status.UNKNOWN, "may fit or not: it never made an optimizer step"),
        (UNKNOWN, UNKNOWN, Status.PASSES, "peak allocated as before"),
        ({}, CRASHED, Status.CRASHED, "failed with KeyError at train.py:17: CUDA out of memory."),
        (CRASHED, CRASHED, Status.CRASHED, "failed with KeyError"),
    ],
)
def test_a_gate_fails_a_script_that_is_worse_than_its_baseline(
    before: dict[str, Any] | None, now: dict[str, Any], status: Status, said: str
) -> None:
    baseline = None if before is None else read_script(script(**before), "the baseline")
    gate = Gate(read_script(script(**now), "now"), baseline)
    assert gate.status is status
    assert gate_line(gate).startswith(said) or said in gate_line(gate)
    passes = status in (Status.NEW, Status.PASSES)
    assert gate.status.exit_code == (ExitCode.DONE if passes else 1 if status is Status.CRASHED else 3)


def test_a_limit_of_the_users_own_that_is_exceeded_is_said() -> None:
    limited = replaced(script(), max_gpu_bytes=20 * GIB)
    gate = Gate(read_script(limited, "now"), None)
    assert gate_line(gate) == "does not fit: 30.0 GiB reserved are more than --max-gpu-memory"


def test_a_limit_is_a_fraction_of_the_baseline_or_a_size() -> None:
    assert limit_bytes("2%", 50 * GIB) == GIB
    assert limit_bytes("500MiB", 50 * GIB) == 500 * MIB
