"""JSON in and out: what is written can be read back, and whatever is damaged is a DecodeError."""

import math
import os
from pathlib import Path

import msgspec
import pytest

from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.files import write_atomically
from fsdp_bench.spec.frontier import read_frontier
from fsdp_bench.spec.rank_report import Failure, Outcome, RankReport
from fsdp_bench.spec.record import read_record


def report(**fields: object) -> RankReport:
    return RankReport(rank=0, outcome=Outcome.OK, **fields)  # type: ignore[arg-type]


def test_losses_that_are_not_finite_are_written_as_words_and_read_back() -> None:
    data = to_json(report(losses=(5.0, math.nan, math.inf, -math.inf)))
    assert b'"nan"' in data
    msgspec.json.decode(data)  # it is JSON
    losses = from_json(data, RankReport).losses
    assert losses[0] == 5.0
    assert math.isnan(losses[1])
    assert losses[2:] == (math.inf, -math.inf)


def test_the_same_words_stay_words_where_a_text_is_meant() -> None:
    whole = report(device_name="nan", losses=(math.nan,), environment={"torch": "inf"})
    read = from_json(to_json(whole), RankReport)
    assert (read.device_name, read.environment) == ("nan", {"torch": "inf"})
    with pytest.raises(msgspec.ValidationError):
        from_json(b'{"rank": "nan", "outcome": "ok"}', RankReport)
    with pytest.raises(msgspec.ValidationError):
        from_json(b'{"rank": 0, "outcome": "ok", "losses": ["1.5"]}', RankReport)


def test_a_message_that_is_not_utf_8_is_written_with_escapes() -> None:
    """A file's name in an error's message can hold any bytes."""
    message = os.fsdecode(b"no file caf\xe9")
    read = from_json(to_json(report(failure=Failure(message=message, phase="load", at=0.0))), RankReport)
    assert read.failure.message == "no file caf\\udce9"


DAMAGED = {
    "a byte that is not UTF-8": b'{"rank": 0, "outcome": "ok", "device_name": "\xff"}',
    "deep nesting": b"[" * 200_000,
    "deep nesting in a field": b'{"rank": 0, "outcome": "ok", "losses": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "a huge integer": b'{"rank": 1' + b"0" * 30 + b', "outcome": "ok"}',
    "an integer too long to read": b'{"rank": 1' + b"0" * 5000 + b', "outcome": "ok"}',
    "NaN as Python writes it": b'{"rank": 0, "outcome": "ok", "losses": [NaN]}',
    "nothing": b"",
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_damaged_bytes_are_a_decode_error_whatever_is_wrong_with_them(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        from_json(data, RankReport)
    for read in (read_record, read_frontier):
        with pytest.raises(msgspec.DecodeError):
            read(data, "the file")


def test_an_interrupted_write_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "trials.csv", b"x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", ['"nan"', '"inf"', "1e308", "-1.0"])
@pytest.mark.parametrize("field", ["step_seconds", "warmup_seconds", "seconds_without_communication"])
def test_only_losses_may_be_anything_times_are_times(field: str, seconds: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        from_json(f'{{"rank": 0, "outcome": "ok", "{field}": [{seconds}]}}'.encode(), RankReport)
