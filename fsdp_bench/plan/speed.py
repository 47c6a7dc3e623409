"""Predicts how fast a setup trains: step time, tokens per second, MFU and HFU."""

from dataclasses import dataclass, replace

from fsdp_bench.plan.ranges import Range, if_nearly_full, speed_range
from fsdp_bench.rates.calibrated import rates_of
from fsdp_bench.rates.datasheet import Datasheet, Rates, RatesWithoutCommunication
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading
from fsdp_bench.replay.schedule import StepTime, only_step_seconds, schedule
from fsdp_bench.replay.step_parts import StepPart
from fsdp_bench.simulate.operators.kernels import CPU_GLOO
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.calibration_profile import Calibration
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.units import GIB


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Step time, throughput, MFU and HFU of one rank, predicted or rehearsed. Unknown values are None."""

    time: StepTime
    tokens_per_step: int | None
    """The tokens of the rank. None also for a model that is not trained on tokens."""
    model_flops: float | None
    """FLOPs of the rank in a step, without recomputation."""
    hardware_flops: float | None
    """FLOPs of the rank in a step, including recomputation."""
    peak_flops_per_second: float | None
    """The GPU's dense peak for the compute dtype; of a rehearsed script for the dtype of most products."""
    source: str | None
    """``datasheet``, ``calibrated`` or a source of rates/scaled.py. None if no rates are known."""
    is_over_pcie: bool = False
    """Whether collectives go over PCIe with rates of the datasheet. No measurement checks these."""
    range: Range | None = None
    """The range that published runs' errors leave. None for a machine's calibration: its errors are not known."""
    retries_seconds: float | None = None
    """The seconds in which allocation retries of every step free and reserve memory; ``time`` is without them.

    None where no retries go on."""

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """Tokens per second of one rank."""
        return self._per_second(self.tokens_per_step)

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s, without recomputation, over the GPU's dense peak."""
        return self._fraction_of_peak(self.model_flops)

    @property
    def hfu(self) -> float | None:
        """FLOP/s including recomputation, over the GPU's dense peak."""
        return self._fraction_of_peak(self.hardware_flops)

    def _per_second(self, amount: float | None) -> float | None:
        seconds = self.time.step_seconds
        return None if amount is None or seconds is None else amount / seconds

    def _fraction_of_peak(self, flops: float | None) -> float | None:
        achieved, peak = self._per_second(flops), self.peak_flops_per_second
        return None if achieved is None or peak is None else achieved / peak


SECONDS_PER_RETRIED_GIB = 4e-3
"""The time in which a retry frees a GiB of the cache, and a later allocation reserves it anew.

On one H100 a retry took a median of 1.9 ms for each GiB that it freed or reserved (16 freed and 8 reserved; 1.1 to
2.3), and 2.6 of 2 and 2 (results/nvidia-h100/rates.json). What other ranks then wait was not measured."""
SECONDS_OF_A_PUBLISHED_RETRY = 1.0
"""lessw2020's DeepViT with batch size 17 on A10Gs, 21 GiB reserved: docs/validation.md."""


def with_full_gpu(found: Speed, reading: AllocatorReading, needed_bytes: int, usable_bytes: int | None) -> Speed:
    """Return the speed on a GPU whose memory is nearly full or too small: a slower end of its range, and retries.

    Args:
        found: the speed where memory does not matter.
        reading: the allocator's, on this GPU.
        needed_bytes: the peak of reserved memory without retries.
        usable_bytes: the GPU's memory. None if it is not known.
    """
    span, seconds = found.range, found.time.step_seconds
    if reading.out_of_memory is not None or seconds is None:
        return found
    if span is not None:
        span = if_nearly_full(span, needed_bytes, usable_bytes)
    if not reading.num_retries_later:
        return replace(found, range=span)
    retried = SECONDS_PER_RETRIED_GIB * reading.retried_bytes_later / GIB
    if span is not None:
        longest = seconds / span.slowest + SECONDS_OF_A_PUBLISHED_RETRY * reading.num_retries_later
        because = f"{span.because}; at the slow end each allocation retry takes {SECONDS_OF_A_PUBLISHED_RETRY:g} s"
        span = span._replace(slowest=seconds / longest, because=f"{because}, as in the one published run")
    return replace(found, range=span, retries_seconds=retried)


NOTHING_KNOWN = StepTime(None, None, None, None, None, ("the hardware",))


def speed(
    simulated: SimulatedSteps,
    hardware: Hardware | None,
    profile: Calibration | None = None,
    with_spans: bool = False,
    without_communication: bool = False,
) -> Speed:
    """Predict how fast a setup trains, by the datasheet or a calibration; on a CPU collectives are gloo's.

    ``with_spans`` keeps when each operator, copy and collective runs, for charts; ``without_communication`` lets
    collectives take no time. Raises SpecError for a calibration of another kind of device.
    """
    gpu = hardware.gpu if hardware else None
    model, setup, kernels = simulated.model, simulated.setup, simulated.kernels
    rates = _rates(setup, hardware, kernels.name, profile, without_communication)
    num_tokens = setup.tokens_per_step_per_rank
    flops = model.model_flops_per_token(setup.sequence_length), model.hardware_flops_per_token(setup)
    model_flops, hardware_flops = (None if each is None else each * num_tokens for each in flops)
    time, is_over_pcie = NOTHING_KNOWN, isinstance(rates, Datasheet) and rates.is_over_pcie
    if rates is not None:
        uses_gloo = not kernels.is_cuda and setup.world_size > 1
        time = schedule(simulated.on(CPU_GLOO if uses_gloo else kernels).step(), rates, with_spans)
    source = None if rates is None else rates.source
    span, products = None, time.parts.get(StepPart.MATRIX_PRODUCTS, 0.0)
    if hardware is not None and source is not None:
        span = speed_range(hardware, setup, is_over_pcie, profile, products / (time.step_seconds or 1.0))
    return Speed(
        time=time,
        tokens_per_step=num_tokens if model.has_tokens else None,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        peak_flops_per_second=gpu.peak_flops_per_second(setup.precision.compute) if gpu and kernels.is_cuda else None,
        source=source,
        is_over_pcie=is_over_pcie,
        range=span,
    )


def step_seconds(
    simulated: SimulatedSteps,
    cluster: Hardware,
    without_communication: bool = False,
    calibration: Calibration | None = None,
) -> float | None:
    """Predict the step time alone, which ``speed`` has too, without what it consists of. None if it is unknown."""
    rates = _rates(simulated.setup, cluster, "cuda", calibration, without_communication)
    return None if rates is None else only_step_seconds(simulated.step(), rates)


def _rates(
    setup: TrainSetup, hardware: Hardware | None, kernels: str, profile: Calibration | None, without_communication: bool
) -> Rates | None:
    """Return the rates of the hardware; without communication those of one GPU that waits for no other."""
    rates = rates_of(setup, hardware, kernels, profile, without_communication)
    if rates is None or not without_communication:
        return rates
    if isinstance(rates, Datasheet):
        rates = replace(rates, slowest_gpu=1.0)
    return RatesWithoutCommunication(rates, setup)
