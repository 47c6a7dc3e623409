"""Printing, into which nothing from outside is interpreted; and the text about what a prediction rests on."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

import fsdp_bench
from fsdp_bench.catalog.lookup import server
from fsdp_bench.cli.common.printing import progress_bar
from fsdp_bench.rates.communicators import communicators_of
from fsdp_bench.report import terminal
from fsdp_bench.report.table import Column, table_lines
from fsdp_bench.report.text.common import communicators_fact, fact
from fsdp_bench.report.text.speed import measured_rates
from fsdp_bench.spec.calibration_profile import Profile, RankProfile
from fsdp_bench.spec.errors import printable, shortened, shown
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup

HOSTILE = "[/red][link=file:///etc]x[/link] :smile: \x1b]0;t\x07\x1b[2J\x9b31m\u202e\n\udcff"
SHOWN = r"[/red][link=file:///etc]x[/link] :smile: \x1b]0;t\x07\x1b[2J\x9b31m\u202e\n\udcff"


def on_a_terminal() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, width=300, force_terminal=True, color_system=None), output


def test_control_characters_are_shown_as_escapes_and_all_else_stays() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("é 中文 😀 $x$") == "é 中文 😀 $x$"


def test_a_note_a_table_and_a_progress_bar_print_markup_and_escapes_as_they_are_written() -> None:
    console, output = on_a_terminal()
    terminal.note(console, f"note: {HOSTILE}", "yellow")
    terminal.note_lines(console, table_lines([Column("name", (HOSTILE,))], 200))
    with Progress(*progress_bar(console).columns, console=console, auto_refresh=False) as progress:
        terminal.describe(progress, progress.add_task("", total=1), HOSTILE)
    assert output.getvalue().count(SHOWN) >= 3
    assert "\x07" not in output.getvalue()
    assert "\x9b" not in output.getvalue()


def test_lines_and_answers_print_escapes_as_they_are_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    terminal.print_line(HOSTILE)
    terminal.print_line(HOSTILE, error=True)
    terminal.print_answer(HOSTILE, "red")
    terminal.print_lines(f"{HOSTILE}\nsecond")
    printed = capsys.readouterr()
    assert printed.out.split("\n")[:2] == [SHOWN, SHOWN]
    assert printed.out.endswith("\\udcff\nsecond\n")
    assert printed.err == f"{SHOWN}\n"


def test_everything_is_printed_by_one_module() -> None:
    allowed = {"report/terminal.py", "report/table.py", "cli/main.py"}  # a table is rendered into a text
    package = Path(fsdp_bench.__file__).parent
    own = [path for folder in ("cli", "report", "sweep") for path in (package / folder).glob("*.py")]
    prints = re.compile(r"(?<![\w.])(print|Console|console\.print|click\.secho)\(")
    found = {str(path.relative_to(package)) for path in own if prints.search(path.read_text())}
    assert found - allowed == set()


@pytest.mark.parametrize(
    "value", ["x" * 5100, [[1] * 3000], 10**4000, 16**5000, "\x1b[2J" * 100], ids=["text", "list", "a", "b", "escapes"]
)
def test_a_value_in_a_message_is_cut_to_80_characters_and_escaped(value: object) -> None:
    text = shown(value)
    assert len(text) < 120
    assert text.isprintable()


def test_the_middle_of_a_long_message_is_left_out() -> None:
    line = shortened("begin " + "x" * 5000 + " end", 480)
    assert line.startswith("begin ")
    assert line.endswith(" end")
    assert "(5010 characters)" in line
    assert len(line) == 480


def printed(name: str, nodes: int = 1, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> str:
    where = server(name, nodes)
    setup = TrainSetup(strategy=strategy, world_size=8 * nodes, shard_size=8 if strategy.is_hybrid else None)
    return "; ".join(" ".join(one) for one in communicators_fact(communicators_of(setup, where)))


def test_a_known_size_is_told_once_and_bounds_as_two() -> None:
    source = "in 1 communicator (predicted from NCCL's source; not measured): to shard, 8 ranks, 24 channels,"
    assert printed("DGX-A100") == f"NCCL 484.0 MiB {source} 484.0 MiB"
    assert printed("p4d.24xlarge") == f"NCCL 484.0 to 580.0 MiB {source} 484.0 to 580.0 MiB"


def test_unknown_buffers_have_a_reason_beside_the_known_ones() -> None:
    hybrid = printed("a3-megagpu-8g", 2, ShardingStrategy.HYBRID_SHARD)
    assert hybrid.startswith("NCCL unknown: to shard, 8 ranks, 24 channels, 518.0 MiB; to add gradients up, 2 ranks,")
    assert "unknown: between nodes only InfiniBand, RoCE and EFA are covered" in hybrid
    assert printed("g5.48xlarge").startswith("NCCL unknown: only GPUs that NVSwitch joins")


def test_one_rank_has_no_line() -> None:
    assert communicators_fact(communicators_of(TrainSetup(world_size=1), None)) == []
    assert communicators_fact(None) == []


LOST = RankProfile(num_ranks=2, threads_per_rank=1, launch_seconds=0.0, hook_seconds={"fsdp1": 1e-4, "fsdp2": 0.0})
FOUND = RankProfile(num_ranks=4, threads_per_rank=1, launch_seconds=1e-6, hook_seconds={"fsdp1": 1e-4})


def test_a_time_of_the_host_that_came_out_as_nothing_is_told() -> None:
    """Host times are small differences of large sums; a zero is not a measurement."""
    assert LOST.lost_in_noise == ("the host's time for an operator", "the host's time for a hook of fsdp2")
    assert FOUND.lost_in_noise == ()


def test_predictions_that_rest_on_it_say_so() -> None:
    about = {"machine": "two cores", "device": "cpu", "device_name": "", "measured_on": "2026-11-21", "versions": {}}
    words = measured_rates(Profile(**about, ranks=(LOST, FOUND)))
    assert "without the host's time for an operator (2 ranks), lost in the noise" in words
    assert "(4 ranks)" not in words
    assert "lost" not in measured_rates(Profile(**about, ranks=(FOUND,)))


def test_a_fact_whose_name_is_longer_than_its_column_stays_within_the_terminal() -> None:
    lines = fact("strategy _HYBRID_SHARD_ZERO2: ", "word " * 30, 24).splitlines()
    assert max(map(len, lines)) <= terminal.terminal_width()
    assert lines[1].startswith(" " * 24 + "word")
