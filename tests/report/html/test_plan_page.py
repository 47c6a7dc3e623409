"""The page of a plan: its numbers are the document's, what the document lacks is unknown, names are text."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.plan.purchase.document import PlanDocument
from fsdp_bench.report.html import write
from fsdp_bench.report.html.plan import chart, money_text
from fsdp_bench.report.text.plan import plan_text as terminal_text
from fsdp_bench.report.text.plan import training_time
from fsdp_bench.spec.codec import from_json, to_json
from tests.report.html.samples import IMAGE, SCRIPT, STYLE, ParsedPage, plan_file, plan_text

GIB = 2**30
ADDED = ("fsdp_bench", "torch", "made_on", "model_description", "tariff", "stated_price", "servers", "winner_step")
"""Keys that earlier plans do not have."""


def page(source: Path) -> ParsedPage:
    write(source, source.with_suffix(".html"))
    return ParsedPage(source.with_suffix(".html").read_text())


def offers() -> dict[str, dict[str, Any]]:
    """Return the document's offers by their number of nodes."""
    plan = json.loads(plan_text())
    found = [plan["winner"], plan["cheapest"], plan["fastest"], plan["fewest_nodes"], *plan["pareto"]]
    return {str(one["num_nodes"]): one for one in found}


def test_the_table_has_the_numbers_of_the_document(tmp_path: Path) -> None:
    parsed, expected = page(plan_file(tmp_path)), offers()
    nodes = [text for text, _ in parsed.column("nodes")]
    assert sorted(nodes) == sorted(expected)
    assert nodes[0] == str(json.loads(plan_text())["winner"]["num_nodes"])
    ends = {f"{what}, {end} end": f"{end}_{key}" for what, key in (("hours", "seconds"), ("price", "cost"))
            for end in ("fast", "slow")}  # fmt: skip
    for title, key in {**ends, "tokens/s per GPU": "tokens_per_second_per_gpu"}.items():
        shown = [float(number or "nan") for _, number in parsed.column(title)]
        assert shown == [expected[count][key] for count in nodes], title
    hours = [float(text) for text, _ in parsed.column("hours, fast end")]
    assert hours == pytest.approx([expected[count]["fast_seconds"] / 3600 for count in nodes], abs=0.51)


def test_the_answer_is_the_winner_and_why(tmp_path: Path) -> None:
    plan, text = json.loads(plan_text()), page(plan_file(tmp_path)).text
    winner = plan["winner"]
    assert f"{winner['num_nodes']} x {winner['server']} ({winner['num_gpus']} {winner['gpu']})" in text
    for said in (plan["reason"], winner["range_because"], plan["left_out"][0]["reason"], plan["torch"]):
        assert said in text
    assert plan["servers"][0]["price"]["source"]["date"] in text


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert to_json(from_json(plan_file(tmp_path).read_bytes(), PlanDocument)).decode() == plan_text()


def test_a_mark_stands_at_the_prediction_within_its_range(tmp_path: Path) -> None:
    plan = from_json(plan_text().encode(), PlanDocument)
    drawn = chart(plan)
    for point, line in zip(drawn.points, drawn.lines, strict=True):
        assert line.x[0] < point.x < line.x[1]


def test_prices_have_three_digits() -> None:
    assert [money_text(amount) for amount in (165_832.4, 999_950, 1_234, 56.7, 2.1)] == [
        "166,000", "1,000,000", "1,230", "57", "2.10",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "said"),
    [((90.0, 100.0), "1.5 to 1.7 minutes"), ((3600.0, 5400.0), "1.0 to 1.5 hours"), ((5e5, 1e6), "5.8 to 12 days")],
)
def test_a_duration_has_the_unit_that_suits_its_slow_end(seconds: tuple[float, float], said: str) -> None:
    winner = from_json(plan_text().encode(), PlanDocument).winner
    assert training_time(replace(winner, fast_seconds=seconds[0], slow_seconds=seconds[1])) == said


