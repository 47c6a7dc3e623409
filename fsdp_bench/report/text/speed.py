"""A predicted step time as text: exposed communication, tokens per second and the source of the rates."""

from __future__ import annotations

from fsdp_bench.plan.speed import Speed
from fsdp_bench.report.text.common import UNKNOWN, fact
from fsdp_bench.spec.profile import Profile
from fsdp_bench.spec.units import format_seconds

SPEED_COLUMNS = ("step", "exposed", "tokens/s per GPU", "MFU")


def time_facts(found: Speed, profile: Profile | None, mode: str = "eager") -> list[str]:
    """Return the step time as a few lines, or the reason why it is unknown. ``mode`` is eager or compiled blocks."""
    time = found.time
    if time.step_seconds is None:
        known = "" if time.compute_seconds is None else f"; operators take {format_seconds(time.compute_seconds)}"
        return [fact("step time", f"{UNKNOWN}: {_why_unknown(found)}{known}")]
    assert time.communication_seconds is not None
    assert time.exposed_communication_seconds is not None
    lines = [
        fact(
            "step time",
            f"{format_seconds(time.step_seconds)}, {throughput_text(found)}, MFU {percent(found.mfu)},"
            f" HFU {percent(found.hfu)} (predicted, for {mode})",
        ),
        fact(
            "",
            f"operators {format_seconds(time.compute_seconds or 0.0)};"
            f" collectives {format_seconds(time.communication_seconds)}, of which"
            f" {format_seconds(time.exposed_communication_seconds)} while no operator runs"
            f"{_part('copies to and from the host', time.host_copy_seconds)}"
            f"{_part('optimizer on the CPU', time.cpu_optimizer_seconds)}",
        ),
    ]
    return [*lines, fact("", f"rates: {rests_on(found, profile)}")]


def throughput_text(found: Speed) -> str:
    """Return tokens per second, or steps where the model is not trained on tokens."""
    tokens = found.tokens_per_second_per_gpu
    return "not trained on tokens" if tokens is None else f"{tokens:,.0f} tokens/s per GPU"


def _part(name: str, seconds: float | None) -> str:
    return f"; {name} {format_seconds(seconds)}" if seconds else ""


def rests_on(found: Speed, profile: Profile | None) -> str:
    """Return the source of the rates."""
    if profile is not None:
        return measured_rates(profile)
    if found.source is None:
        return UNKNOWN
    pcie = ", for PCIe not compared with measurements" if found.is_over_pcie else ""
    return f"the GPU's datasheet and NCCL's model of its links{pcie} (fsdp-bench calibrate measures yours)"


def measured_rates(profile: Profile) -> str:
    """Return where and when the rates were measured, and which are missing."""
    missing = "".join(f"; without {name}, lost in the noise" for name in profile.lost_in_noise)
    return f"measured on {profile.machine}, {profile.measured_on} (fsdp-bench calibrate){missing}"


def _why_unknown(found: Speed) -> str:
    if found.source is None:
        return "no GPU is named, or no calibration of this CPU; --server NAME, --gpu NAME or --calibration FILE"
    return f"nobody documents what {', '.join(found.time.unknown)} would take here"


def percent(value: float | None) -> str:
    """Return a fraction as a percentage."""
    return UNKNOWN if value is None else f"{value:.0%}"


def step_text(seconds: float) -> str:
    """Return a step time with enough digits to compare settings."""
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def speed_cells(found: Speed) -> list[str]:
    """Return the cells of SPEED_COLUMNS."""
    time, tokens = found.time, found.tokens_per_second_per_gpu
    if time.step_seconds is None or time.exposed_communication_seconds is None or tokens is None:
        return [UNKNOWN] * len(SPEED_COLUMNS)
    exposed = time.exposed_communication_seconds / time.step_seconds
    return [step_text(time.step_seconds), percent(exposed), f"{tokens:,.0f}", percent(found.mfu)]
