"""A calibration, one TOML file: a machine's measured times, or what a run or a host changes of a datasheet's rates."""

from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from fsdp_bench.spec.checked import Checked, Count, Positive
from fsdp_bench.spec.codec import from_builtins, to_builtins
from fsdp_bench.spec.errors import SpecError, not_allowed
from fsdp_bench.spec.files import read_document, write_atomically
from fsdp_bench.spec.model import Family, ModelShape

SCHEMA_VERSION = 1

DeviceType = Literal["cuda", "cpu"]
"""The measured device: GPUs or a CPU."""

CALIBRATION_MODEL = ModelShape(
    name="calibration model",
    family=Family.LLAMA,
    num_hidden_layers=6,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=640,
    vocab_size=2048,
    max_position_embeddings=128,
)
"""The small model whose steps ``calibrate`` times to find the host's overhead: Python, the dispatcher, hooks. It is
large enough to evict the host's code from a core's caches, as training does."""
CALIBRATION_SEQUENCE_LENGTH = 128
HOST_MODEL = ModelShape(
    name="host model",
    family=Family.GPT2,
    num_hidden_layers=6,
    hidden_size=8,
    num_attention_heads=1,
    num_key_value_heads=1,
    intermediate_size=8,
    vocab_size=16,
    max_position_embeddings=2,
)
"""A model whose tensors are so small that a CPU's kernels take next to no time: the rest is the host's own. Its norms
are one operator on a CPU, too, unlike Llama's."""
HOST_SEQUENCE_LENGTH = 2


CASTING_CHUNK_CAT = "fsdp::chunk_cat to another dtype"
"""fully_shard's copy of gradients into one buffer, if they are reduced in a dtype other than their own. On a CPU it
takes several times as long as the copy alone, or as a cast."""


Seconds = Annotated[float, Meta(ge=0)]
"""A time in seconds; 0 if it was smaller than the noise."""


