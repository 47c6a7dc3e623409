"""The errors of predictions of published runs: a range beside a predicted speed, and beside a predicted peak.

catalog/prediction_errors.json has the errors that tools/validate/published finds. ``python -m
tools.validate.published.ranges`` prints it anew, and a test holds it equal to what is found.
"""

from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

import msgspec

from fsdp_bench.rates.datasheet import products_efficiency
from fsdp_bench.spec.calibration_profile import Calibration, Profile, Scaling
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.setup import Float8, Offload, TrainSetup


class Errors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The errors of published runs of one kind."""

    num_runs: int
    families: tuple[str, ...]
    """Publishers."""
    lowest: float
    """``predicted / published - 1``."""
    highest: float


class HeldOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of one publisher's runs in the range that was made from all other publishers' runs."""

    num_runs: int
    inside: int


Nodes = Literal["one node", "several nodes"]


class SpeedErrors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The errors of speed between which 90 % of a further publisher's runs are expected, by the published runs."""

    num_runs: int
    families: tuple[str, ...]
    """Publishers."""
    gpus: tuple[str, ...]
    """Generations of GPUs: ``A100``, ``H100``."""
    nodes: dict[Nodes, tuple[float, float]]
    """The lowest and the highest error, ``predicted / published - 1``, of runs on one node and on several."""
    held_out: dict[str, HeldOut]
    """The range tried on each publisher, by its name."""


class ScriptErrors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The errors of rehearsals of measured scripts: all of them, the extremes included.

    Compared are scripts that compute on the GPU alone, and the speed of those whose whole step has a time.
    """

    speed: Errors
    memory: Errors
    """The errors of the peak of reserved memory."""
    gpus: tuple[str, ...]


OwnRunKind = Literal["one node", "several nodes", "otherwise"]
"""Two runs on one node each, or on several each, both compiled or both eager; or runs that differ in this."""


class PredictionErrors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The errors of speed, of peaks by ``eager`` and ``compiled``, and of rehearsed scripts."""

    speed: SpeedErrors
    memory: dict[str, Errors]
    scripts: ScriptErrors
    own_run: dict[OwnRunKind, Errors] = {}
    """Errors of speed with rates scaled by another run of the same publisher on the same GPU, by how alike they are."""


class Range(NamedTuple):
    """The speeds that earlier errors leave possible, as multiples of the predicted one."""

    slowest: float
    fastest: float
    because: str
    """The errors, in words."""
    is_like_published: bool = True
    """Whether the runs were on GPUs of the same kind, joined in the same way."""

    def step_seconds(self, predicted: float) -> tuple[float, float]:
        """Return the shortest and the longest step."""
        return predicted / self.fastest, predicted / self.slowest


@cache
def prediction_errors() -> PredictionErrors:
    """Return the errors that come with fsdp-bench."""
    data = files("fsdp_bench.catalog").joinpath("prediction_errors.json").read_bytes()
    return msgspec.json.decode(data, type=PredictionErrors)


_OVER_PCIE = (3.9, 8.7)
"""By how much steps of two published runs on eight A10Gs took longer than predicted (docs/validation.md)."""
LONGER_OVER_PCIE = f"two published runs on A10Gs took {_OVER_PCIE[0]} and {_OVER_PCIE[1]} times as long"


_UNCOMPARED = (0.3, 1.2)
"""Multiples of the predicted speed that are assumed possible where no run was ever compared."""
_MOST_GPUS = 512
"""The most GPUs of a compared run."""


