"""``python -m fsdp_bench.train.recording.main [PARENT]``: record one model's code.

Standard input: a RecordingSpec, as JSON. Standard output: a RecordingAnswer. Standard error: a line for each variant.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence

import msgspec

from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.errors import FsdpBenchError
from fsdp_bench.spec.recording.request import RecordingAnswer, RecordingSpec
from fsdp_bench.train.models.huggingface import unpacked_sequences
from fsdp_bench.train.models.quantized import as_on_cuda
from fsdp_bench.train.processes.parent import die_with_parent
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
    try:
        with unpacked_sequences(), as_on_cuda():
            tell = lambda what: print(f"recording: {what}", file=sys.stderr)  # noqa: E731
            subject = dataclasses.replace(subject_of(spec), before_sm80=spec.before_sm80)
            recorded = record(subject, tell, spec.activation_offload)
    except FsdpBenchError as error:
        return RecordingAnswer(error=str(error))
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        return RecordingAnswer(error=f"{type(error).__name__}: {text}", users_mistake=False)
    return RecordingAnswer(recorded=recorded, seconds=time.perf_counter() - begin)


def main(subject_of: Callable[[RecordingSpec], Subject], parent: Sequence[str]) -> None:
    """Answer standard input. Output of torch and transformers goes to standard error.

    Args:
        subject_of: returns the code to record.
        parent: the process with which this one ends, if any.
    """
    if parent:
        die_with_parent(int(parent[0]))
    out, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    found = answer(from_json(sys.stdin.buffer.read(), RecordingSpec), subject_of)
    out.buffer.write(msgspec.json.encode(found))
    out.flush()


if __name__ == "__main__":
    main(subject_of, sys.argv[1:])
