"""``python -m fsdp_bench.train.recording.main [PARENT]``: record one model's code.

Standard input: a RecordingSpec, as JSON. Standard output: a RecordingAnswer. Standard error: a line for each variant.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable

import msgspec

from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.subprocesses.model_code import RecordingAnswer, RecordingSpec
from fsdp_bench.train.models.huggingface import unpacked_sequences
from fsdp_bench.train.models.quantized import as_on_cuda
from fsdp_bench.train.processes.child import answered, answers_only
from fsdp_bench.train.recording.record import Subject, record
from fsdp_bench.train.recording.subjects import huggingface, of_module


def subject_of(spec: RecordingSpec) -> Subject:
    """Return the code to record."""
    if spec.config is not None:
        return huggingface(spec.config, spec.sequence_length, spec.lora, spec.only_length)
    assert spec.module is not None
    return of_module(spec.module, spec.only_length)


def answer(spec: RecordingSpec, subject_of: Callable[[RecordingSpec], Subject]) -> RecordingAnswer:
    """Record; return the recording or the error."""
    begin = time.perf_counter()

    def recorded() -> RecordingAnswer:
        with unpacked_sequences(), as_on_cuda():
            tell = lambda what: print(f"recording: {what}", file=sys.stderr)  # noqa: E731
            subject = dataclasses.replace(subject_of(spec), before_sm80=spec.before_sm80)
            found = record(subject, tell, spec.activation_offload)
        return RecordingAnswer(recorded=found, seconds=time.perf_counter() - begin)

    return answered(RecordingAnswer, recorded)


def main(subject_of: Callable[[RecordingSpec], Subject]) -> None:
    """Answer standard input; ``subject_of`` returns the code to record."""
    out = answers_only()
    found = answer(from_json(sys.stdin.buffer.read(), RecordingSpec), subject_of)
    out.buffer.write(msgspec.json.encode(found))
    out.flush()


if __name__ == "__main__":
    main(subject_of)