def range_of(hardware: Hardware, setup: TrainSetup, is_over_pcie: bool = False) -> Range:
    """Return the range of a setup's speed: a wide one, with its reason, where no run like it was compared.

    ``is_over_pcie``: whether PCIe alone joins the GPUs of a node. Then it may be as slow as the slowest published run.
    """
    found, gpu = prediction_errors().speed, hardware.gpu
    unlike = _unlike_compared(gpu, setup)
    if is_over_pcie and _resembles_published(setup):
        return Range(1 / max(_OVER_PCIE), 1.0, f"over PCIe {LONGER_OVER_PCIE} as predicted", is_like_published=False)
    if unlike is not None:
        slowest, fastest = _UNCOMPARED
        because = f"no run {unlike} was ever compared: {slowest:g} to {fastest:g} times the predicted speed is assumed"
        return Range(slowest, fastest, because, is_like_published=False)
    nodes: Nodes = "several nodes" if hardware.num_nodes > 1 else "one node"
    lowest, highest = found.nodes[nodes]
    because = (
        f"90% of another publisher's runs on {nodes} are expected to be predicted {-lowest:.0%} too slow to"
        f" {highest:.0%} too fast, by {found.num_runs} published runs of {len(found.families)} publishers"
    )
    if gpu.older_cublas is not None and not gpu.has_older_cublas:
        because += f"; those on {gpu.name} are taken to have had CUDA before {gpu.older_cublas.before_cuda} (--cuda)"
    return Range(1 / (1 + highest), 1 / (1 + lowest), because)


def _unlike_compared(gpu: Gpu, setup: TrainSetup) -> str | None:
    """Return why no run like a setup was compared, to follow "no run"; None if runs were."""
    if not _is_compared(gpu):
        return f"on {gpu.name}"
    if setup.float8 is not Float8.NONE:
        return "in float8"
    if not _resembles_published(setup):
        return "in fp32" if setup.precision.compute == "fp32" else "with offload"
    return f"on more than {_MOST_GPUS} GPUs" if setup.world_size > _MOST_GPUS else None


_CHIPS = {(8.0, 108): "A100", (9.0, 132): "H100"}
"""The generation by compute capability and multiprocessors: an H200 computes as an H100 does."""


def _is_compared(gpu: Gpu) -> bool:
    """Whether runs on its chip were compared, on SXM boards: none was on a PCIe card, or beside a Grace CPU."""
    chip = _CHIPS.get((gpu.compute_capability or 0.0, gpu.num_multiprocessors or 0), gpu.name.split("-")[0])
    return chip in prediction_errors().speed.gpus and "SXM" in gpu.name.upper()


def speed_range(
    hardware: Hardware, setup: TrainSetup, is_over_pcie: bool, calibration: Calibration | None, products: float
) -> Range | None:
    """Return the range of a setup's speed by the rates that predict it; None for a machine's measured rates.

    ``products``: the fraction of the step in matrix products.
    """
    if isinstance(calibration, Profile):
        return None
    if calibration is not None and calibration.factors:
        return range_from_own_run(hardware.gpu, setup, hardware.num_nodes, calibration)
    return with_older_cuda(range_of(hardware, setup, is_over_pcie), hardware.gpu, products)


def range_from_own_run(gpu: Gpu, setup: TrainSetup, num_nodes: int, run: Scaling) -> Range | None:
    """Return the range of a speed with rates that a run of the user's own has scaled.

    None if no published run resembles the setup, or the run multiplied in another dtype.
    """
    known = prediction_errors()
    if not _is_compared(gpu):
        return None
    if not _resembles_published(setup) or run.precision != f"{setup.precision.compute}, float8 {setup.float8}":
        return None
    is_alike = run.is_compiled == setup.compiles and (run.num_nodes > 1) == (num_nodes > 1)
    kind: OwnRunKind = "otherwise" if not is_alike else "several nodes" if num_nodes > 1 else "one node"
    if (found := known.own_run.get(kind)) is None:
        return None
    pair = "on unlike ones" if kind == "otherwise" else f"alike, on {kind}"
    because = (
        f"each of {found.num_runs} published runs with rates scaled by another of its publisher ({pair}): 95% were"
        f" predicted {-found.lowest:.0%} too slow to {found.highest:.0%} too fast"
    )
    return Range(1 / (1 + found.highest), 1 / (1 + found.lowest), because)


def with_older_cuda(span: Range | None, gpu: Gpu, products: float) -> Range | None:
    """Return the range of a speed whose slow end is with an older cuBLAS, where nothing says the version of CUDA.

    ``products``: the fraction of the step in matrix products, as predicted with the newer cuBLAS.
    """
    older = gpu.older_cublas
    if span is None or older is None or gpu.cuda is not None:
        return span
    new, old = products_efficiency(gpu), products_efficiency(gpu.with_cuda("1.0"))
    longer = products * (new / old - 1)
    if longer < 0.005:
        return span
    return span._replace(
        slowest=span.slowest / (1 + longer),
        because=f"{span.because}; CUDA before {older.before_cuda} would take {longer:.0%} longer: matrix products at"
        f" {old:.0%} of the peak, not {new:.0%} ({older.source.title}); --cuda says which",
    )


_NEARLY_FULL, _LONGER_IF_NEARLY_FULL = 0.97, 1.36
"""The part of the memory that a nearly full GPU has reserved, and how many times as long as predicted steps then took:
up to 1.36 for 13B on eight A100 of 40 GB and 30B with 8192 tokens, of MPT (llm-foundry, scripts/train/benchmarking)."""


def if_nearly_full(span: Range, needed_bytes: int, usable_bytes: int | None) -> Range:
    """Return the range of a speed whose slow end is that of nearly full GPUs, if this one is."""
    if usable_bytes is None or needed_bytes < _NEARLY_FULL * usable_bytes:
        return span
    because = (
        f"{span.because}; {min(needed_bytes / usable_bytes, 1):.0%} of the memory is reserved: on GPUs nearly full"
    )
    because += f" published runs took up to {_LONGER_IF_NEARLY_FULL:g} times as long as predicted"
    return span._replace(slowest=min(span.slowest, 1 / _LONGER_IF_NEARLY_FULL), because=because)


def range_of_script(gpu: Gpu, published: Range | None, is_on_gpu: bool) -> Range | None:
    """Return the range of a rehearsed script's speed: as slow and as fast as measured scripts or published runs were.

    Args:
        gpu: the GPU.
        published: the range of a setup like the script's, by published runs.
        is_on_gpu: whether the step computes on the GPU alone, as all compared scripts do.
    """
    found = prediction_errors().scripts
    if not is_on_gpu or (published is None and gpu.name.split("-")[0] not in found.gpus):
        return None
    slowest, fastest, speed = 1 / (1 + found.speed.highest), 1 / (1 + found.speed.lowest), found.speed
    because = (
        f"{speed.num_runs} runs of scripts on one {' or '.join(found.gpus)} were rehearsed {-speed.lowest:.0%} too slow"
        f" to {speed.highest:.0%} too fast"
    )
    if published is None:
        return Range(slowest, fastest, because)
    slowest, fastest = min(slowest, published.slowest), max(fastest, published.fastest)
    return Range(slowest, fastest, f"{because}; {published.because}", published.is_like_published)


def _resembles_published(setup: TrainSetup) -> bool:
    """Whether it computes in 16 bits and keeps everything on the GPU, as all compared runs did."""
    is_on_gpu = setup.offload is Offload.NONE and not setup.activation_offload
    return setup.precision.compute != "fp32" and setup.float8 is Float8.NONE and is_on_gpu


class PeakRange(NamedTuple):
    """The peaks that earlier errors leave possible, as multiples of the predicted one."""

    lowest: float
    highest: float
    because: str
    """The errors, in words."""


def peak_range(compiled: bool) -> PeakRange | None:
    """Return the range of a peak of memory: what other frameworks' code took in published runs of the same kind."""
    kind = "compiled" if compiled else "eager"
    found = prediction_errors().memory.get(kind)
    return None if found is None else _peaks(found, "other frameworks' code took", f"published {kind} peaks")


def peak_range_of_script() -> PeakRange:
    """Return the range of a rehearsed peak of reserved memory: what measured scripts took."""
    return _peaks(prediction_errors().scripts.memory, "measured scripts took", "runs")


def _peaks(found: Errors, took: str, what: str) -> PeakRange:
    low, high = 1 / (1 + max(found.highest, 0.0)), 1 / (1 + min(found.lowest, 0.0))
    less = f"{1 - low:.0%} less to " if low < 1 else "up to "
    more = f"{high - 1:.0%}" if high >= 1.01 else f"{high - 1:.1%}"
    return PeakRange(low, high, f"{took} {less}{more} more in {found.num_runs} {what}")