class TimedOperation(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One timed operation: the mean over repetitions and over all ranks, which ran it at the same time."""

    seconds: Positive


class MatmulTime(TimedOperation, frozen=True, kw_only=True):
    """The time of a matrix product, m x k by k x n."""

    layout: str
    """Transposed factors: ``nt`` in forward, ``nn`` for the input's gradient, ``tn`` for the weight's gradient."""
    dtype: str
    m: Count
    n: Count
    k: Count


class AttentionTime(TimedOperation, frozen=True, kw_only=True):
    """The time of causal scaled dot product attention of one sequence."""

    backward: bool
    dtype: str
    heads: Count
    length: Count
    head_dim: Count


class OperatorTime(TimedOperation, frozen=True, kw_only=True):
    """The time of a memory-bound operator."""

    operator: str
    dtype: str
    num_bytes: Count
    """Bytes read and written."""


class CopyTime(TimedOperation, frozen=True, kw_only=True):
    """The time of a copy between pinned host memory and the device."""

    direction: str
    """``to_device`` or ``to_host``."""
    num_bytes: Count


class OptimizerTime(TimedOperation, frozen=True, kw_only=True):
    """The time of one optimizer step on equal fp32 tensors."""

    kind: str
    """The optimizer as in a setup, with the prefix ``host `` if it runs in host memory on a machine with GPUs."""
    num_tensors: Count
    num_elements: Count
    """Number of elements of all tensors together."""


class CollectiveTime(TimedOperation, frozen=True, kw_only=True):
    """The time of a collective in one group, while all other groups of this size run the same collective."""

    kind: str
    group_size: Count
    neighbours: bool
    """Whether the ranks of a group are consecutive; otherwise they are as far apart as possible."""
    message_bytes: Count


class Measurements(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of one number of ranks that run at the same time. On a CPU they share its cores."""

    num_ranks: Count
    threads_per_rank: Count
    context_bytes: Annotated[int, Meta(ge=0)] | None = None
    """GPU memory of rank 0's process minus reserved memory, before any communicator exists: the CUDA context and the
    code of loaded kernels. None on a CPU, and if NVML does not show it."""
    matmul: tuple[MatmulTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    operator: tuple[OperatorTime, ...] = ()
    copy: tuple[CopyTime, ...] = ()
    optimizer: tuple[OptimizerTime, ...] = ()
    collective: tuple[CollectiveTime, ...] = ()


class RankMeasurements(Measurements, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of all ranks. The host's overhead is not derived from them yet."""

    device_name: str
    versions: dict[str, str]
    model_step_seconds: dict[str, float]
    """Seconds of a step of CALIBRATION_MODEL without communication: unwrapped (``none``), ``fsdp1``, ``fsdp2``."""


class RankProfile(Measurements, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Measurements, and the host's overhead that follows from them."""

    launch_seconds: Seconds
    """The host's overhead for one operator: Python, the dispatcher, autograd."""
    hook_seconds: dict[str, Seconds]
    """The host's overhead for one hook of the wrapper, by api."""

    @property
    def lost_in_noise(self) -> tuple[str, ...]:
        """The host's overheads, each a small difference of large sums, that were lost in the noise: predicted as 0."""
        lost = ["the host's time for an operator"] if self.launch_seconds == 0 else []
        return (
            *lost,
            *(f"the host's time for a hook of {api}" for api, took in self.hook_seconds.items() if took == 0),
        )


class Profile(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine's calibration."""

    schema_version: int = SCHEMA_VERSION
    machine: str
    device: DeviceType
    device_name: str
    measured_on: str
    """The date of the measurement."""
    versions: dict[str, str]
    ranks: tuple[RankProfile, ...]

    def _check(self) -> None:
        if not self.ranks:
            raise SpecError("ranks: none; a calibration holds at least one number of ranks")

    @property
    def context_bytes(self) -> int | None:
        """Memory of the CUDA context: the largest measured value. None if it was not measured."""
        return max((one.context_bytes for one in self.ranks if one.context_bytes is not None), default=None)

    @property
    def lost_in_noise(self) -> tuple[str, ...]:
        """Overheads that were smaller than the noise, each with its number of ranks."""
        return tuple(f"{name} ({one.num_ranks} ranks)" for one in self.ranks for name in one.lost_in_noise)

    def for_ranks(self, ranks_on_node: int) -> RankProfile:
        """Return the measurements with the number of ranks nearest to ``ranks_on_node``."""
        return min(self.ranks, key=lambda one: (abs(one.num_ranks - ranks_on_node), one.num_ranks))


WorkClass = Literal["matrix_products", "attention", "other_operators", "optimizer", "communication", "copies"]
"""Classes of work that a run's rates are told apart by; ``optimizer`` has all kernels of ``torch._foreach_*``."""
WORK_CLASSES: tuple[WorkClass, ...] = get_args(WorkClass)


class Scaling(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of a datasheet's rates by a run of the user's own, or a host's own times alone."""

    schema_version: int = SCHEMA_VERSION
    measured_on: str
    """The date."""
    source: str
    """The measurement, in words."""
    gpu: str | None = None
    """The GPU of the run, by its name in the catalogue. None: only a host was measured, for any GPU."""
    datasheet_flops_per_second: float | None = None
    """The rate of its matrix products by the datasheet, which the factors are over."""
    setup: str = ""
    """The setup of the run, in words."""
    num_nodes: Count = 1
    is_compiled: bool = False
    """Whether the run's blocks were compiled."""
    precision: str = ""
    """The dtype in which the run multiplied, and the recipe of float8."""
    factors: dict[WorkClass, Positive] = {}
    """The time of each class of work, by the datasheet's. A class that is not named takes as long."""
    launch_seconds: Positive | None = None
    """The host's time for one operator. None: not measured."""
    hook_seconds: dict[str, Seconds] = {}
    """The host's time for one hook of the wrapper, by api."""

    def _check(self) -> None:
        for name in self.factors:
            if name not in WORK_CLASSES:
                raise not_allowed("factors", name, WORK_CLASSES)
        if self.factors and self.gpu is None:
            raise SpecError("gpu: none; factors are of the GPU of a run")
        if not self.factors and self.launch_seconds is None:
            raise SpecError("factors: none; rates scaled by a run have some, a host's times have launch_seconds")


Calibration = Profile | Scaling
"""The two kinds of calibration that ``--calibration`` takes."""


def read_calibration(path: Path) -> Calibration:
    """Read a calibration of either kind.

    Raises SpecError for a file that cannot be read, is not TOML, or has another shape or a newer version.
    """
    try:
        content = read_document(path, "TOML")
    except SpecError as error:
        raise SpecError(f"{error}; `fsdp-bench calibrate` writes such a file") from None
    version = content.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SpecError(f"{path}: calibration of version {version}; this fsdp-bench reads up to {SCHEMA_VERSION}")
    kind: type[Calibration] = Scaling if "ranks" not in content and "source" in content else Profile
    try:
        return from_builtins(content, kind)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: no calibration: {error}; `fsdp-bench calibrate` writes one") from None


def read_profile(path: Path) -> Profile:
    """Read a machine's calibration. Raises SpecError as ``read_calibration``, and for one of a run or a host."""
    found = read_calibration(path)
    if isinstance(found, Scaling):
        raise SpecError(f"{path}: no machine's rates: {found.source}; plain `fsdp-bench calibrate` measures them")
    return found


def write_profile(profile: Calibration, path: Path) -> None:
    """Write a calibration, whole or not at all. Raises SpecError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {name: value for name, value in to_builtins(profile).items() if value is not None}
    try:
        write_atomically(path, msgspec.toml.encode(known))
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
