"""The recording subprocess's request and answer."""

from __future__ import annotations

from typing import Any

import msgspec

from fsdp_bench.spec.checked import Checked
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.recorded import RecordedCode
from fsdp_bench.spec.subprocesses.dry_run import UserModule

MULTIPLE = 32
"""Recordings hold for sequence lengths that are multiples of this: attention with a mask rounds lengths up to it."""


def length_not_recorded(name: str, length: int, multiple: int = MULTIPLE) -> str | None:
    """Return why a model's code is not recorded for a sequence length, with the nearest that are; None if it is."""
    below = length - length % multiple
    if below == length:
        return None
    near = f"{below} or {below + multiple}" if below else str(multiple)
    return f"seq: {length} is not allowed for {name}; its code is recorded for multiples of {multiple} tokens: {near}"


class RecordingSpec(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The code to record: that of a config.json, or a user's function."""

    config: dict[str, Any] | None = None
    """A config.json of Hugging Face's."""
    module: UserModule | None = None
    lora: LoRA | None = None
    """PEFT's adapters, which are put into the Hugging Face model."""
    sequence_length: int = 4096
    """Says on which side of a sliding window the sequences are that the recording is for."""

    fixed_length: bool = False
    """Whether to record for ``sequence_length`` alone: for code that loops over the sequence."""

    activation_offload: bool = False
    """Whether to record, too, what runs under activation offload, which takes as long again."""

    before_sm80: bool = False
    """Whether to record what runs on GPUs of compute capability 7.0 and 7.5 (Gpu.is_before_sm80)."""

    @property
    def only_length(self) -> int | None:
        """The one sequence length that the recording is for; None if it is for several."""
        return self.sequence_length if self.fixed_length else None

    def _check(self) -> None:
        if (self.config is None) == (self.module is None):
            raise SpecError("a recording needs a config.json or a user's module, and not both")
        if self.lora is not None and self.config is None:
            raise SpecError("lora: goes with a config.json; a user's function puts in its adapters itself")


class RecordingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A recording, or an error."""

    recorded: RecordedCode | None = None
    error: str | None = None
    """The error in one line."""
    users_mistake: bool = True
    """Whether the user can correct the error."""
    seconds: float = 0.0
