"""The largest value with which a script fits: its answer, its rows, the frontier, interrupts, and what is refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.plan.script import rehearsals as module
from fsdp_bench.plan.script.largest import LargestValue, largest_value, read_search
from fsdp_bench.plan.script.quantity import read_quantity
from fsdp_bench.plan.script.rehearsals import Answered
from fsdp_bench.report.charts.rehearsal import largest_slide
from fsdp_bench.report.charts.slide import draw
from fsdp_bench.report.text.each import largest_text
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOutcome, RehearsalReport
from tests.conftest import run_command
from tests.plan.script.test_rehearsals import FakeRehearsal
from tests.report.test_rehearsal_text import FAILURE, OUT, REPORT, span

LINE = "python train.py {batch}"
Script = Callable[[list[str]], RehearsalReport]
OPTIONS: dict[str, Any] = {"gpu": "H100-SXM", "world_size": 8, "headroom": "1GiB"}


def that_fits(gib: float) -> RehearsalReport:
    """Return the report of a script that reserves so much, if it fits."""
    return replace(REPORT, spans=(span(1, "backward", gib, gib), span(2, "backward", gib, gib)), user_files=())


def line(words: list[str]) -> RehearsalReport:
    """Five GiB, and three for each of the batch: 24 fit the 79.2 GiB of an H100 less 1."""
    gib = 5 + 3 * int(words[1])
    return that_fits(gib) if gib <= 78 else replace(REPORT, **OUT)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(module, "RunningRehearsal", FakeRehearsal)
    run(line)
    yield
    assert FakeRehearsal.running == 0, "a rehearsal was left running"


def run(script: Script) -> None:
    FakeRehearsal.started = []
    FakeRehearsal.script = staticmethod(lambda words, _rank: script(words))  # type: ignore[assignment]


def found_by(script: Script, of: str = "batch", command: str = LINE, **options: Any) -> LargestValue:
    run(script)
    (one,) = largest_value(command, of, **{**OPTIONS, **options})
    return one


def text_of(*found: LargestValue) -> str:
    return " ".join(largest_text(found).split())


def test_the_answer_says_what_fits_and_what_the_next_one_is_short_of() -> None:
    one = found_by(line)
    assert (one.largest, one.next, one.fits, one.is_found) == (24, 25, True, True)
    assert len(one.tried) <= 6
    assert text_of(one).startswith(
        "largest batch that fits (rehearsed): 24 (77.0 GiB reserved of 78.2 GiB); 25 does not: out of memory, in"
        " backward of step 2, at train.py:17 (transformers/loss.py:42)"
    )
    assert FAILURE.message in text_of(one)
    row = one.row()
    assert row["batch"] == 24
    assert row["next"] == 25
    assert row["next_verdict"] == "does_not_fit"
    assert row["peak_reserved_bytes"] == 77 * 2**30
    draw(largest_slide([one]), Path("chart.png"))


def test_a_value_that_runs_with_retries_does_not_fit() -> None:
    def script(words: list[str]) -> RehearsalReport:
        found = line(words)
        retried = (span(1, "backward", 70, 70, retries=3), span(2, "backward", 70, 70, retries=5))
        return found if int(words[1]) <= 20 else replace(REPORT, spans=retried, user_files=())

    one = found_by(script)
    assert (one.largest, one.next) == (20, 21)
    assert "21 does not: it runs with 5 allocation retries, 2 of them in the last step" in text_of(one)


def test_a_value_that_the_script_refuses_is_on_neither_side() -> None:
    def script(words: list[str]) -> RehearsalReport:
        failed = replace(REPORT, outcome=RehearsalOutcome.FAILED, failure=replace(FAILURE, type="ValueError"))
        return failed if int(words[1]) % 2 else line(words)

    one = found_by(script, of="batch=2..64")
    assert (one.largest, one.next) == (24, 26)
    assert 25 in one.refused
    assert "3, 25, 27: the script failed with ValueError at train.py:17" in text_of(one)
    assert "they count for neither side" in text_of(one)
    unknown = found_by(lambda words: script([words[0], "1"]))
    assert (unknown.fits, unknown.largest, list(unknown.tried)) == (None, None, [1, 2])
    assert text_of(unknown).startswith("unknown whether any batch fits: see below")


def test_uneven_memory_is_said_where_it_is_seen() -> None:
    one = found_by(lambda words: replace(REPORT, **OUT) if words[1] == "2" else line(words), of="batch=1..64")
    assert (one.largest, one.next) == (1, 2)
    assert not one.is_uneven
    one = found_by(lambda words: replace(REPORT, **OUT) if words[1] == "1" else line(words), of="batch=1..64")
    assert (one.largest, one.next) == (24, 25)
    assert one.is_uneven
    assert "1 does not fit, though 24 does" in text_of(one)


def test_where_nothing_or_everything_fits_the_ends_are_said() -> None:
    nothing = found_by(lambda words: replace(REPORT, **OUT))
    assert (nothing.fits, nothing.largest, nothing.next, nothing.is_found) == (False, None, 1, True)
    assert text_of(nothing).startswith("no batch fits (rehearsed): 1 does not: out of memory")
    everything = found_by(line, of="batch=1..20")
    assert (everything.largest, everything.next, everything.is_found) == (20, None, True)
    assert "20 (65.0 GiB reserved of 78.2 GiB); the range ends there" in text_of(everything)


@pytest.mark.parametrize("fewest", [1, 2, 3, 7, 40])
def test_the_fewest_nodes_are_searched_from_one_on(fewest: int) -> None:
    def script(words: list[str]) -> RehearsalReport:
        gib = 70 * fewest / int(words[1])
        return that_fits(gib) if gib <= 70 else replace(REPORT, **OUT)

    one = found_by(script, "nodes", "python train.py {nodes}", gpu=None, world_size=None, server="p5.48xlarge")
    assert (one.largest, one.next) == (fewest, fewest - 1 or None)
    verb = "do" if fewest > 2 else "does"
    assert text_of(one).startswith(f"fewest nodes that fit (rehearsed): {fewest} (70.0 GiB")
    assert fewest == 1 or f"{fewest - 1} {verb} not: out of memory" in text_of(one)


def test_a_frontier_has_the_largest_sequence_of_every_batch_that_has_one() -> None:
    """Of 16,384 batches each is twice the last; a neighbour's border is where the next search begins."""

    def script(words: list[str]) -> RehearsalReport:
        gib = 10 + int(words[1]) * int(words[2]) / 512
        return that_fits(gib) if gib <= 70 else replace(REPORT, **OUT)

    run(script)
    found = largest_value("python train.py {batch} {seq}", ["batch", "seq"], **OPTIONS)
    tokens = 60 * 512
    expected = {batch: tokens // batch // 128 * 128 or None for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
    assert {int(one.values["batch"]): one.largest for one in found} == expected
    assert len(FakeRehearsal.started) <= 4 * len(found)
    assert text_of(*found).startswith("batch 1: largest seq that fits (rehearsed): 30720")
    draw(largest_slide(found), Path("chart.png"))


def test_each_combination_has_its_own_border() -> None:
    run(lambda words: line([words[0], str((1 + ("--gc" not in words)) * int(words[-1]))]))
    found = largest_value("python train.py {ckpt:--gc|} {batch}", "batch", {"ckpt": ["off", "on"]}, **OPTIONS)
    assert [(dict(one.values), one.largest, one.next) for one in found] == [
        ({"ckpt": "off"}, 12, 13),
        ({"ckpt": "on"}, 24, 25),
    ]
    assert text_of(*found).startswith("ckpt on: largest batch that fits (rehearsed): 24")


@pytest.mark.parametrize("interrupted_at", range(6))
def test_an_interrupted_search_goes_on_where_it_ended(interrupted_at: int) -> None:
    def script(words: list[str]) -> RehearsalReport:
        is_last = len(FakeRehearsal.started) > interrupted_at
        return replace(REPORT, outcome=RehearsalOutcome.INTERRUPTED) if is_last else line(words)

    run(line)
    largest_value(LINE, "batch", **OPTIONS)
    all_words = sorted(FakeRehearsal.started)
    run(script)
    search, seen = read_search(LINE, "batch", **OPTIONS), list[Answered]()
    with pytest.raises(KeyboardInterrupt):
        search.run(seen.append)
    first = [words for words in FakeRehearsal.started if any(one.variant.command[-1] == words[-1] for one in seen)]
    assert sum(len(one.tried) for one in search.found) == len(seen) == len(first)
    run(line)
    (one,) = largest_value(LINE, "batch", **OPTIONS)
    assert one.largest == 24
    assert sorted([*first, *FakeRehearsal.started]) == all_words


@pytest.mark.parametrize(
    ("of", "given", "said"),
    [
        ("batch", {"command": "python train.py {bs}"}, r"of: \{batch\} is nowhere in the command, --env or --edit"),
        ("experts", {}, "of: experts has no usual range; say it: --of experts=1..64"),
        ("bacth", {}, r"of: bacth has no usual range \(did you mean 'batch'\?\)"),
        ("batch=8", {}, "of: 'batch=8' is not allowed; NAME=FIRST..LAST"),
        ("batch=8..8", {}, "2 to 100,000 values"),
        ("batch=0..8", {}, "1 or more"),
        ("batch=1..999999", {}, "2 to 100,000 values"),
        ("batch=1..8", {"each": ["batch=1,2"]}, "of: batch is what is searched; leave out its --each"),
        ("nodes", {"nodes": "2"}, "of: nodes is what is searched; leave out its --nodes"),
        ("nodes", {"command": "python train.py"}, "nodes"),
        (["batch", "batch=1..4"], {}, "one quantity, or two that differ"),
        ("batch", {"gpu": "H1000"}, "H1000"),
    ],
)
def test_a_search_that_cannot_be_asked_is_one_line(of: Any, given: dict[str, Any], said: str) -> None:
    command = given.pop("command", LINE)
    with pytest.raises(SpecError, match=said):
        largest_value(command, of, **{**OPTIONS, **given})
    assert not FakeRehearsal.started


@pytest.mark.parametrize(
    ("text", "values", "is_fewest"),
    [
        ("seq=512..2048:512", [512, 1024, 1536, 2048], False),
        ("tp=8..2:2", [8, 6, 4, 2], True),
        ("nodes=1..4", [4, 3, 2, 1], True),
    ],
)
def test_values_stand_in_the_order_of_increasing_memory(text: str, values: list[int], is_fewest: bool) -> None:
    quantity = read_quantity(text)
    assert list(quantity.values) == values
    assert quantity.is_fewest == is_fewest
    assert quantity.sizes == sorted(quantity.sizes)


def failed(_words: list[str]) -> RehearsalReport:
    return replace(REPORT, outcome=RehearsalOutcome.FAILED, failure=FAILURE)


@pytest.mark.parametrize(
    ("script", "code"),
    [(line, 0), (lambda words: replace(REPORT, **OUT), 3), (failed, 1)],
    ids=["fits", "no", "failed"],
)
def test_max_size_of_a_command_ends_with_its_exit_code_and_prints_its_document(script: Script, code: int) -> None:
    run(script)
    words = ["max-size", "--of", "batch", "--gpu", "H100-SXM", "--world-size", "8", "--headroom", "1GiB"]
    done = run_command(*words, "--json", "--csv", "all.csv", "--", "python", "train.py", "{batch}")
    assert done.returncode == code, done.stderr
    document = json.loads(done.stdout)
    (one,) = document["searches"]
    assert document["of"] == ["batch"]
    assert one["largest"] == (24 if code == 0 else None)
    assert one["next"] == {0: 25, 3: 1, 1: None}[code]
    assert len(one["rehearsals"]) == len(FakeRehearsal.started) == len(Path("all.csv").read_text().splitlines()) - 1
    assert "1: batch 1: " in done.stderr


def test_max_size_without_a_command_is_about_models() -> None:
    assert "--of" in run_command("max-size", "--help").stdout
    shown = run_command("max-size", "--help", "--").stdout
    assert "{NAME}" in shown
    assert [line for line in shown.splitlines() if len(line) > 80] == []
