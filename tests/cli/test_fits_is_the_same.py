"""``predict`` says ``fits`` of the size that ``max-size`` finds with the same options, and not of the next size."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import run_command
from tests.profiles import share_of_examples

few = share_of_examples(16)

places = st.sampled_from([
    ("--server", "g5.48xlarge"),
    ("--server", "p5.48xlarge", "--nodes", "2"),
    ("--server", "p4d.24xlarge", "--gpus-per-node", "4"),
    ("--gpu", "H100-SXM", "--world-size", "8"),
])  # fmt: skip
choices = st.fixed_dictionaries({
    "--strategy": st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
    "--api": st.sampled_from(["fsdp1", "fsdp2"]),
    "--precision": st.sampled_from(["bf16-mixed", "fp32", "bf16-true"]),
    "--checkpointing": st.sampled_from(["none", "full"]),
    "--loss": st.sampled_from(["plain", "chunked"]),
    "--batch": st.sampled_from(["1", "3"]),
    "--headroom": st.sampled_from(["1GiB", "4GiB"]),
    "--load": st.sampled_from(["meta", "every-rank"]),
})  # fmt: skip


def words_of(place: tuple[str, ...], options: dict[str, str]) -> list[str]:
    return [*place, *(word for pair in options.items() for word in pair)]


def document(*words: object) -> Any:
    return json.loads(run_command(*words, "--json").stdout)


@few
@given(places, choices, st.booleans())
def test_the_largest_model_fits_and_the_next_does_not(
    place: tuple[str, ...], options: dict[str, str], is_expandable: bool
) -> None:
    words = [*words_of(place, options), *(["--expandable-segments"] if is_expandable else [])]
    (cell,) = document("max-size", *words, "--no-time")["cells"]
    if cell["max_parameters"] is None:
        return
    found = document("predict", *words, "--params", cell["max_parameters"])
    assert found["verdict"] == cell["verdict"]
    assert found["fits"] == cell["fits"]
    assert found["fits"] in (True, None)
    if found["fits"] is None:  # of a GPU alone the host's memory is not known
        assert found["memory"]["peak_host_bytes_per_node"] != 0
    name = re.fullmatch(r"llama-(.*)", cell["model"])
    assert name is not None  # three digits of its parameters, which the next of the ladder may have, too
    assert document("predict", *words, "--params", name[1])["model"]["name"] == cell["model"]
    if cell["next"] is not None:
        assert document("predict", *words, "--params", cell["next"]["num_parameters"])["fits"] is not True


@few
@given(places, choices)
def test_the_largest_batch_fits_and_one_more_does_not(place: tuple[str, ...], options: dict[str, str]) -> None:
    del options["--batch"]
    words = [*words_of(place, options), "--model", "gpt2-xl"]
    (cell,) = document("max-size", *words, "--of", "micro_batch_size", "--no-time")["cells"]
    if cell["fits_value"] is None:
        return
    both = document("predict", *words, "--batch", f"{cell['fits_value']},{cell['next']['value']}")["predictions"]
    assert both[0]["verdict"] == cell["verdict"]
    assert [one["fits"] is not False for one in both] == [True, False]
