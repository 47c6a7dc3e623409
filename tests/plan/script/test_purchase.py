"""Plans for a script against brute force: every choice of values on every number of nodes of every kind of server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.headroom import Headroom
from fsdp_bench.plan.purchase.goal import SECONDS_PER_DAY, Terms
from fsdp_bench.plan.purchase.pick import Picked, pick
from fsdp_bench.plan.purchase.planner import kinds_of
from fsdp_bench.plan.script.cells import Cell, Found, Memory, ScriptOffer, Speed
from fsdp_bench.plan.script.purchase import search
from fsdp_bench.plan.script.series import Series
from fsdp_bench.spec.units import GIB

SERVERS = ("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "a3-highgpu-8g", "p5en.48xlarge")
NODES = tuple(range(1, 65))


class Script:
    """A script by formulas: a GPU computes, and gathers parameters in a ring; states are sharded, activations not."""

    def __init__(self, seed: int, num_choices: int = 3) -> None:
        draw = Random(seed)
        self.kinds = kinds_of(BUILT_IN, draw.sample(SERVERS, 3))
        self.choices = [{"batch": str(2**place)} for place in range(num_choices)]
        self.flops_per_token = draw.choice([6e9, 5e10, 4e11])
        self.parameter_bytes = self.flops_per_token / 3
        self.activations = draw.uniform(1, 12) * GIB
        self.kept = draw.uniform(1, 3) * GIB
        self.latency = draw.choice([0.0, 1e-4])
        self.is_hidden = draw.random() < 0.5
        self.has_global_batch = draw.random() < 0.25
        """Whether it accumulates gradients until a step has as many tokens on any number of GPUs."""
        self.found: dict[Cell, Found] = {}
        self.asked: list[Cell] = []
        self._draw = draw

    def ask(self, cells: Sequence[Cell], own: bool) -> None:
        for cell in cells:
            known = self.found.get(cell)
            if known is None or (own and not known.is_own):
                self.asked.append(cell)
                self.found[cell] = replace(self.answer(cell), is_own=own or self._draw.random() < 0.7)

    def answer(self, cell: Cell) -> Found:
        kind = next(one for one in self.kinds if one.server.name == cell.server)
        world, tokens = cell.num_nodes * kind.gpus_per_node, 4096 * 2**cell.choice
        reserved = self.kept + self.activations * 2**cell.choice + 6 * self.parameter_bytes / world
        usable = kind.gpu.usable_memory_bytes
        assert usable is not None
        memory = Memory(
            allocated=int(reserved), reserved=int(reserved), available=usable, kept_free=Headroom(0, "a test")
        )
        if reserved > usable:
            return Found(fits=False, memory=memory)
        compute = tokens * self.flops_per_token / (0.4 * 300e12 * kind.gpu.usable_memory_bytes / 42e9)
        bandwidth = 200e9 if cell.num_nodes == 1 else 40e9
        gathered = 3 * self.parameter_bytes * (world - 1) / world / bandwidth + self.latency * cell.num_nodes
        step = max(compute, gathered) if self.is_hidden else compute + gathered
        step_tokens = float(tokens * world)
        if self.has_global_batch:
            step_tokens = max(1, 2**22 // (tokens * world)) * step_tokens
        speed = Speed(
            tokens_per_second_per_gpu=tokens / step, without_collectives=tokens / compute, tokens_per_step=step_tokens
        )
        return Found(fits=True, memory=memory, speed=speed)

    def series(self, terms: Terms, found: dict[Cell, Found] | None = None) -> list[Series]:
        of = self.found if found is None else found
        return [Series(terms, kind, choice, NODES, of) for kind in self.kinds for choice in enumerate(self.choices)]

    def every_offer(self, terms: Terms) -> list[ScriptOffer]:
        every = {one.cell(count): self.answer(one.cell(count)) for one in self.series(terms) for count in NODES}
        return [offer for one in self.series(terms, every) for offer in one.offers(at_best=False)]


def drawn_terms(seed: int) -> Terms:
    draw = Random(seed)
    tokens = draw.choice([None, 10**9, 10**11, 10**13])
    days, budget = draw.choice([None, 2.0, 30.0, 300.0]), draw.choice([None, None, 1e4, 1e6])
    batch = draw.choice([None, None, None, 2**22])
    if tokens is None:
        return Terms(global_batch_tokens=batch)
    seconds = None if days is None else days * SECONDS_PER_DAY
    return Terms(tokens=tokens, deadline_seconds=seconds, budget=budget, global_batch_tokens=batch)


def cells_of(picked: Picked[ScriptOffer]) -> list[Cell | None]:
    alone = (picked.winner, picked.cheapest_allowed, picked.cheapest, picked.fastest, picked.fewest_nodes)
    return [None if one is None else one.cell for one in (*alone, *picked.nearest)]


@pytest.mark.parametrize("seed", range(60))
def test_few_rehearsals_find_what_all_would(seed: int) -> None:
    script, terms = Script(seed), drawn_terms(seed + 1000)
    picked, _ = search(terms, script.series(terms), script.ask)
    every = script.every_offer(terms)
    assert cells_of(picked) == cells_of(pick(terms, every))
    assert all(offer.found is not None and offer.found.is_own for offer in picked.all())
    assert len(script.asked) == len({*script.asked}) or not all(one.is_own for one in script.found.values())
    assert len(script.asked) < 0.25 * len(NODES) * 9
