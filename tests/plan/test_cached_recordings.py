"""A recording is made once, and again when what decides it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_bench.catalog.architectures import recorded_architecture
from fsdp_bench.catalog.loader import model
from fsdp_bench.plan import recording
from fsdp_bench.spec.recording.recorded import RecordedCode
from fsdp_bench.spec.recording.request import RecordingSpec

CONFIG = model("t5-small").hf_config()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RecordingSpec]:
    """Return what is recorded from now on; the recording is that of the catalogue."""
    found: list[RecordingSpec] = []
    recorded = recorded_architecture(CONFIG, 512, "t5-small").code

    def record(spec: RecordingSpec, _progress: object) -> RecordedCode:
        found.append(spec)
        return recorded

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(recording, "record", record)
    return found


def get(**fields: bool) -> RecordedCode:
    return recording.recorded_config(CONFIG, 512, lambda _: None, **fields)


def test_a_recording_is_made_once_for_each_request(made: list[RecordingSpec]) -> None:
    assert get().parameters == get().parameters
    assert len(made) == 1
    get(activation_offload=True)
    assert len(made) == 2


def test_another_recorder_makes_it_anew(made: list[RecordingSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    get()
    monkeypatch.setattr(recording, "_RECORDER", ("recording",))
    get()
    assert len(made) == 2
