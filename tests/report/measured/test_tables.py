"""The table of measured trials: its contents, order, width and conclusion."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from fsdp_bench.report.measured.conclusion import conclusion
from fsdp_bench.report.measured.tables import print_table
from fsdp_bench.spec.rank_report import MemoryReading, Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.results.load import read_records
from tests.report.charts.trials.test_measured import GIB, record

RESULTS = Path(__file__).parents[3] / "results" / "xeon-2-cores"


def trial(strategy: str, peak_gib: int, seconds: float, **setup: object) -> TrialRecord:
    made = record(strategy=strategy, **setup)
    memory = MemoryReading(peak_allocated_bytes=peak_gib * GIB, peak_phase="backward", phases={})
    ranks = [msgspec.structs.replace(rank, memory=memory, step_seconds=(seconds,)) for rank in made.ranks]
    return msgspec.structs.replace(made, ranks=tuple(ranks))


FULL, GRAD, NONE = trial("FULL_SHARD", 10, 3.0), trial("SHARD_GRAD_OP", 12, 2.0), trial("NO_SHARD", 40, 4.0)


def printed(records: list[TrialRecord], width: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table(records, Console(width=width))
    return capsys.readouterr().out.splitlines()


def test_rows_go_from_the_least_memory_to_the_most(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed([NONE, GRAD, FULL], 120, capsys)
    rows = [line.split()[0] for line in lines if line.startswith(("FULL", "SHARD", "NO_"))]
    assert rows == ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def test_values_that_all_trials_share_are_printed_once_above_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    title, header = "\n".join(printed([NONE, FULL], 120, capsys)).split("strategy")
    assert "precision fp32" in title
    assert "sequence 2048" in title
    assert "precision" not in header


@pytest.mark.parametrize("width", [80, 100, 120])
def test_every_committed_sweep_fits_the_terminal_and_what_is_left_out_is_named(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model names, precisions, ranks and strategies all vary in the long sweep."""
    lines = printed(read_records(RESULTS / "cpu"), width, capsys)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "peak" in text
    assert (f"left out at {width} columns: " in text) == (width < 120)


def test_a_sentence_with_the_findings_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """3 x 2048 tokens in 3, 2 and 4 s are 2,048, 3,072 and 1,536 a second."""
    text = " ".join(printed([NONE, GRAD, FULL], 300, capsys))
    assert text.startswith(
        "Found for llama-1B on 2 ranks: FULL_SHARD takes the least memory, 10.0 GiB per rank, 25% of NO_SHARD;"
        " SHARD_GRAD_OP is the fastest, 3,072 tokens/s per rank, 2.0 times NO_SHARD."
    )


def test_the_sentence_names_the_options_that_differ_and_compares_within_one_world_size() -> None:
    fsdp2, other_world = trial("FULL_SHARD", 9, 6.0, api="fsdp2"), trial("FULL_SHARD", 1, 0.1, world_size=4)
    sentence = conclusion([FULL, fsdp2, other_world])
    assert "FULL_SHARD fsdp2 takes the least memory, 9.0 GiB per rank, 90% of FULL_SHARD fsdp1" in sentence
    assert "FULL_SHARD fsdp1 is the fastest, 2,048 tokens/s per rank, 2.0 times FULL_SHARD fsdp2" in sentence


def test_where_nothing_fits_the_sentence_says_how_the_trials_ended() -> None:
    retried, failed = record(retries=1), record(Outcome.OOM_GPU)
    assert conclusion([retried, failed, failed]) == "Found: no trial fits (1 ok, with retries, 2 oom_gpu)."
    assert conclusion([FULL, failed]) == "Found: one trial fits, llama-1B on 2 ranks: FULL_SHARD."
