"""Input and output of the subprocesses that build a model's code: to say what it builds, and to record it."""

from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.recording.recorded import RecordedCode
from fsdp_bench.spec.subprocesses.dry_run import Answer, CodeToBuild


class DescriptionAnswer(Answer, frozen=True, kw_only=True):
    """The model that the code builds, named for its class, or an error."""

    described: ModelCode | None = None


class RecordingSpec(CodeToBuild, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The code to record."""

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


class RecordingAnswer(Answer, frozen=True, kw_only=True):
    """A recording, or an error."""

    recorded: RecordedCode | None = None
    seconds: float = 0.0
