"""Sources of a report: sweeps, predictions, largest models. Others are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.report.html import write
from fsdp_bench.spec.calibration_profile import read_profile
from fsdp_bench.spec.errors import ResultsError, SpecError, UserError
from fsdp_bench.sweep.results.load import load_results
from tests.conftest import json_of, refused, run_command
from tests.report.html.samples import IMAGE, RESULTS, SCRIPT, STYLE, ParsedPage, hostile_sweep, plan_file


def page(source: Path, folder: Path) -> ParsedPage:
    write(source, folder / "report.html")
    return ParsedPage((folder / "report.html").read_text())


def asked(folder: Path, *words: object) -> tuple[Any, ParsedPage]:
    """Return what a command prints with --json, and its page."""
    file = folder / "answer.json"
    file.write_text(run_command(*words, "--json").stdout)
    return json.loads(file.read_text()), page(file, folder)


def test_a_sweep_has_the_numbers_of_its_records(tmp_path: Path) -> None:
    parsed, expected = page(RESULTS / "t5", tmp_path), load_results(RESULTS / "t5")
    for title, column in (
        ("peak allocated", "peak_allocated_bytes"),
        ("step", "step_seconds"),
        ("tokens/s per rank", "tokens_per_second_per_gpu"),
    ):
        shown = [float(number or "nan") for _, number in parsed.column(title)]
        assert shown == pytest.approx(list(expected[column]), rel=1e-12)
    assert {text.split()[1] for text, _ in parsed.column("step")} == {"ms"}
    assert "measured" in parsed.text
    assert expected["torch"][0] in parsed.text


def test_a_sweep_of_benchmark_models_has_its_predictions_beside_it(tmp_path: Path) -> None:
    write(RESULTS / "cpu", tmp_path / "cpu.html", read_profile(RESULTS / "calibration.toml"))
    text = ParsedPage((tmp_path / "cpu.html").read_text()).text
    assert "54 of 54" in text  # as results/xeon-2-cores/cpu/validation.md says
    assert "Blocks in the middle of backward (predicted)" in text
    assert "Step time, predicted and measured" in text


def test_a_frontier_has_both_values_of_every_cell(tmp_path: Path) -> None:
    cells = json.loads((RESULTS / "max-size-quick" / "frontier.json").read_text())["cells"]
    searched = [cell for cell in cells if cell["status"] != "skipped"]
    parsed = page(RESULTS / "max-size-quick", tmp_path)
    for source in ("measured", "predicted"):
        shown = [float(number or "nan") for _, number in parsed.column(source)]
        assert shown == [cell[source]["fits"] for cell in searched]


def test_a_folder_of_several_sweeps_names_each(tmp_path: Path) -> None:
    for name in ("t5", "emulation-check"):
        shutil.copytree(RESULTS / name, tmp_path / "both" / name)
    text = page(tmp_path / "both", tmp_path).text
    assert "2 sweeps" in text
    assert "t5: Trials" in text
    assert "emulation-check: Trials" in text


def test_names_in_records_are_text_and_a_broken_record_is_named(tmp_path: Path) -> None:
    home = hostile_sweep(tmp_path)
    broken = next((home / "trials").glob("*.json"))
    broken.write_text("{")
    parsed = page(home, tmp_path)
    assert (parsed.count("script"), parsed.count("img"), parsed.count("style")) == (1, 0, 1)
    for name in (SCRIPT, IMAGE, STYLE, broken.name):
        assert name in parsed.text
    assert len(parsed.column("strategy")) == 15  # the others are shown


def test_pages_of_predictions_and_of_the_largest_models_have_the_numbers_of_their_documents(tmp_path: Path) -> None:
    words = ["predict", "--params", "1B", "--server", "g5.48xlarge"]
    one, parsed = asked(tmp_path, *words)
    assert f"{one['memory']['needed_bytes'] / 2**30:.1f} GiB" in parsed.text
    several, parsed = asked(tmp_path, *words, "--strategy", "all")
    expected = [each["time"] and each["time"]["step_seconds"] for each in several["predictions"]]
    assert [float(number) if number else None for _, number in parsed.column("step")] == expected
    largest, parsed = asked(tmp_path, "max-size", *words[3:], "--strategy", "zero3,zero2")
    assert [float(number) for _, number in parsed.column("fits, predicted")] == [
        cell["fits_value"] for cell in largest["cells"]
    ]


def test_setups_of_several_models_are_told_apart_by_their_model(tmp_path: Path) -> None:
    words = ["--model", "Llama-3.1-8B,Llama-3.2-1B", "--server", "p4d.24xlarge", "--api", "fsdp2"]
    _, parsed = asked(tmp_path, "predict", *words)
    assert [text for text, _ in parsed.column("model")] == ["Llama-3.1-8B", "Llama-3.2-1B"]
    assert "Llama-3.1-8B and Llama-3.2-1B on 1 x p4d.24xlarge" in parsed.text
    assert "1 of 2 setups fits (predicted): FULL_SHARD, Llama-3.2-1B" in parsed.text


def test_every_option_of_several_values_is_a_column_of_its_page(tmp_path: Path) -> None:
    words = ("--params", "1B", "--server", "p4d.24xlarge,p5.48xlarge", "--nodes", "1,2", "--compile", "on,off")
    document, parsed = asked(tmp_path, "predict", *words)
    columns = [[text for text, _ in parsed.column(title)] for title in ("server", "nodes", "compile")]
    assert len(set(zip(*columns, strict=True))) == 8
    for server in (document["predictions"][at]["server"] for at in (0, -1)):
        assert f"{server['gpu_memory_bytes'] / 2**30:.1f} GiB on {server['gpu']}" in parsed.text


def test_the_code_of_a_model_is_named_where_it_differs(tmp_path: Path) -> None:
    words = ["predict", "--model", "Llama-3.2-1B", "--code", "benchmark,huggingface", "--gpu", "H100-SXM"]
    _, parsed = asked(tmp_path, *words)
    assert [text for text, _ in parsed.column("code")] == ["benchmark", "huggingface"]
    printed = run_command(*words).stdout
    assert "code huggingface" in printed.splitlines()[0] or "code benchmark" in printed.splitlines()[0]
    rows = run_command(*words, "--csv", "-").stdout.splitlines()
    place = rows[0].split(",").index("code")
    assert {row.split(",")[place] for row in rows[1:]} == {"benchmark", "huggingface"}


def test_settings_of_max_size_are_told_apart_on_their_page(tmp_path: Path) -> None:
    words = ["--gpu", "H100-SXM", "--world-size", "2,4", "--strategy", "zero3", "--seq", "2048,4096"]
    _, parsed = asked(tmp_path, "max-size", *words, "--checkpointing", "full")
    assert [text for text, _ in parsed.column("seq")] == ["2048", "4096"]
    assert "2 x H100-SXM: what fits" in parsed.text
    assert "4 x H100-SXM: what fits" in parsed.text
    assert "FULL_SHARD, seq 2048" in parsed.text


def test_the_fewest_gpus_are_those_of_any_setting_as_on_the_terminal(tmp_path: Path) -> None:
    words = ["--model", "Llama-3.2-1B", "--server", "g5.48xlarge", "--of", "gpus", "--strategy", "zero3"]
    document = json_of("max-size", *words, "--api", "fsdp1")
    document["on_fewest"] = json_of("predict", *words[:4], "--loss", "chunked")
    document["on_fewest"]["setup"]["world_size"] = 1
    (tmp_path / "fewest.json").write_text(json.dumps(document))
    text = page(tmp_path / "fewest.json", tmp_path).text
    assert "g5.48xlarge: fewest GPUs on which it fits (predicted): 1, FULL_SHARD" in text
    assert "loss chunked" in text
    assert "in the settings below" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is no answer"),
        ('{"a": 1}', "is no answer"),
        ('{"cells": [], "dial": 3, "winner": 1}', "is not what"),
        ('{"error": "no such model\\nx"}', "holds an error, not an answer"),
        ('{"winner": null, "pareto": []}', "is not what"),
        ('{"predictions": []}', "is no answer"),
        ('{"setup": 1, "memory": 1, "fits": 1}', "is not what"),
        ('{"a": ' + "9" * 5000 + "}", "too large"),
    ],
)
def test_a_foreign_file_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path, html = tmp_path / "other.json", tmp_path / "other.html"
    path.write_text(text)
    html.write_text("before")
    with pytest.raises(UserError, match=said) as caught:
        write(path, html)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value).splitlines()) == 1
    assert html.read_text() == "before"


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="is a folder"):
        write(tmp_path / "missing.json", tmp_path)
    with pytest.raises(ResultsError, match="is no folder"):
        write(tmp_path / "missing.json", tmp_path / "no" / "report.html")
    with pytest.raises(ResultsError, match="there is no such file or folder"):
        write(tmp_path / "missing.json", tmp_path / "report.html")
    with pytest.raises((ResultsError, SpecError), match="no results here"):
        write(tmp_path, tmp_path / "report.html")


def test_the_command_writes_the_file_and_prints_its_name(tmp_path: Path) -> None:
    html, plan = tmp_path / "plan.html", plan_file(tmp_path)
    assert "--html FILE.html" in refused("report", plan)
    done = run_command("report", plan, "--html", html)
    assert (done.returncode, done.stdout) == (0, f"{html}\n")
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []
