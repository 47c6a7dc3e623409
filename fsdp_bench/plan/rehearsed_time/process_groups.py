"""The topology of each process group of a rehearsed step, under the names that rates/ has for groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_bench.rates.collectives import Groups, Topology, topology_of_ranks
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.subprocesses.issued import IssuedCollective, IssuedStep

_KINDS = {
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "barrier": "all_reduce",
    "broadcast": "broadcast",
}
"""Kinds of rates/collectives.py, by the operators of the ``c10d`` namespace. The time of others is unknown."""

_NAMES = ("shard", "replicate", "world", "post_forward")
"""Groups that rates/ has. Which is which does not matter: each has its topology."""


def kind_of(collective: IssuedCollective) -> str | None:
    """Return the kind of a collective; None for those whose time nobody knows."""
    return _KINDS.get(collective.name)


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups that communicate in a step."""

    names: dict[str, str]
    """Names of rates/, by the script's own."""
    groups: Groups
    sizes: dict[str, int]
    """Ranks, by the script's own names."""


def process_groups(step: IssuedStep, hardware: Hardware) -> ProcessGroups:
    """Return the process groups of a step with their topologies.

    If there are more than four, those of the same ranks share a name, as if they had one communicator; if there are
    still more than four, the others are unknown.
    """
    ranks: dict[str, tuple[int, ...] | None] = {}
    gathers: set[str] = set()
    for event in step.events:
        if isinstance(event, IssuedCollective):
            ranks.setdefault(event.group, event.ranks)
            if kind_of(event) in ("all_gather", "reduce_scatter"):
                gathers.add(event.group)
    communicate = [group for group, of in ranks.items() if of is None or len(of) > 1]
    names = _named(sorted(communicate, key=lambda group: group not in gathers), ranks)
    sizes = {group: len(of) for group, of in ranks.items() if of is not None}
    found: dict[str, Topology | None] = dict.fromkeys(_NAMES)
    for group, name in names.items():
        of = ranks[group]
        found[name] = None if of is None else topology_of_ranks(hardware, of)
    return ProcessGroups(names, Groups(**found), sizes)


def _named(groups: Sequence[str], ranks: dict[str, tuple[int, ...] | None]) -> dict[str, str]:
    if len(groups) <= len(_NAMES):
        return dict(zip(groups, _NAMES, strict=False))
    by_ranks = dict(zip(dict.fromkeys(ranks[group] for group in groups), _NAMES, strict=False))
    return {group: by_ranks[ranks[group]] for group in groups if ranks[group] in by_ranks}