def test_what_would_not_fit_with_earlier_errors_is_said_on_the_page_as_on_the_terminal(tmp_path: Path) -> None:
    """Peaks of published runs were up to 4 GiB larger than predicted, of which 3 GiB are left."""
    plan = json.loads(plan_text())
    memory, usable = plan["winner"]["memory"], plan["servers"][0]["gpu_memory_bytes"]
    needed = usable - memory["required_headroom_bytes"] - 3 * GIB
    for most, fits in ((needed + 4 * GIB, False), (needed + 2 * GIB, True)):
        sizes = {"peak_reserved_bytes": needed, "peak_reserved_bytes_range": [needed, most], "range_because": "so far"}
        path = plan_file(tmp_path, winner={**plan["winner"], "memory": {**memory, **sizes}}, safest=None)
        terminal = terminal_text(from_json(path.read_bytes(), PlanDocument))
        for text in (page(path).text, " ".join(terminal.split())):
            assert "so far" in text
            assert ("so far, with which it would not fit" in text) is not fits


def test_a_stated_price_is_said_with_its_unit(tmp_path: Path) -> None:
    path = plan_file(tmp_path, stated_price={"per_hour": 2.0, "unit": "gpu", "currency": "EUR"})
    for text in (page(path).text, terminal_text(from_json(path.read_bytes(), PlanDocument))):
        assert "2.00 EUR a GPU and hour, stated" in text


def test_fields_that_an_older_plan_lacks_are_unknown_or_left_out(tmp_path: Path) -> None:
    plan = {key: value for key, value in json.loads(plan_text()).items() if key not in ADDED}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(plan))
    parsed = page(path)
    assert "unknown, as modelled" in parsed.text
    assert "What runs when" not in parsed.text
    assert "usable" not in parsed.text


def test_a_plan_without_a_winner_says_why(tmp_path: Path) -> None:
    parsed = page(plan_file(tmp_path, winner=None, winner_step=None, reason="the fastest takes 300 days"))
    assert "No plan" in parsed.text
    assert "the fastest takes 300 days" in parsed.text


def test_an_offer_without_a_known_price_or_range_has_none(tmp_path: Path) -> None:
    costs = ("cost", "fast_cost", "slow_cost", "fast_seconds", "price_per_hour")
    nothing = dict.fromkeys((*costs, "range_because", "tokens_per_second_per_gpu_range"))
    winner = {**json.loads(plan_text())["winner"], **nothing}
    others = ("safest", "cheapest_allowed", "cheapest", "fastest", "fewest_nodes")
    alone = {**dict.fromkeys(others), "pareto": [], "servers": []}
    parsed = page(plan_file(tmp_path, winner=winner, num_offers=1, **alone))
    assert parsed.column("price, fast end")[0] == ("unknown", "")
    assert parsed.column("hours, slow end")[0] == ("unknown", "")
    assert f"never compared with such a run on {winner['gpu']}" in parsed.text


@pytest.mark.parametrize("name", [SCRIPT, IMAGE, STYLE, "' onmouseover='x", "\x1b[2J\u202eabc"])
def test_names_are_text(tmp_path: Path, name: str) -> None:
    plan = json.loads(plan_text())
    winner = {**plan["winner"], "server": name, "gpu": name, "range_because": name}
    memory = {**plan["winner_step"]["memory"], "peak_operator": name}
    phases = [{**phase, "name": name} for phase in memory["phases"]]
    step = {**plan["winner_step"], "memory": {**memory, "phases": phases}}
    left = [{"server": name, "reason": name}]
    parsed = page(plan_file(tmp_path, model=name, reason=name, winner=winner, winner_step=step, left_out=left))
    assert parsed.count("script") == 1
    assert parsed.count("img") == 0
    assert parsed.count("style") == 1
    assert not [key for _, attributes in parsed.elements for key in attributes if key.startswith("on")]
    assert all(link.startswith(("#", "data:")) for link in parsed.attributes("href") + parsed.attributes("src"))
    shown = name if name.isprintable() else "\\x1b[2J\\u202eabc"
    assert parsed.text.count(shown) > 5
    assert "\x1b" not in parsed.text


def test_ids_are_unique_and_headings_are_in_order(tmp_path: Path) -> None:
    parsed = page(plan_file(tmp_path))
    ids = parsed.attributes("id")
    assert len(ids) == len(set(ids)) > 5
    levels = [int(tag[1]) for tag, _ in parsed.elements if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
