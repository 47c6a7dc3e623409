"""What a rank sends and receives in a step: the collectives that the wrapper issues, and what they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.simulate.autograd import Sent
from fsdp_bench.simulate.issued import Work
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels
from fsdp_bench.simulate.step import Simulation
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import TrainSetup


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind in one group, in one step of one rank."""

    kind: str
    """all_gather, reduce_scatter, all_reduce."""
    group: str
    """``shard``, ``replicate`` or ``world``."""
    group_size: int
    calls: int
    message_bytes: int
    """Whole messages, summed over calls."""
    seconds: float | None
    """One after another; None where nobody documents or measured what joins the ranks."""


def collectives_of(shape: ModelShape, setup: TrainSetup, kernels: Kernels = CUDA) -> list[Sent]:
    """Return the collectives of a step in the steady state, in the order in which they are issued."""
    if setup.world_size == 1:
        return []
    simulation = Simulation(shape, setup, kernels, shape.num_hidden_layers)
    simulation.load()
    simulation.warm_up()
    simulation.tape.sent.clear()
    simulation.step()
    return list(simulation.tape.sent)


def traffic(sent: Sequence[Sent], setup: TrainSetup, rates: Rates | None = None) -> list[Traffic]:
    """Sum collectives up by kind and group; with the hardware's rates also their time."""
    found: dict[tuple[str, str], list[Sent]] = {}
    for one in sent:
        found.setdefault((one.kind, one.group), []).append(one)
    return [
        Traffic(
            kind=kind,
            group=group,
            group_size=setup.group_sizes[group],
            calls=sum(one.times for one in issued),
            message_bytes=sum(one.times * one.num_bytes for one in issued),
            seconds=None if rates is None else _seconds(issued, rates),
        )
        for (kind, group), issued in found.items()
    ]


def _seconds(issued: Sequence[Sent], rates: Rates) -> float | None:
    seconds = [(one.times, rates.send(Work(one.kind, one.num_bytes, group=one.group))) for one in issued]
    known = [times * each for times, each in seconds if each is not None]
    return sum(known) if len(known) == len(seconds) else None
