"""compare(): differences add up, are the negative the other way round, and nothing differs from itself."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench import SpecError, compare, estimate
from fsdp_bench.plan.compare.comparison import Comparison
from fsdp_bench.plan.compare.reasons import reasons
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.report.text.compare import answer, comparison_text
from tests.conftest import json_of, run_command, stdout_of
from tests.profiles import share_of_examples

ROOT = Path(__file__).parents[3]
SERVER = "p5.48xlarge"
FIELDS: dict[str, tuple[Any, ...]] = {
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"),
    "api": ("fsdp1", "fsdp2"),
    "precision": ("bf16-mixed", "fp32"),
    "checkpointing": ("none", "full"),
    "micro_batch_size": (1, 3),
    "loss": ("plain", "chunked"),
    "nodes": (1, 2),
}
setups = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FIELDS.items()})


@cache
def _predicted(fields: tuple[tuple[str, Any], ...]) -> Prediction:
    return estimate("gpt2", server=SERVER, **dict(fields))


def predicted(**fields: Any) -> Prediction:
    return _predicted(tuple(sorted(fields.items())))


@share_of_examples(5)
@given(setups, setups)
def test_differences_add_up_and_are_the_negative_the_other_way_round(a: dict[str, Any], b: dict[str, Any]) -> None:
    found, back = compare(predicted(**a), predicted(**b)), compare(predicted(**b), predicted(**a))
    peak = next(one for one in found.peaks if one.name == "allocated")
    assert sum(one.difference for one in found.categories) == peak.difference
    assert peak.a == predicted(**a).memory.peak_allocated_bytes
    assert sum(one.difference for one in found.parts) == pytest.approx(found.step.difference)
    for mine, theirs in (
        (found.peaks, back.peaks),
        (found.categories, back.categories),
        (found.phases, back.phases),
        (found.parts, back.parts),
        (found.other_times, back.other_times),
    ):
        assert {one.name: one.difference for one in mine} == {one.name: -one.difference for one in theirs}
    assert {(one.side, one.text) for one in reasons(found)} == {
        ({"A": "B", "B": "A"}[one.side], one.text) for one in reasons(back)
    }
    for reason in reasons(found):
        assert found.fields
        assert reason.bytes_more or reason.seconds_more
        assert "None" not in reason.text
    assert found.is_equal or found.fields


@share_of_examples(5)
@given(setups)
def test_nothing_differs_from_itself(fields: dict[str, Any]) -> None:
    found = compare(predicted(**fields), predicted(**fields))
    assert found.is_equal
    assert (found.fields, reasons(found)) == ((), [])
    assert answer(found) == "nothing differs between A and B (predicted)"


def test_gathered_parameters_are_the_reason_for_what_zero2_needs_more() -> None:
    """bf16: 12 blocks of gpt2 stay gathered, 2 bytes each of their 85 million parameters, but one that both have."""
    found = compare(predicted(strategy="FULL_SHARD"), predicted(strategy="SHARD_GRAD_OP"))
    (reason,) = [one for one in reasons(found) if one.bytes_more]
    assert (reason.side, reason.text) == ("B", "SHARD_GRAD_OP keeps all parameters gathered until backward ends")
    block = 12 * 768**2 + 13 * 768  # its matrices, biases and norms
    assert reason.bytes_more["unsharded_parameters"] == pytest.approx(2 * block * 11, rel=0.1)
    assert answer(found).startswith("A needs ")


def test_hybrids_with_larger_shard_groups_hold_less_of_every_state() -> None:
    """A GPU keeps 1/4 or 1/8 of the parameters in fp32, 4 bytes each: gpt2 has 124,439,808 (openai/gpt-2)."""
    found = compare(*(predicted(strategy="HYBRID_SHARD", nodes=2, shard_size=size) for size in (4, 8)))
    assert [(one.name, one.a, one.b) for one in found.fields] == [("shard_group_size", 4, 8)]
    (reason,) = [one for one in reasons(found) if one.bytes_more]
    assert (reason.side, reason.text) == ("B", "states are sharded over 8 GPUs instead of 4")
    assert reason.bytes_more["parameters"] == pytest.approx(-4 * 124_439_808 / 8, rel=0.01)
    assert not found.is_equal
    assert not found.is_same_setup
    assert f"B: {reason.text}" in " ".join(comparison_text(found).split())


@pytest.mark.parametrize(("rates", "times", "said"), [
    ((1000.0, 800.0), (0.1, 0.1), "A is 25.0% faster: 1,000 tokens/s per GPU (predicted) against 800 tokens/s per GPU"),
    ((800.0, 1000.0), (0.1, 0.1), "B is 25.0% faster: 1,000 tokens/s per GPU (predicted) against 800 tokens/s per GPU"),
    ((None, None), (0.5, 0.1), "B is 400.0% faster: 100.0 ms (predicted) against 500.0 ms"),
    ((None, None), (0.1, 0.5), "A is 400.0% faster: 100.0 ms (predicted) against 500.0 ms"),
])  # fmt: skip
def test_the_faster_of_two_has_more_tokens_a_second_or_where_these_are_unknown_a_shorter_step(
    rates: tuple[float | None, float | None], times: tuple[float, float], said: str
) -> None:
    """By hand: 1000 / 800 is 1.25, 0.5 / 0.1 is 5."""
    found = compare(predicted(micro_batch_size=1), predicted(micro_batch_size=3))
    sides = [
        replace(side, tokens_per_second_per_gpu=rate, times={**side.times, "step_seconds": seconds})
        for side, rate, seconds in zip((found.a, found.b), rates, times, strict=True)
    ]
    assert answer(Comparison(*sides)).endswith(f"; {said} (predicted)")


def test_peaks_of_different_kinds_stand_side_by_side_and_are_not_compared() -> None:
    """A rehearsed record has no reserved memory without retries, and a prediction no host memory of one rank."""
    path = next(iter(sorted((ROOT / "results/rehearsed/llama-8b/trials").glob("*.json"))))
    found = compare(predicted(), path)
    assert {one.name for one in found.peaks} <= {"allocated", "reserved"}
    assert "needed" in found.a.peaks
    assert found.categories is None
    assert "only A has: reserved without retries" in " ".join(comparison_text(found).split())


def test_a_prediction_is_compared_with_the_trial_of_the_same_setup_by_a_ratio() -> None:
    """Trials under 0.1 % apart (docs/validation.md), in whichever order they are named."""
    record = ROOT / "results/rehearsed/llama-8b/trials"
    path = next(
        one
        for one in sorted(record.glob("*.json"))
        if (setup := json.loads(one.read_text())["setup"])["strategy"] == "SHARD_GRAD_OP"
        and (setup["api"], setup["checkpointing"]) == ("fsdp2", "full")
    )
    model = {"strategy": "SHARD_GRAD_OP", "api": "fsdp2", "checkpointing": "full"}
    mine = estimate("Llama-3.1-8B", server=SERVER, **model)
    for found in (compare(mine, path), compare(path, mine)):
        assert found.is_same_setup
        assert answer(found).startswith("predicted ")
        assert " rehearsed: " in answer(found)
        assert not found.is_equal


def test_what_ran_out_of_memory_has_no_peak_to_be_compared_by() -> None:
    """Its peaks are what it had reached."""
    trials = sorted((ROOT / "results/rehearsed/llama-8b/trials").glob("*.json"))
    path = next(one for one in trials if json.loads(one.read_text())["outcome"] == "oom_gpu")
    assert "B stopped as oom_gpu (rehearsed)" in answer(compare(predicted(), path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "is neither a document of predict --json or dry-run --json nor a record of a trial"),
        ("[]", "is neither a document"),
        ('{"error": "no model"}', "has no numbers to compare: no model"),
        ('{"memory": {}, "source": "predicted"}', "is no document of predict --json or dry-run --json"),
        ('{"predictions": [{}, {}]}', "holds 2 setups; name one: "),
        ('{"schema_version": 1}', "not a whole record"),
        ("nothing", "is not JSON"),
    ],
)
def test_a_file_of_something_else_is_named_in_one_line(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(Exception, match=said) as caught:
        compare(path, path)
    assert "a.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_several_predictions_one_is_named_by_its_number(tmp_path: Path) -> None:
    words = ("predict", "--model", "gpt2", "--server", SERVER, "--batch", "1,2", "--json")
    path = tmp_path / "several.json"
    path.write_text(run_command(*words).stdout)
    found = compare(f"{path}#1", f"{path}#2")
    assert [(one.name, one.a, one.b) for one in found.fields] == [("micro_batch_size", 1, 2)]
    with pytest.raises(SpecError, match=r"holds 2 setups; name one"):
        compare(f"{path}#3", f"{path}#1")


BOTH = ("--model", "gpt2", "--server", SERVER)


def test_options_in_quotes_add_to_those_of_both_and_count_first() -> None:
    found = json_of("compare", "--api fsdp2 --batch 2", "--strategy zero2", *BOTH, "--batch", 4)
    differ = {one["name"]: (one["a"], one["b"]) for one in found["fields"]}
    assert differ == {
        "api": ("fsdp2", "fsdp1"),
        "micro_batch_size": (2, 4),
        "strategy": ("FULL_SHARD", "SHARD_GRAD_OP"),
    }
    allocated = next(one for one in found["memory"]["peaks"] if one["name"] == "allocated")
    assert sum(one["difference_bytes"] for one in found["memory"]["categories"]) == allocated["difference_bytes"]
    assert found["why"]


def test_a_power_limit_is_a_difference_of_the_hardware() -> None:
    found = json_of("compare", "--power 700W", "--power 500W", "--model", "gpt2", "--gpu", "H100-SXM")
    assert [(one["name"], one["a"], one["b"]) for one in found["fields"]] == [("gpu_power_watts", 700, 500)]


def test_options_and_the_file_that_predict_prints_are_the_same_setup(tmp_path: Path) -> None:
    path = tmp_path / "predicted.json"
    path.write_text(run_command("predict", *BOTH, "--checkpointing", "full", "--json").stdout)
    printed = stdout_of("compare", path, "--checkpointing full", *BOTH)
    assert printed.startswith("nothing differs between A and B (predicted)\n")
