"""The time of a step's work on a calibrated machine: measured seconds, interpolated between sizes.

Seconds are interpolated linearly between two measured sizes. For matrix products and attention the logarithm of the
rate is interpolated over the logarithms of the dimensions. The rate of the largest size holds for larger sizes.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import product

from fsdp_bench.rates.datasheet import HOST_ADAM_BYTES_PER_SECOND, Rates, attention_flops, datasheet
from fsdp_bench.rates.scaled import scaled
from fsdp_bench.simulate.events import IN_HOST_MEMORY, Work
from fsdp_bench.spec.calibration_profile import CASTING_CHUNK_CAT, Calibration, Profile, RankProfile
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import TrainSetup

Points = list[tuple[float, float]]
"""Pairs of size and seconds, sorted by size."""

ALIKE = {
    "aten::_amp_foreach_non_finite_check_and_unscale_": "aten::mul_out",
    "aten::_foreach_copy_": "aten::_to_copy",
    "aten::_foreach_mul_": "aten::mul_out",
    "aten::_foreach_norm": "aten::sum",
    "aten::_fused_rms_norm_backward": "aten::native_layer_norm_backward",
    "aten::constant_pad_nd": "aten::clone",
    "aten::div": "aten::mul",
    "aten::max": "aten::sum",
    "aten::min": "aten::sum",
    "aten::ne": "aten::neg",
    "aten::nll_loss_backward": "aten::neg",
    "aten::nll_loss_forward": "aten::neg",
    "aten::rsqrt": "aten::neg",
    "aten::slice_backward": "aten::clone",
    "aten::zeros_like": "aten::neg",
    "cross_entropy_bwd_kernel": "aten::neg",
    "cross_entropy_fwd_kernel": "aten::neg",
    "element_mul_kernel": "aten::neg",
    "fsdp::all_gather_copy_in": "aten::copy_",
    "fsdp::chunk_cat": "aten::cat",
    CASTING_CHUNK_CAT: "aten::_to_copy",
    "fsdp::split_with_sizes_copy": "aten::copy_",
    "liger_cross_entropy_kernel": "aten::neg",
    "triton_poi_fused__log_softmax_backward_data": "aten::neg",
    "triton_red_fused__log_softmax": "aten::neg",
    "triton_red_fused_nll_loss_forward": "aten::neg",
}
"""Operators that a calibration does not time, each with a timed operator that reads and writes as many bytes."""


class Calibrated:
    """The rates of one setup on a calibrated machine."""

    source = "calibrated"

    def __init__(self, profile: Profile, setup: TrainSetup, ranks_on_node: int) -> None:
        measured: RankProfile = profile.for_ranks(ranks_on_node)
        self._dtypes = {2: "bf16" if setup.precision.compute == "fp32" else setup.precision.compute, 4: "fp32"}
        neighbours = {"replicate": setup.shard_group_size == 1}
        self._groups = {name: (size, neighbours.get(name, True)) for name, size in setup.group_sizes.items()}
        """The size of each group that rank 0 belongs to, and whether its ranks are consecutive."""
        self.blocks_host = profile.device == "cpu"
        self.launch_seconds, self._hook_seconds = measured.launch_seconds, measured.hook_seconds
        self._products = _grids(
            ((one.layout, one.dtype), (one.m, one.n, one.k), 2.0 * one.m * one.n * one.k / one.seconds)
            for one in measured.matmul
        )
        self._attention = _grids(
            (
                (one.backward, one.dtype),
                (one.length, one.head_dim),
                attention_flops((1, one.heads, one.heads, one.length, one.head_dim), one.backward) / one.seconds,
            )
            for one in measured.attention
        )
        self._operators = _lines(((one.operator, one.dtype), one.num_bytes, one.seconds) for one in measured.operator)
        self._copies = _lines(((one.direction,), one.num_bytes, one.seconds) for one in measured.copy)
        self._collectives = _lines(
            ((one.kind, one.group_size, one.neighbours), one.message_bytes, one.seconds) for one in measured.collective
        )
        self._optimizers = _lines(
            ((one.kind,), one.num_elements / one.num_tensors, one.seconds / one.num_tensors)
            for one in measured.optimizer
        )

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float | None:
        """Return the seconds of an operator; None if no size of it was measured."""
        dtype = self._dtypes.get(work.itemsize, "fp32")
        if work.is_product and work.itemsize == 1:
            return None  # products in float8 are not measured
        if work.is_product:
            flops = 2.0 * math.prod(work.dims)
            return _divided(flops, self._products.get((work.name.split()[1], dtype)), work.dims)
        if work.is_attention:
            flops = attention_flops(work.dims, work.is_backward)
            length, head_dim = work.dims[3:5]
            return _divided(flops, self._attention.get((work.is_backward, dtype)), (length, head_dim))
        if work.name.startswith("optimizer "):
            return self._update(work.name.removeprefix("optimizer "), work.dims)
        own = self._operators.get((work.name, dtype))
        return _between(own or self._operators.get((ALIKE.get(work.name, ""), dtype)), work.num_bytes)

    def collective(self, work: Work) -> float | None:
        """Return the seconds of a collective; None if no group of this size was measured."""
        size, neighbours = self._groups[work.group]
        points = self._collectives.get((work.name, size, neighbours))
        return _between(points or self._collectives.get((work.name, size, not neighbours)), work.num_bytes)

    def copy(self, work: Work) -> float | None:
        """Return the seconds of a copy to or from the host."""
        return _between(self._copies.get((work.name,)), work.num_bytes)

    def host(self, work: Work) -> float | None:
        """Return the seconds of a hook, or of an optimizer step in host memory.

        Other work in host memory is not measured; it has the datasheet's rate.
        """
        if work.name.startswith(IN_HOST_MEMORY) and not work.dims:
            return work.num_bytes / HOST_ADAM_BYTES_PER_SECOND
        if work.name.startswith(IN_HOST_MEMORY):
            return self._update("host " + work.name.removeprefix(IN_HOST_MEMORY), work.dims)
        return self._hook_seconds.get(work.name.split()[0])

    def _update(self, kind: str, dims: tuple[int, ...]) -> float | None:
        """Return the seconds of an optimizer step: those of a tensor of the mean size, times the number of tensors."""
        num_tensors, num_elements = dims
        each = _between(self._optimizers.get((kind,)), num_elements / num_tensors)
        return None if each is None else num_tensors * each


_Grid = dict[tuple[float, ...], float]
"""Logarithm of the rate, by the logarithms of the dimensions."""


def _grids(rows: Iterable[tuple[tuple[object, ...], Sequence[float], float]]) -> dict[tuple[object, ...], _Grid]:
    grids: dict[tuple[object, ...], _Grid] = {}
    for key, sides, rate in rows:
        grids.setdefault(key, {})[tuple(math.log(side) for side in sides)] = math.log(rate)
    return grids


def _lines(rows: Iterable[tuple[tuple[object, ...], float, float]]) -> dict[tuple[object, ...], Points]:
    lines: dict[tuple[object, ...], Points] = {}
    for key, size, seconds in rows:
        lines.setdefault(key, []).append((size, seconds))
    return {key: sorted(points) for key, points in lines.items()}


def _between(points: Points | None, size: float) -> float | None:
    """Return the seconds at a size; None without points.

    Between two measured sizes interpolate linearly. Below the smallest size its seconds hold; above the largest size
    seconds grow in proportion.
    """
    if not points:
        return None
    if size >= points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    place = bisect_right(points, (size, math.inf))
    if place == 0:
        return points[0][1]
    (low, first), (high, second) = points[place - 1], points[place]
    return first + (second - first) * (size - low) / (high - low)


def _divided(flops: float, grid: _Grid | None, sides: Sequence[float]) -> float | None:
    """Return the seconds of ``flops`` at the rate interpolated at the dimensions ``sides``; None without a grid."""
    if not grid:
        return None
    brackets = []
    for axis, side in enumerate(sides):
        places = sorted({corner[axis] for corner in grid})
        brackets.append(_bracket(places, math.log(side)))
    total = weight_of_all = 0.0
    for corner in product(*brackets):
        rate = grid.get(tuple(place for place, _ in corner))
        if rate is not None:
            weight = math.prod(part for _, part in corner)
            total, weight_of_all = total + weight * rate, weight_of_all + weight
    if weight_of_all <= 0:
        wanted = [math.log(side) for side in sides]
        nearest = min(grid, key=lambda corner: math.dist(corner, wanted))
        return flops / math.exp(grid[nearest])
    return flops / math.exp(total / weight_of_all)


def _bracket(places: list[float], value: float) -> list[tuple[float, float]]:
    """Return the two places next to a value with their weights; outside the range of places, the nearest one."""
    above = bisect_right(places, value)
    if above == 0:
        return [(places[0], 1.0)]
    if above == len(places):
        return [(places[-1], 1.0)]
    low, high = places[above - 1], places[above]
    weight = (value - low) / (high - low)
    return [(low, 1.0 - weight), (high, weight)] if weight else [(low, 1.0)]


def rates_of(
    setup: TrainSetup, hardware: Hardware | None, kernels: str, profile: Calibration | None, is_alone: bool = False
) -> Rates | None:
    """Return the rates, or None if neither calibration nor datasheet exists.

    ``is_alone``: one rank runs alone on the machine, as an emulated rank does. Raises SpecError if the calibration was
    made on another kind of device, or scaled by a run on another GPU.
    """
    if isinstance(profile, Profile):
        if profile.device != ("cuda" if kernels == "cuda" else "cpu"):
            other = "cpu" if profile.device == "cpu" else "cuda"
            raise SpecError(f"calibration: the calibration was made on {profile.machine}; use --kernels {other}")
        together = hardware.ranks_per_node(setup.world_size) if hardware else setup.world_size
        return Calibrated(profile, setup, 1 if is_alone else together)
    return scaled(datasheet(hardware, setup), profile) if hardware and kernels == "cuda" else None
