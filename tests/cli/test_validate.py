"""``fsdp-bench validate`` and ``report`` as processes: options that would be ignored are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import refused, run_command

RESULTS = Path(__file__).parents[2] / "results" / "xeon-2-cores"
CALIBRATION = RESULTS / "calibration.toml"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("published", "--cells", 3), "--cells means nothing with --against published; it goes with --against dry-run"),
        (("published", "--seed", 3), "--seed means nothing"),
        (("published", "--kernels", "cuda"), "--kernels means nothing"),
        (("dry-run", "--calibration", CALIBRATION), "--calibration means nothing with --against dry-run"),
        (("dry-run", "--page", "p.md"), "--page means nothing with --against dry-run; it goes with --against RESULTS"),
        (("rehearsal", "--real-tensors"), "--real-tensors means nothing with --against rehearsal; it goes with"),
        (
            ("dry-run", "--code", "torchtitan", "--kernels", "cpu"),
            "--kernels: is for benchmark models; --code torchtitan",
        ),
        (("dry-run", "--code", "huggingface", "--real-tensors"), "--real-tensors: is for benchmark models"),
        (("dry-run", "--model-type", "llama"), "--model-type goes with --code huggingface or torchtitan"),
        (("rehearsal", "--model-type", "llama"), "--model-type goes with --code huggingface"),
        (("rehearsal", "--code", "torchtitan"), "'torchtitan' is not allowed with --against rehearsal"),
        (("published", "--code", "huggingface"), "--code means nothing with --against published"),
        (("rehersal",), "--against: 'rehersal' is no folder of results (did you mean 'rehearsal'?)"),
        ((RESULTS, "--cells", 3), "--cells means nothing"),
        ((RESULTS, "--seed", 1), "--seed means nothing"),
        ((RESULTS, "--page", "x.html"), "a file that ends in .md"),
        (
            ("dry-run", "--rehearsed", RESULTS),
            "--rehearsed means nothing with --against dry-run; it goes with --against published",
        ),
        (("published", "--rehearsed", RESULTS), "has no records of rehearsals"),
        (("dryrun",), "--against: 'dryrun' is no folder of results (did you mean 'dry-run'?)"),
        (("dry-run", "--cells", "x"), "cells: 'x' is not allowed; a whole number, 1 or more"),
    ],
)
def test_an_option_without_effect_is_refused_in_one_line(words: tuple[object, ...], part: str) -> None:
    assert part in refused("validate", "--against", *words)


def test_report_shows_matrix_rates_or_communication() -> None:
    done = run_command("report", RESULTS / "cpu", "--communication", "--calibration", CALIBRATION)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--calibration is about matrix products" in done.stderr


def test_rehearsals_of_published_runs_are_compared_and_nothing_is_predicted() -> None:
    folder = RESULTS.parent / "rehearsed" / "published" / "records"
    text = run_command("validate", "--against", "published", "--rehearsed", folder).stdout
    assert "peaks of memory that people published, and their code rehearsed: 17 runs" in text
    document = json.loads(run_command("validate", "--against", "published", "--rehearsed", folder, "--json").stdout)
    assert len(document["peaks"]) == sum(part["num_peaks"] for part in document["summary"].values()) == 33


def test_the_help_tells_the_defaults() -> None:
    text = " ".join(run_command("validate", "--help").stdout.split())
    for default in ("[default: 200", "[default: 1]", "[default: cpu]"):
        assert default in text


def test_without_a_calibration_the_line_on_time_says_what_to_give() -> None:
    done = run_command("validate", "--against", RESULTS / "cpu")
    assert "time is not compared: no datasheet has a CPU's rates; give --calibration FILE" in done.stdout
