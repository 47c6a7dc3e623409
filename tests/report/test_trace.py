"""A simulated step in the Trace Event Format: ``rehearse --trace`` and ``predict --trace``."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.replay.schedule import Span
from fsdp_bench.replay.step_parts import StepPart
from fsdp_bench.report.trace import TracedStep, rehearsal_trace, trace_document
from fsdp_bench.simulate.events import Stream, Work
from tests.conftest import refused, run_command
from tests.plan.rehearsed_time.conftest import StepWriter
from tests.report.test_rehearsal_text import EIGHT, of_step

P5 = ("predict", "--params", "1B", "--server", "p5.48xlarge")
ON_THE_GPU = (StepPart.MATRIX_PRODUCTS, StepPart.ATTENTION, StepPart.OTHER_OPERATORS, StepPart.OPTIMIZER)


def written(*more: str) -> Rehearsal:
    """Return a step of three phases on two streams, with two process groups, a copy, a hook and work of the host."""
    step = StepWriter()
    step.collective("allgather_base", 10**8, EIGHT, stream=1)
    step.add("hook", name="fsdp2 _pre_forward")
    step.product(4096, 2048, 1024)
    for name in more:
        step.operator(name, (step.tensor(8),), self=(step.tensor(8),))
    step.add("phase", name="backward")
    for rows in range(1, 40):  # of odd durations, each longer than the host needs to issue the next
        step.product(128 * rows, 16384, 8000 + rows)
        step.collective("allreduce", 10**6 * rows, (0, 1), group="tensor", stream=2)
        step.collective("reduce_scatter_base", 10**7, EIGHT, stream=1)
    step.add("copy", name="to_host", num_bytes=10**8, stream=0)
    step.add("phase", name="optimizer")
    tensor = step.tensor(10**7, device="cpu")
    step.operator("aten::add_", written=("self",), kind="host", self=(tensor,))
    return of_step(step)


def tracks_of(document: dict[str, Any]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the slices of each track of each process, by their names."""
    events = document["traceEvents"]
    named = [event for event in events if event["ph"] == "M"]
    processes = {one["pid"]: one["args"]["name"] for one in named if one["name"] == "process_name"}
    threads = {(one["pid"], one["tid"]): one["args"]["name"] for one in named if one["name"] == "thread_name"}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: defaultdict(list) for name in processes.values()}
    for event in events[len(named) :]:
        assert event["ph"] == "X"  # names come first
        found[processes[event["pid"]]][threads[event["pid"], event["tid"]]].append(event)
    return found


def tracks(found: Rehearsal) -> dict[str, list[dict[str, Any]]]:
    document = rehearsal_trace({"rank 0 of 8": found})
    assert document is not None
    return next(iter(tracks_of(json.loads(json.dumps(document))).values()))


def test_each_stream_and_process_group_has_a_track_of_its_work() -> None:
    found = tracks(written())
    assert {name: len(own) for name, own in found.items()} == {
        "phases": 2,  # no operator of the GPU is in the optimizer
        "host": 2,
        "operators of the compute stream": 40,
        "collectives of process group 0 (8 ranks)": 40,
        "collectives of process group tensor (2 ranks)": 39,
        "copies of the compute stream": 1,
    }
    assert [one["name"] for one in found["host"]] == ["fsdp2 _pre_forward", "aten::add_"]
    assert [one["name"] for one in found["phases"]] == ["forward", "backward"]


def test_slices_are_sorted_and_never_overlap_whether_a_reader_rounds_or_cuts_off() -> None:
    """Perfetto reads nanoseconds (json_utils.cc, CoerceToTs), and drops slices of a track that overlap."""
    document = rehearsal_trace({"rank 0": written()})
    assert document is not None
    begins = [event["ts"] for event in document["traceEvents"] if event["ph"] == "X"]
    assert begins == sorted(begins)
    for own in tracks(written()).values():
        for read in (int, round):
            times = [(read(one["ts"] * 1e3), read(one["dur"] * 1e3)) for one in own]
            assert all(begin + length <= after for (begin, length), (after, _) in pairwise(times))


