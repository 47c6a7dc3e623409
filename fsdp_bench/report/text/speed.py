"""A predicted step time as text: exposed communication, tokens per second and the source of the rates."""

from fsdp_bench.plan.ranges import LONGER_OVER_PCIE, Range
from fsdp_bench.plan.speed import Speed
from fsdp_bench.replay.schedule import StepTime
from fsdp_bench.replay.step_parts import StepPart
from fsdp_bench.report.text.common import UNKNOWN, Fact, fact
from fsdp_bench.spec.calibration_profile import Calibration, Profile


def time_facts(found: Speed, profile: Calibration | None, mode: str = "eager") -> list[str]:
    """Return the step time as a few lines, or the reason why it is unknown. ``mode`` is eager or compiled blocks."""
    time = found.time
    if time.step_seconds is None:
        known = "" if time.compute_seconds is None else f"; operators take {step_text(time.compute_seconds)}"
        why = f"nobody documents what {', '.join(time.unknown)} would take here"
        if found.source is None:
            why = "no GPU is named, or no calibration of this CPU; --server NAME, --gpu NAME or --calibration FILE"
        return [fact("step time", f"{UNKNOWN}: {why}{known}")]
    beside = "; ".join(beside_operators(time))
    return [
        *(fact(*one) for one in step_facts(found, f"predicted, for {mode}")),
        *([fact("", beside)] if beside else []),
        fact("", f"rates: {rests_on(found, profile)}"),
    ]


def step_facts(found: Speed, sources: str, without_tokens: str = "not trained on tokens") -> list[Fact]:
    """Return a known step time with its range and what it consists of. ``sources``: of the numbers."""
    seconds = found.time.step_seconds
    assert seconds is not None
    rates = f"{throughput_text(found, without_tokens)}, MFU {percent(found.mfu)}, HFU {percent(found.hfu)}"
    ordered = sorted(found.time.parts.items(), key=lambda part: -part[1])  # they add up to the step
    parts = [f"{PART_LABELS[part]} {step_text(seconds)}" for part, seconds in ordered if seconds >= _PRINTED]
    return [
        ("step time", f"{step_text(seconds)}, {rates} ({sources})"),
        ("range", range_text(found.range, seconds)),
        ("of it", ", ".join(parts)),
    ]


def beside_operators(time: StepTime) -> list[str]:
    """Return how long collectives and copies run, which may be beside operators."""
    found = []
    if time.communication_seconds:
        found.append(f"collectives run for {step_text(time.communication_seconds)}")
        if time.slowed_seconds >= _PRINTED:
            found[0] += f", and slow the operators beside them down by {step_text(time.slowed_seconds)}"
    if time.host_copy_seconds and time.host_copy_seconds >= _PRINTED:
        found.append(f"copies to and from the host run for {step_text(time.host_copy_seconds)}")
    return found


_PRINTED = 5e-5
"""The shortest time that a tenth of a millisecond shows."""
PART_LABELS: dict[str, str] = {
    StepPart.MATRIX_PRODUCTS: "matrix products",
    StepPart.ATTENTION: "attention",
    StepPart.OTHER_OPERATORS: "other operators",
    StepPart.OPTIMIZER: "optimizer",
    StepPart.EXPOSED_COMMUNICATION: "exposed communication",
    StepPart.EXPOSED_COPIES: "exposed copies to and from the host",
    StepPart.CPU_OPTIMIZER: "optimizer on the CPU",
    StepPart.WAITING_FOR_RANKS: "waiting for other ranks",
    StepPart.WAITING_FOR_HOST: "waiting for the host",
}
"""The parts of a step in words, in the order in which charts draw them."""


def range_text(span: Range | None, step_seconds: float) -> str:
    """Return the steps that the errors of published runs leave possible."""
    if span is None:
        return f"{UNKNOWN}: no published run of such a setup on such a GPU was ever compared"
    shortest, longest = span.step_seconds(step_seconds)
    return f"{step_text(shortest)} to {step_text(longest)}: {span.because}"


def throughput_text(found: Speed, without_tokens: str = "not trained on tokens") -> str:
    """Return tokens per second, or why there are none."""
    tokens = found.tokens_per_second_per_gpu
    return without_tokens if tokens is None else f"{tokens:,.0f} tokens/s per GPU"


PCIE_IS_UNCERTAIN = f", over PCIe perhaps far too fast: {LONGER_OVER_PCIE}"
"""docs/validation.md, "Rehearsed against what people published"."""


def rests_on(found: Speed, profile: Calibration | None) -> str:
    """Return the source of the rates."""
    if isinstance(profile, Profile):
        return measured_rates(profile)
    if found.source is None:
        return UNKNOWN
    if profile is not None:
        setup = f" ({profile.setup})" if profile.setup else ""
        return f"{found.source}: {profile.source}, {profile.measured_on}{setup}"
    pcie = PCIE_IS_UNCERTAIN if found.is_over_pcie else ""
    return f"the GPU's datasheet and NCCL's model of its links{pcie} (fsdp-bench calibrate measures yours)"


def measured_rates(profile: Profile) -> str:
    """Return where and when the rates were measured, and which are missing."""
    missing = "".join(f"; without {name}, lost in the noise" for name in profile.lost_in_noise)
    return f"measured on {profile.machine}, {profile.measured_on} (fsdp-bench calibrate){missing}"


def percent(value: float | None) -> str:
    """Return a fraction as a percentage."""
    return UNKNOWN if value is None else f"{value:.0%}"


def step_text(seconds: float) -> str:
    """Return the time of a step, or of a part of it, in one unit, so that settings are compared at a glance."""
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
