"""Input and output of a rehearsal: the GPU; what to run, for the user's Python; what that reports of the script."""

from collections.abc import Iterator
from enum import StrEnum
from itertools import groupby
from typing import Any

import msgspec

from fsdp_bench.spec.checked import Checked, Count, Positive
from fsdp_bench.spec.subprocesses.issued import IssuedStep


class RehearsedGpu(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPU that the stand-in for NVIDIA's libraries passes for in a rehearsed sweep."""

    name: str
    product_name: str
    """As torch.cuda.get_device_name prints it."""
    usable_bytes: Count
    """Memory that a process can use; what is kept free is part of it."""
    kept_free_bytes: int
    """Memory that is kept free for the CUDA context and NCCL."""
    compute_capability: Positive
    num_multiprocessors: Count

    @property
    def available_bytes(self) -> int:
        """Memory that torch's allocator can reserve."""
        return self.usable_bytes - self.kept_free_bytes


class RandomData(msgspec.Struct, frozen=True, kw_only=True):
    """What takes the place of tokenizers and datasets that are not on this machine."""

    tokens: int = 2048
    """Words in a text; a random tokenizer makes each of them one token."""
    columns: dict[str, str] = {}
    """The columns of a dataset, with what is in each: ``chat``, ``text:4096``. Empty: those that are known of it."""
    configs: dict[str, dict[str, Any]] = {}
    """The config.json of models that may not be on this machine, by ``model_key`` of rehearse/inside/replace/hub.py."""


class RehearsalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The way a command is rehearsed, whichever of its ranks runs: the world, the steps, and what is assumed."""

    world_size: int | None
    """None: as the launcher's own arguments say."""
    gpus_per_node: int
    steps: int | None = None
    """The script is ended after so many optimizer steps. None: it runs to its end."""
    ends_early: bool = False
    """Whether it is ended before, as soon as a step repeats the one before in every allocation."""
    snapshot: str | None = None
    """A file for PyTorch's memory snapshot, as an absolute path."""
    random_weights: bool = False
    """Whether models need no checkpoint."""
    random_data: RandomData | None = None
    balanced_routing: bool = False
    """Whether each expert of a mixture of experts gets equally many tokens."""
    stops_at_unsupported: bool = True
    """Whether a call fails that the stand-in for NVIDIA's libraries does not support. If not, it is counted and does
    nothing."""
    notes_work: bool = False
    """Whether it is noted what one step issues, from which its time is computed."""
    strategy: str | None = None
    """The sharding strategy that accelerate is to choose. None: as its arguments and its config say."""
    edited: dict[str, str] = {}
    """Files, by absolute paths, with the text that the script finds in them instead of the disk's."""
    messages: dict[str, tuple[str, ...]] = {}
    """Small messages of integers that other ranks have sent to this one, by the number of the rank that sends."""


class RehearsalPlan(RehearsalOptions, frozen=True, kw_only=True):
    """One rank of a command to run: what inside/main.py reads."""

    launcher: str
    words: tuple[str, ...]
    """The words that follow the launcher, or Python and its own options."""
    rank: int
    report: str
    """The file for the report."""
    imported: str | None = None
    """A file for the modules that the script imports, if somebody asks for them."""


class RehearsalOutcome(StrEnum):
    """The end of the script."""

    STOPPED = "stopped"
    """It was ended after the steps that were asked for."""
    ENDED = "ended"
    """It came to its own end."""
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    """It raised another exception, or exited with an error."""
    TIMED_OUT = "timed_out"
    """It was ended after the time that it was given (--timeout)."""
    INTERRUPTED = "interrupted"


class SourceLine(msgspec.Struct, frozen=True):
    """A line of Python."""

    file: str
    line: int
    function: str
    text: str = ""
    """The line's own text, without the blanks around it. Empty where it is not known."""


class PhasePeaks(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one step: peaks of PyTorch's caching allocator in it."""

    step: int
    """From 1; the first includes loading."""
    phase: str
    """``load``, ``forward``, ``backward`` or ``optimizer``."""
    allocated_bytes: int
    reserved_bytes: int
    active_bytes: int
    num_alloc_retries: int
    """Allocation retries since the start."""
    num_ooms: int


class HeldLine(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that one line holds at the peak."""

    line: SourceLine | None
    """The innermost line outside of torch. None for autograd's thread, which has no Python stack."""
    user_line: SourceLine | None
    """The innermost line of the user's own files."""
    num_bytes: int
    num_tensors: int


class GpuRead(msgspec.Struct, frozen=True, kw_only=True):
    """A line that reads values from the GPU which are not those of training."""

    line: SourceLine | None
    user_line: SourceLine | None
    operator: str
    """``item``, ``nonzero`` and the like, or ``copy``."""
    decides_sizes: bool
    """Whether the operator's output is as large as the values say."""
    count: int
    num_bytes: int


class ScriptFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The exception that ended the script."""

    type: str
    message: str
    line: SourceLine | None
    user_line: SourceLine | None
    traceback: str

    @property
    def told(self) -> str:
        """The first line of its message, to stand after its type; empty without a message."""
        return "".join(f": {line}" for line in self.message.strip().splitlines()[:1])


class RehearsalReport(msgspec.Struct, frozen=True, kw_only=True):
    """The script's report, as one rank."""

    outcome: RehearsalOutcome
    failure: ScriptFailure | None
    sentence: str
    """The command, and the rank that was run instead, in one line."""
    rank: int
    world_size: int
    gpus_per_node: int
    num_steps: int
    spans: tuple[PhasePeaks, ...]
    lines_at_peak: tuple[HeldLine, ...] | None
    """The largest first. None if the script records PyTorch's memory history itself, or switched it off."""
    curve: tuple[tuple[int, int, int], ...] | None
    """Time in microseconds, allocated bytes, reserved bytes."""
    step_ends_us: tuple[tuple[int, str, int], ...]
    """Step, phase and the time in microseconds at which a span ended."""
    reads: tuple[GpuRead, ...]
    """Reads of floating-point values, and of integers made from them."""
    num_known_reads: int
    """Reads of small integers, whose values are those of training."""
    unsupported: dict[str, int]
    """Functions that the stand-in lacks, with how often they were called."""
    stops_at_unsupported: bool
    """Whether such a call fails."""
    process_groups: dict[str, int]
    """The number of ranks of each process group that has carried collectives."""
    collectives: tuple[tuple[str, str, int], ...]
    """Process group, operator, and how often it was called."""
    peak_host_bytes: int
    """The most memory that the rehearsal itself took."""
    peak_unwritten_host_bytes: int
    """Bytes of host tensors that a real run would have written, beside them."""
    notes: tuple[str, ...]
    """The assumptions and replacements that the command line asks for, one sentence each."""
    torch: str
    cuda: str
    device_name: str | None
    """None if the script never used the GPU."""
    allocator_settings: str | None
    issued: IssuedStep | None = None
    """The work that one step issued. None if nobody asked, or if there was no whole step after the first."""
    user_files: tuple[str, ...] = ()
    """The files that decide what the script does: those that the command names, and the user's own modules."""
    why_nothing_issued: str | None = None
    """Why there is no such step, where that is known."""
    group_ranks: dict[str, tuple[int, ...]] = {}
    """The ranks of each process group that has carried collectives, where torch says them."""
    peers: tuple[int, ...] = ()
    """The ranks to which this one sends, or from which it receives: other pipeline stages."""
    sent: dict[str, tuple[str, ...]] = {}
    """Small messages of integers, in hexadecimal digits, by the number of the rank that receives them."""
    waits_for: int | None = None
    """The rank whose message the script needs to go on. It was ended there, and is to be run again."""

    @property
    def peak(self) -> PhasePeaks | None:
        """The first span with the highest allocated memory. None if the script never used the GPU."""
        return max(self.spans, key=lambda span: span.allocated_bytes, default=None)

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest reserved memory."""
        return max((span.reserved_bytes for span in self.spans), default=0)

    @property
    def num_alloc_retries(self) -> int:
        """Allocation retries."""
        return max((span.num_alloc_retries for span in self.spans), default=0)

    @property
    def num_retries_in_last_step(self) -> int:
        """The retries in the last step that was begun."""
        last = max((span.step for span in self.spans), default=0)
        earlier = (span.num_alloc_retries for span in self.spans if span.step < last)
        return self.num_alloc_retries - max(earlier, default=0)

    @property
    def sizes_from_values(self) -> tuple[GpuRead, ...]:
        """The reads on which sizes depend, so that the peaks are those of this run alone."""
        return tuple(read for read in self.reads if read.decides_sizes)

    def steps(self) -> Iterator[tuple[int, list[PhasePeaks]]]:
        """Yield each step that made an optimizer step, with its spans."""
        for step, spans in groupby(self.spans, key=lambda span: span.step):
            if step <= self.num_steps:
                yield step, list(spans)