def test_microseconds_are_whole_nanoseconds_for_a_reader_that_cuts_off() -> None:
    """1.001 * 1000 is 1000.9999999999999 in double precision."""
    assert int(1.001 * 1e3) == 1000
    spans = [
        Span("compute", Stream.COMPUTE, place * 1.001e-6, (place + 1) * 1.001e-6, Work("aten::add"), "forward", -1)
        for place in range(1000)
    ]
    own = tracks_of(trace_document([TracedStep("rank", spans)]))["rank"]["operators of the compute stream"]
    assert [int(one["ts"] * 1e3) for one in own] == [1001 * place for place in range(1000)]
    assert {int(one["dur"] * 1e3) for one in own} == {1001}


def test_the_durations_of_a_track_add_up_to_the_parts_of_the_step() -> None:
    rehearsed = written()
    assert rehearsed.time is not None
    found, time = tracks(rehearsed), rehearsed.time.time
    seconds = {name: sum(one["dur"] for one in own) / 1e6 for name, own in found.items()}
    operators = sum(time.parts[part] for part in ON_THE_GPU)
    assert seconds["operators of the compute stream"] == pytest.approx(operators, abs=1e-7)  # a nanosecond each
    assert seconds["copies of the compute stream"] == pytest.approx(time.host_copy_seconds, abs=1e-9)
    last = max(one["ts"] + one["dur"] for own in found.values() for one in own)
    assert last / 1e6 == pytest.approx(time.step_seconds, abs=1e-9)


def test_a_slice_says_its_phase_bytes_sizes_and_flops() -> None:
    found = tracks(written())
    assert found["operators of the compute stream"][0]["args"] == {
        "phase": "forward",
        "bytes": 2 * (4096 * 1024 + 1024 * 2048 + 4096 * 2048),
        "m": 4096,
        "n": 2048,
        "k": 1024,
        "FLOPs": 2 * 4096 * 2048 * 1024,
    }
    gathers = found["collectives of process group 0 (8 ranks)"]
    assert gathers[0]["args"] == {"phase": "forward", "bytes": 10**8}


def test_a_process_says_what_was_predicted_and_what_is_missing() -> None:
    document = rehearsal_trace({"rank 3 of 8": written("mylib::one", "mylib::one")})
    assert document is not None
    assert list(tracks_of(document)) == [
        "rank 3 of 8, step 4: rehearsed work, predicted times; without 2 kernels and collectives whose time is unknown"
    ]
    assert "not measured" in document["otherData"]["times"]
    assert rehearsal_trace({"rank 0": of_step(None)}) is None


def test_predict_writes_the_steps_of_several_setups_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "step.json.gz"
    done = run_command(*P5, "--strategy", "zero2,zero3", "--trace", file)
    assert (done.returncode, done.stderr) == (0, f"trace: {file}\n")
    found = tracks_of(json.loads(gzip.decompress(file.read_bytes())))
    assert list(found) == ["SHARD_GRAD_OP: rank 0, predicted", "FULL_SHARD: rank 0, predicted"]
    for own in found.values():
        phases = ["forward", "loss", "backward", "optimizer"]
        assert [one["name"] for one in own["phases"] if one["name"] in phases] == phases
        assert "collectives of process group shard" in own


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*P5, "--trace", "step.txt"), "trace: 'step.txt' is not allowed; a file that ends in .json or .json.gz"),
        ((*P5, "--trace", "no/step.json"), "trace: 'no' is no folder"),
        ((*P5, "--batch", ",".join(map(str, range(1, 18))), "--trace", "step.json"), "at most 16"),
        (("predict", "--params", "1B", "--gpu", "H100-SXM", "--world-size", 8, "--trace", "x.json"), "unknown"),
        (("rehearse", "--gpu", "L4", "--trace", "x.json", "--", "python", "a.py"), "add --time"),
        (("rehearse", "--gpu", "L4", "--html", ".", "--", "python", "a.py"), "html: '.' is a folder"),
    ],
)
def test_what_cannot_be_written_is_refused(words: tuple[object, ...], said: str) -> None:
    assert said in refused(*words)
