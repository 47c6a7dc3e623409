"""PyTorch's operators and the work that the stand-in saw, in one order."""

from __future__ import annotations

from fsdp_bench.rehearse.inside.observe.trace import (
    HOST_WAITS_DEVICE,
    HOST_WAITS_EVENT,
    HOST_WAITS_STREAM,
    LAUNCH,
    RECORD,
    STREAM_WAIT,
    TO_HOST,
    Entry,
    Note,
    in_order,
)


def launch(stream: int = 0) -> Entry:
    return Entry(LAUNCH, stream, 0, "kernel")


def note(begin: int, end: int, name: str, is_alone: bool = False) -> Note:
    return Note(begin, end, {"name": name}, is_alone)


def names(notes: list[Note], entries: list[Entry]) -> list[str]:
    return [str(event.get("name", event.get("kind"))) for event in in_order(notes, entries)]


def test_an_operator_stands_where_it_launched_first_and_once() -> None:
    found = in_order([note(0, 3, "add")], [launch(7), launch(8), launch(7)])
    assert found == [{"name": "add", "stream": 7}]


def test_a_launch_of_no_operator_is_an_event_of_its_own() -> None:
    found = in_order([note(1, 2, "add")], [launch(), launch(), launch()])
    assert [event["name"] for event in found] == ["kernel", "add", "kernel"]


def test_of_nested_operators_the_inner_one_has_launched() -> None:
    assert names([note(1, 2, "inner"), note(0, 3, "outer")], [launch()] * 3) == ["outer", "inner"]


def test_what_launched_nothing_stands_before_what_was_launched_later() -> None:
    notes = [note(1, 1, "hook"), note(0, 1, "first"), note(1, 2, "second"), note(2, 2, "end")]
    assert names(notes, [launch(), launch()]) == ["first", "hook", "second", "end"]


def test_a_collectives_own_launches_are_no_work_whatever_operator_called_it() -> None:
    notes = [note(0, 2, "collective", is_alone=True), note(0, 2, "functional collective")]
    assert names(notes, [launch(), launch()]) == ["collective"]


def test_copies_and_waits_within_an_operator_stand_for_themselves() -> None:
    entries = [Entry(TO_HOST, 0, 8, ""), Entry(HOST_WAITS_STREAM, 3, 0, ""), Entry(RECORD, 1, 99, "")]
    assert in_order([note(0, 3, "item")], entries) == [
        {"kind": "copy", "name": "to_host", "num_bytes": 8, "stream": 0},
        {"kind": "host_wait", "event": None, "stream": 3},
        {"kind": "record", "event": 99, "stream": 1},
    ]


def test_who_waits_for_what() -> None:
    entries = [Entry(STREAM_WAIT, 2, 99, ""), Entry(HOST_WAITS_EVENT, -1, 98, ""), Entry(HOST_WAITS_DEVICE, -1, 0, "")]
    assert in_order([], entries) == [
        {"kind": "wait", "event": 99, "stream": 2},
        {"kind": "host_wait", "event": 98, "stream": None},
        {"kind": "host_wait", "event": None, "stream": None},
    ]
