"""Variants of a command are rehearsed several at once, resumed after an interrupt, and crash one by one."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from msgspec.structs import replace

from fsdp_bench.plan.script import rehearsals as module
from fsdp_bench.plan.script.each import answer_each, answered_row, each_document, in_order
from fsdp_bench.plan.script.kept import KeptReports
from fsdp_bench.plan.script.rehearsals import Answered, Rehearsals
from fsdp_bench.plan.script.variants import Variant, read_combinations
from fsdp_bench.rehearse.run import RehearsalError
from fsdp_bench.report.text.each import each_text
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOutcome, RehearsalReport
from fsdp_bench.spec.units import GIB
from tests.report.test_rehearsal_text import FAILURE, OUT, REPORT, span

Script = Callable[[list[str], int], RehearsalReport]


class FakeRehearsal:
    """Takes the place of RunningRehearsal: a script that ends when the test says so."""

    started: list[list[str]] = []
    most_at_once = 0
    running = 0
    script: Script

    def __init__(self, command: Any, gpu: Any, rank: int, options: Any, output: int, prepared: Any) -> None:
        self._words, self._rank, self._output = list(command.launcher_words), rank, output
        self._file = os.open(os.devnull, os.O_RDONLY)
        FakeRehearsal.started.append(self._words)
        FakeRehearsal.running += 1
        FakeRehearsal.most_at_once = max(FakeRehearsal.most_at_once, FakeRehearsal.running)

    def fileno(self) -> int:
        return self._file

    def report(self) -> RehearsalReport:
        os.write(self._output, b"what it printed\nthe last line\n")
        return FakeRehearsal.script(self._words, self._rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        FakeRehearsal.running -= 1
        os.close(self._file)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(module, "RunningRehearsal", FakeRehearsal)
    FakeRehearsal.started, FakeRehearsal.most_at_once, FakeRehearsal.running = [], 0, 0
    yield
    assert FakeRehearsal.running == 0, "a rehearsal was left running"


def variants(
    each: dict[str, list[object]] | None = None, line: str = "python train.py {batch}", **options: Any
) -> list[Variant]:
    return read_combinations(
        line, each or {"batch": [1, 2, 4, 8]}, **{"gpu": "H100-SXM", "world_size": 8, **options}
    ).variants()


def report_of(batch: int) -> RehearsalReport:
    spans = (span(1, "backward", batch, 3.0 * batch), span(2, "backward", 2.0 * batch, 3.0 * batch))
    return replace(REPORT, spans=spans, user_files=("train.py", "log.txt"))  # which only the script's overlay has


def by_batch(words: list[str], _rank: int) -> RehearsalReport:
    return report_of(int(words[-1]))


def test_every_combination_is_a_row_in_order() -> None:
    FakeRehearsal.script = staticmethod(by_batch)  # type: ignore[assignment]
    asked = variants({"batch": [2, 4], "ckpt": ["off", "on"]}, "python train.py {ckpt:--gc|} {batch}")
    rows = [answered_row(one) for one in answer_each(asked)]
    assert [(row["batch"], row["ckpt"], row["peak_allocated_bytes"] // GIB) for row in rows] == [
        ("2", "off", 4), ("2", "on", 4), ("4", "off", 8), ("4", "on", 8),
    ]  # fmt: skip
    assert rows[1]["command"] == "python train.py --gc 2"
    assert FakeRehearsal.started[1] == ["train.py", "--gc", "2"]


def test_what_fits_comes_first_and_a_crash_is_a_row_with_its_reason() -> None:
    def script(words: list[str], _rank: int) -> RehearsalReport:
        batch = int(words[-1])
        if batch == 2:
            raise RehearsalError("the script's process ended with code 1 and left no report")
        return replace(REPORT, **OUT) if batch == 1 else report_of(batch)

    FakeRehearsal.script = staticmethod(script)  # type: ignore[assignment]
    answers = answer_each(variants())
    assert [one.variant.values["batch"] for one in in_order(answers)] == ["4", "8", "2", "1"]
    text = each_text(answers)
    assert text.startswith("2 of 4 combinations fit (rehearsed)")
    assert "ended with code 1 and left no report: the last line" in " ".join(text.split())
    assert each_document(answers)["best"] == 2


def test_a_script_that_refuses_its_arguments_says_what_it_printed() -> None:
    ended = replace(FAILURE, type="SystemExit", message="2")
    failed = replace(REPORT, outcome=RehearsalOutcome.FAILED, failure=ended, spans=())
    FakeRehearsal.script = staticmethod(lambda _words, _rank: failed)  # type: ignore[assignment]
    text = " ".join(each_text(answer_each(variants())).split())
    assert "failed with SystemExit at train.py:17 (transformers/loss.py:42): the last line" in text
    assert " 0 B" not in text  # its memory is unknown


def test_an_unknown_speed_is_a_fact_with_its_reason() -> None:
    FakeRehearsal.script = staticmethod(by_batch)  # type: ignore[assignment]
    text = each_text(answer_each(variants(time=True)))
    assert text.count("tokens/s          unknown: ") == 1
    assert "tokens/s          unknown" not in each_text(answer_each(variants()))


def test_several_run_at_once_only_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRehearsal.script = staticmethod(by_batch)  # type: ignore[assignment]
    free = REPORT.peak_host_bytes

    class Memory:
        available = free

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)
    with Rehearsals(KeptReports("a"), at_once=2) as rehearsals:
        rehearsals.answer(variants())
    assert FakeRehearsal.most_at_once == 1
    Memory.available = 2 * free
    with Rehearsals(KeptReports("a"), at_once=2) as rehearsals:
        rehearsals.answer(variants())
    assert FakeRehearsal.most_at_once == 2
    monkeypatch.setattr(module, "cgroup_limit_bytes", lambda: 2 * free)  # a container's, of a larger machine
    FakeRehearsal.most_at_once = 0
    with Rehearsals(KeptReports("a"), at_once=2) as rehearsals:
        rehearsals.answer(variants())
    assert FakeRehearsal.most_at_once == 1


@pytest.mark.parametrize("interrupted_at", range(4))
def test_an_interrupted_question_goes_on_where_it_ended(interrupted_at: int) -> None:
    def interrupted(words: list[str], _rank: int) -> RehearsalReport:
        if len(FakeRehearsal.started) > interrupted_at:
            return replace(REPORT, outcome=RehearsalOutcome.INTERRUPTED)
        return by_batch(words, 0)

    FakeRehearsal.script = staticmethod(interrupted)  # type: ignore[assignment]
    found: list[Answered] = []
    with pytest.raises(KeyboardInterrupt), Rehearsals(KeptReports("q"), at_once=1) as rehearsals:
        rehearsals.answer(variants(), found.append)
    assert len(found) == interrupted_at
    FakeRehearsal.started, FakeRehearsal.script = [], staticmethod(by_batch)  # type: ignore[assignment]
    with Rehearsals(KeptReports("q")) as rehearsals:
        answers = rehearsals.answer(variants())
    assert [words[-1] for words in FakeRehearsal.started] == ["1", "2", "4", "8"][interrupted_at:]
    assert [one.worst.report.peak_reserved_bytes // GIB for one in answers if one.worst] == [3, 6, 12, 24]
    FakeRehearsal.started = []
    with Rehearsals(KeptReports("q")) as rehearsals:  # answered: the same question is asked anew
        rehearsals.answer(variants())
    assert len(FakeRehearsal.started) == 4


@pytest.mark.parametrize("change", ["script", "argument", "environment", "hardware"])
def test_a_kept_report_does_not_count_where_something_changed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [variant] = variants({"batch": [1]})
    assert variant.asked is not None
    KeptReports("q").keep(variant.asked, 0, report_of(1), began=time.time())
    assert KeptReports("q").find(variant.asked, 0) == report_of(1)
    if change == "script":
        Path("train.py").write_text("changed")
    if change == "environment":
        monkeypatch.setenv("SOMETHING", "else")
    options = {"gpu_memory": "40GiB"} if change == "hardware" else {}
    [variant] = variants({"batch": [2 if change == "argument" else 1]}, **options)
    assert variant.asked is not None
    assert KeptReports("q").find(variant.asked, 0) is None


def test_a_report_is_not_kept_if_the_script_was_changed_while_it_ran() -> None:
    [variant] = variants({"batch": [1]})
    assert variant.asked is not None
    KeptReports("q").keep(variant.asked, 0, report_of(1), began=Path("train.py").stat().st_mtime - 1)
    assert KeptReports("q").find(variant.asked, 0) is None


def test_several_rehearsals_do_not_write_one_snapshot(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="snapshot: it is one file"):
        answer_each(variants(snapshot=tmp_path / "one.pickle"))
    assert FakeRehearsal.started == []


def test_lists_of_hardware_and_strategies_are_combined() -> None:
    hardware = {"server": "p4d.24xlarge,p5.48xlarge", "nodes": "1,2"}
    asked = read_combinations("accelerate launch train.py {nodes}", strategy="all", **hardware)
    assert {name: len(chosen) for name, chosen in asked.values.items()} == {"server": 2, "nodes": 2, "strategy": 5}


def test_one_number_of_nodes_stands_in_the_command_too() -> None:
    asked = read_combinations("python train.py --nnodes={nodes}", nodes=4, server="p5.48xlarge")
    assert asked.variants()[0].command == ("python", "train.py", "--nnodes=4")


def test_a_combination_that_the_hardware_has_not_is_a_row_with_its_reason() -> None:
    FakeRehearsal.script = staticmethod(by_batch)  # type: ignore[assignment]
    asked = variants({"batch": [1]}, world_size=None, gpu=None, server="p5.48xlarge", gpus_per_node="8,9")
    answers = answer_each(asked)
    assert [one.fits for one in answers] == [True, None]
    assert answers[1].reason is not None
    assert "9" in answers[1].reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"each": ["batch=1", "other=2"]}, r"each: \{other\} is nowhere in the command"),
        ({"each": ["batch=1", "batch=2"]}, "a placeholder is given twice"),
        ({"each": ["nodes=1,2"]}, "each: nodes is an option: --nodes 1,2"),
        ({"each": ["batch=1"], "env": ["A"]}, "env: 'A' is not allowed; NAME=VALUE"),
        ({"each": ["batch=1"], "nodes": "0"}, "nodes: '0' is not allowed; whole numbers, 1 or more"),
        ({"each": ["batch=1"], "strategy": "zero9"}, "strategy: 'zero9' is not allowed"),
        ({"each": ["batch=1"], "strategy": "all"}, "strategy: only accelerate launch has a switch"),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        read_combinations("python train.py {batch}", **given, gpu="H100-SXM").variants()
