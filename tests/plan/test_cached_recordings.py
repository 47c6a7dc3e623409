"""A recording is made once, and again when what decides it changes."""

from pathlib import Path

import msgspec
import pytest

from fsdp_bench.catalog.architectures import recorded_architecture
from fsdp_bench.catalog.loader import model
from fsdp_bench.plan import recording
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.recorded import RecordedCode
from fsdp_bench.spec.subprocesses.model_code import RecordingSpec

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


def get(sequence_length: int = 512, **fields: bool) -> RecordedCode:
    return recording.recorded_config(CONFIG, sequence_length, lambda _: None, **fields)


def test_a_recording_is_made_once_for_each_request(made: list[RecordingSpec]) -> None:
    assert get().parameters == get().parameters
    assert len(made) == 1
    get(activation_offload=True)
    assert len(made) == 2


def test_another_recorder_makes_it_anew(
    made: list[RecordingSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (recording._RECORDER / "wrapping" / "units.py").exists()
    source = tmp_path / "train" / "wrapping" / "units.py"
    source.parent.mkdir(parents=True)
    monkeypatch.setattr(recording, "_RECORDER", tmp_path / "train")
    for text in ("1", "1", "2"):
        source.write_text(text)
        get()
    assert len(made) == 2


def test_a_damaged_recording_is_made_anew(made: list[RecordingSpec], tmp_path: Path) -> None:
    get()
    (kept,) = tmp_path.rglob("*.json.gz")
    kept.write_bytes(kept.read_bytes()[:100])
    get()
    assert len(made) == 2
    get()
    assert len(made) == 2


def test_a_recording_that_cannot_be_kept_is_used_all_the_same(made: list[RecordingSpec], tmp_path: Path) -> None:
    (tmp_path / "fsdp-bench").touch()
    assert get().parameters
    assert len(made) == 1


def test_a_recording_serves_every_length_for_which_it_holds(
    made: list[RecordingSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    get(512)
    get(1024)
    assert len(made) == 1
    code = recorded_architecture(CONFIG, 512, "t5-small").code  # as of one side of a sliding window
    monkeypatch.setattr(recording, "read_recorded", lambda _path: msgspec.structs.replace(code, longest=512))
    get(1024)
    assert len(made) == 2


def test_a_length_that_is_not_recorded_is_refused_before_recording(made: list[RecordingSpec]) -> None:
    with pytest.raises(SpecError, match="multiples of 32 tokens: 992 or 1024"):
        get(1000)
    assert made == []
    get(1)  # a search for the longest names none
    assert len(made) == 1
