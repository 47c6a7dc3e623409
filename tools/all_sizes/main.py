"""``python -m tools.all_sizes.main CODE [PARENT]``: record an architecture's code for all sizes.

CODE is huggingface or torchtitan. All else is as ``fsdp_bench.train.recording.main`` has it.
"""

from __future__ import annotations

import sys
from functools import partial

from fsdp_bench.spec.subprocesses.model_code import RecordingSpec
from fsdp_bench.train.recording.main import main
from fsdp_bench.train.recording.record import Subject
from tools.all_sizes.subjects import architecture, torchtitan


def subject_of(spec: RecordingSpec, code: str) -> Subject:
    """Return the code to record."""
    assert spec.config is not None
    if code == "torchtitan":
        return torchtitan(spec.config, spec.sequence_length)
    return architecture(spec.config, spec.sequence_length, spec.only_length, spec.lora)


if __name__ == "__main__":
    main(partial(subject_of, code=sys.argv.pop(1)))
