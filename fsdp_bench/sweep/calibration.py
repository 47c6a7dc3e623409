"""Measures this machine: starts ranks that time operators and collectives, and makes a Profile of their times."""

import datetime
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from fsdp_bench.rates.calibrated import Calibrated
from fsdp_bench.rates.datasheet import Rates, RatesWithoutCommunication
from fsdp_bench.replay.schedule import run
from fsdp_bench.simulate.events import Work
from fsdp_bench.simulate.operators.kernels import CPU_GLOO, CUDA
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.calibration_profile import (
    CALIBRATION_MODEL,
    CALIBRATION_SEQUENCE_LENGTH,
    HOST_MODEL,
    HOST_SEQUENCE_LENGTH,
    DeviceType,
    Profile,
    RankMeasurements,
    RankProfile,
    Scaling,
)
from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import Api, OptimizerKind, ShardingStrategy, TrainSetup
from fsdp_bench.spec.subprocesses.own_python import own_python
from fsdp_bench.sweep.launchers.processes import last_lines, worker_environment
from fsdp_bench.sweep.machine import Machine

TIMEOUT_SECONDS = 600.0
PARTS = 7
"""Parts of the measurement with one number of ranks, for a progress bar: those of train/calibrating/calibrator.py."""
HALVINGS = 50
"""Bisection steps that find the host's times, to 10^-15 of a step."""
DRIVER_SECONDS = 7.2e-6
"""The part of CUDA's driver and of CUDA's libraries in launching an operator: the same small operators on CUDA took so
much longer than on the CPU of one host with an H100 (a virtual machine, torch 2.11, CUDA 13.0, 2026-11-27): the median
of add, mul, mm, linear, layer norm, four modules and backward, which are between -1 and 36 us."""
Progress = Callable[[int, str], None]
"""Called when a part of the measurement begins, with the number of ranks and the part."""


def rank_counts(machine: Machine) -> tuple[int, ...]:
    """Return the numbers of ranks to measure with: every GPU, or two and four ranks that share the cores."""
    return (len(machine.gpus),) if machine.gpus else (2, 4)


def calibrate(machine: Machine, counts: Sequence[int], progress: Progress) -> Profile:
    """Measure with each number of ranks. Raises SpecError if a rank fails, with the last line of its log."""
    device: DeviceType = "cuda" if machine.gpus else "cpu"
    found = [_measure(count, device, partial(progress, count)) for count in counts]
    return Profile(
        machine=machine.describe(),
        device=device,
        device_name=found[0].device_name if device == "cuda" else machine.cpu_name,
        measured_on=datetime.date.today().isoformat(),
        versions=found[0].versions,
        ranks=tuple(rank_profile(measured, device) for measured in found),
    )


def calibrate_host(machine: Machine, progress: Progress) -> Scaling:
    """Measure what this host takes for each operator and hook. Raises SpecError as ``calibrate``."""
    found = rank_profile(_measure(1, "cpu", partial(progress, 1), "host"), "cuda", HOST_MODEL, HOST_SEQUENCE_LENGTH)
    return Scaling(
        measured_on=datetime.date.today().isoformat(),
        source=f"{machine.cpu_name}: {found.launch_seconds * 1e6:.1f} us an operator on tiny tensors of a CPU, and"
        f" {DRIVER_SECONDS * 1e6:.1f} us taken for CUDA's driver",
        launch_seconds=found.launch_seconds + DRIVER_SECONDS,
        hook_seconds=found.hook_seconds,
    )


def _measure(count: int, device: DeviceType, say: Callable[[str], None], *only: str) -> RankMeasurements:
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-") as name:
        folder = Path(name)
        ranks = [_start(rank, count, device, folder, *only) for rank in range(count)]
        try:
            _follow(ranks, say)
        finally:
            for process in ranks:
                process.kill()
                if process.stdout is not None:
                    process.stdout.close()
        failed = [rank for rank, process in enumerate(ranks) if process.wait() != 0]
        out = folder / "measured.json"
        if failed or not out.exists():
            log = folder / f"rank-{failed[0] if failed else 0}.log"
            raise SpecError(f"calibrate: {count} ranks failed: {' '.join(last_lines(log, 1)) or 'no message'}")
        return from_json(out.read_bytes(), RankMeasurements)


