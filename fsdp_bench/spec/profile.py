"""A calibration: measured times of a machine's operators, copies and collectives. One TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fsdp_bench.spec.checked import Checked, Count, Positive
from fsdp_bench.spec.codec import from_builtins, read_document, to_builtins, write_atomically
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import Family, ModelShape

SCHEMA_VERSION = 1

Hardware = Literal["cuda", "cpu"]
"""What was measured: GPUs or a CPU."""

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


CASTING_CHUNK_CAT = "fsdp::chunk_cat to another dtype"
"""fully_shard's copy of gradients into one buffer, where they are reduced in another dtype than they have; on a CPU it
takes several times as long as the copy alone, or as a cast."""


Seconds = Annotated[float, Meta(ge=0)]
"""0 where it was smaller than the noise."""


class Timed(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One timed operation: the mean over repetitions and over ranks, which all ran it at once."""

    seconds: Positive


class MatmulTime(Timed, frozen=True, kw_only=True):
    """A matrix product, m x k by k x n."""

    layout: str
    """Which factor is transposed: ``nt`` forward, ``nn`` for the input's gradient, ``tn`` for the weight's."""
    dtype: str
    m: Count
    n: Count
    k: Count


class AttentionTime(Timed, frozen=True, kw_only=True):
    """Causal scaled dot product attention of one sequence."""

    backward: bool
    dtype: str
    heads: Count
    length: Count
    head_dim: Count


class OperatorTime(Timed, frozen=True, kw_only=True):
    """An operator that memory bounds."""

    operator: str
    dtype: str
    num_bytes: Count
    """Read and written."""


class CopyTime(Timed, frozen=True, kw_only=True):
    """A copy between pinned host memory and the device."""

    direction: str
    """``to_device`` or ``to_host``."""
    num_bytes: Count


class OptimizerTime(Timed, frozen=True, kw_only=True):
    """One step on equal tensors in fp32."""

    kind: str
    """As in a setup; with ``host `` before it where it runs in host memory beside a GPU."""
    num_tensors: Count
    num_elements: Count
    """Of all tensors."""


class CollectiveTime(Timed, frozen=True, kw_only=True):
    """A collective of a group, while all other groups of that size do the same."""

    kind: str
    group_size: Count
    neighbours: bool
    """The group's ranks follow each other; otherwise they are as far apart as they can be."""
    message_bytes: Count


class RankMeasurements(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of all ranks, before the host's overhead is derived from them."""

    num_ranks: Count
    threads_per_rank: Count
    device_name: str
    versions: dict[str, str]
    model_step_seconds: dict[str, float]
    """A step of CALIBRATION_MODEL without communication: ``none`` unwrapped, ``fsdp1``, ``fsdp2``."""
    context_bytes: int | None = None
    """Memory of rank 0's process on its GPU beyond what the caching allocator reserved, before any communicator was
    made: the CUDA context with the code of kernels that ran. None on a CPU, and where NVML does not show it."""
    matmul: tuple[MatmulTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    operator: tuple[OperatorTime, ...] = ()
    copy: tuple[CopyTime, ...] = ()
    optimizer: tuple[OptimizerTime, ...] = ()
    collective: tuple[CollectiveTime, ...] = ()


class RankProfile(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Measurements with a certain number of ranks at once; on a CPU they share its cores."""

    num_ranks: Count
    threads_per_rank: Count
    launch_seconds: Seconds
    """The host's overhead for one operator: Python, the dispatcher, autograd."""
    hook_seconds: dict[str, Seconds]
    """The time of one of a wrapper's hooks, by api."""
    context_bytes: Annotated[int, Meta(ge=0)] | None = None
    """Memory of a CUDA context, as in RankMeasurements."""
    matmul: tuple[MatmulTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    operator: tuple[OperatorTime, ...] = ()
    copy: tuple[CopyTime, ...] = ()
    optimizer: tuple[OptimizerTime, ...] = ()
    collective: tuple[CollectiveTime, ...] = ()

    @property
    def lost_in_noise(self) -> tuple[str, ...]:
        """Overheads of the host that were smaller than the noise, as text; predictions leave them out.

        The host's times are small differences of large sums: the time of CALIBRATION_MODEL's step less its operators'.
        """
        lost = ["the host's time for an operator"] if self.launch_seconds == 0 else []
        return (
            *lost,
            *(f"the host's time for a hook of {api}" for api, took in self.hook_seconds.items() if took == 0),
        )


class Profile(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine's calibration."""

    schema_version: int = SCHEMA_VERSION
    machine: str
    device: Hardware
    device_name: str
    measured_on: str
    """The day."""
    versions: dict[str, str]
    ranks: tuple[RankProfile, ...]

    def _check(self) -> None:
        if not self.ranks:
            raise SpecError("ranks: none; a calibration holds at least one number of ranks")

    @property
    def context_bytes(self) -> int | None:
        """Memory of a CUDA context: the most that was measured; None where it was not."""
        return max((one.context_bytes for one in self.ranks if one.context_bytes is not None), default=None)

    @property
    def lost_in_noise(self) -> tuple[str, ...]:
        """Overheads that were smaller than the noise, with the number of ranks."""
        return tuple(f"{name} ({one.num_ranks} ranks)" for one in self.ranks for name in one.lost_in_noise)

    def for_ranks(self, ranks_on_node: int) -> RankProfile:
        """Return what was measured with so many ranks, or with the nearest number of them."""
        return min(self.ranks, key=lambda one: (abs(one.num_ranks - ranks_on_node), one.num_ranks))


def read_profile(path: Path) -> Profile:
    """Read a calibration.

    Raises:
        SpecError: for a file that cannot be read, is no TOML, or is of another shape or a newer version.
    """
    try:
        content = read_document(path, "TOML")
    except SpecError as error:
        raise SpecError(f"{error}; `fsdp-bench calibrate` writes such a file") from None
    version = content.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SpecError(f"{path}: calibration of version {version}; this fsdp-bench reads up to {SCHEMA_VERSION}")
    try:
        return from_builtins(content, Profile)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: no calibration: {error}; `fsdp-bench calibrate` writes one") from None


def write_profile(profile: Profile, path: Path) -> None:
    """Write a calibration, whole or not at all.

    Raises:
        SpecError: when it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomically(path, msgspec.toml.encode(to_builtins(profile)))
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