def _start(rank: int, count: int, device: DeviceType, folder: Path, *only: str) -> subprocess.Popen[bytes]:
    environment = worker_environment() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "DEVICE": device,
        "RENDEZVOUS": str(folder),
        "THREADS": "1" if only else str(max((os.cpu_count() or 1) // count, 1)),
    }
    arguments = [str(os.getpid()), str(folder / "measured.json"), *only]
    with open(folder / f"rank-{rank}.log", "wb") as log:
        return subprocess.Popen(
            own_python("fsdp_bench.train.calibrating.calibrator", *arguments),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else log,
            stderr=log,
        )


def _follow(ranks: list[subprocess.Popen[bytes]], say: Callable[[str], None]) -> None:
    """Pass on the progress messages of rank 0 until all ranks have ended or one has failed."""
    first, deadline = ranks[0], time.monotonic() + TIMEOUT_SECONDS
    assert first.stdout is not None
    for line in first.stdout:
        say(str(json.loads(line)["part"]))
        if any(process.poll() not in (None, 0) for process in ranks):
            return
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if any(process.poll() not in (None, 0) for process in ranks):
            return
        time.sleep(0.05)


def rank_profile(
    measured: RankMeasurements,
    device: DeviceType,
    model: ModelShape = CALIBRATION_MODEL,
    length: int = CALIBRATION_SEQUENCE_LENGTH,
) -> RankProfile:
    """Return the measurements as a profile, with the host's time for an operator and for a hook.

    With these two times the predicted step of the timed model takes as long as the measured step. So they contain all
    work of the host: views, Python, the dispatcher, autograd.
    """
    both = set(RankMeasurements.__struct_fields__).intersection(RankProfile.__struct_fields__)
    times = {name: getattr(measured, name) for name in both}
    bare = RankProfile(**times, launch_seconds=0.0, hook_seconds={})
    seconds, predicted = measured.model_step_seconds, partial(_predicted_step, bare, device, model, length)
    unwrapped = predicted(Api.FSDP2, ShardingStrategy.NO_SHARD)
    launch = _solve(lambda value: unwrapped(value, 0.0), seconds["none"])
    hooks = {}
    for api in Api:
        wrapped = predicted(api, ShardingStrategy.FULL_SHARD)
        hooks[api.value] = _solve(partial(wrapped, launch), seconds[api.value])
    return msgspec.structs.replace(bare, launch_seconds=launch, hook_seconds=hooks)


def _solve(takes: Callable[[float], float], seconds: float) -> float:
    """Return the time of one operator or hook with which a step takes ``seconds``; 0 if it takes longer anyway."""
    low, high = 0.0, seconds  # a step with one such operator already takes as much
    if takes(low) >= seconds:
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if takes(middle) < seconds else (low, middle)
    return high


def _predicted_step(
    measured: RankProfile, device: DeviceType, model: ModelShape, length: int, api: Api, strategy: ShardingStrategy
) -> Callable[[float, float], float]:
    """Return a step's predicted seconds as a function of the host's for an operator and a hook, without collectives."""
    setup = TrainSetup(
        api=api,
        strategy=strategy,
        world_size=1 if strategy is ShardingStrategy.NO_SHARD else max(measured.num_ranks, 2),
        optimizer=OptimizerKind.SGD,
        sequence_length=length,
    )
    log = SimulatedSteps(model, setup, CUDA if device == "cuda" else CPU_GLOO).step()
    events = list(log.last_step())
    profile = Profile(machine="", device=device, device_name="", measured_on="", versions={}, ranks=(measured,))
    rates = Calibrated(profile, setup, measured.num_ranks)

    def seconds(launch_seconds: float, hook_seconds: float) -> float:
        found = run(events, _Host(rates, setup, launch_seconds, hook_seconds)).step_seconds
        assert found is not None
        return found

    return seconds


class _Host(RatesWithoutCommunication):
    """A calibration's rates with given times of the host. Work that the calibration did not time takes no time."""

    def __init__(self, rates: Rates, setup: TrainSetup, launch_seconds: float, hook_seconds: float) -> None:
        super().__init__(rates, setup)
        self.launch_seconds, self.host = launch_seconds, lambda work: hook_seconds
        self.copy = lambda work: rates.copy(work) or 0.0

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float:
        """Seconds of an operator."""
        return self._rates.run(work, beside) or 0.0
