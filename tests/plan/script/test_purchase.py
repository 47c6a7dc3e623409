"""Plans for a script against brute force: every choice of values on every number of nodes of every kind of server."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace as struct_replace

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.headroom import Headroom
from fsdp_bench.plan.purchase.document import PlanDocument
from fsdp_bench.plan.purchase.goal import SECONDS_PER_DAY, Terms
from fsdp_bench.plan.purchase.offer import OfferMemory
from fsdp_bench.plan.purchase.pick import Picked, pick
from fsdp_bench.plan.purchase.planner import kinds_of
from fsdp_bench.plan.ranges import peak_range_of_script
from fsdp_bench.plan.script import rehearsals
from fsdp_bench.plan.script.cells import Cell, Found, ScriptOffer, Speed
from fsdp_bench.plan.script.purchase import _left_out, _plan, plan_command, script_document, search
from fsdp_bench.plan.script.series import Series
from fsdp_bench.report.html.plan import plan_page
from fsdp_bench.report.text.plan import plan_text
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalReport
from fsdp_bench.spec.units import GIB
from tests.plan.rehearsed_time.conftest import INT64, StepWriter
from tests.plan.script.test_rehearsals import FakeRehearsal
from tests.report.test_rehearsal_text import OUT, REPORT

SERVERS = ("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "a3-highgpu-8g", "p5en.48xlarge")
NODES = tuple(range(1, 65))


class Script:
    """A script by formulas: a GPU computes and gathers parameters; states and the optimizer's work are sharded."""

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
        sizes, kept_free = (int(reserved), int(reserved), usable - int(reserved)), Headroom(0, "a test")
        memory = OfferMemory.of(*sizes, kept_free, peak_range_of_script())
        if reserved > usable:
            return Found(fits=False, memory=memory)
        compute = tokens * self.flops_per_token / (0.4 * 300e12 * kind.gpu.usable_memory_bytes / 42e9)
        compute += 4 * self.parameter_bytes / world / 2e12  # the optimizer, on its shard
        bandwidth = 200e9 if cell.num_nodes == 1 else 40e9
        gathered = 3 * self.parameter_bytes * (world - 1) / world / bandwidth + self.latency * cell.num_nodes
        step = max(compute, gathered) if self.is_hidden else compute + gathered
        step_tokens = tokens * world
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


@pytest.mark.parametrize("seed", range(12))
def test_few_rehearsals_find_what_all_would(seed: int) -> None:
    """Of 576 combinations each; what is shown was rehearsed by itself."""
    script, terms = Script(seed), drawn_terms(seed + 1000)
    picked, _ = search(terms, script.series(terms), script.ask)
    assert cells_of(picked) == cells_of(pick(terms, script.every_offer(terms)))
    assert all(offer.found is not None and offer.found.is_own for offer in picked.all())
    assert len(script.asked) < 144


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 212))
def test_few_rehearsals_find_what_all_would_in_more_scripts(seed: int) -> None:
    test_few_rehearsals_find_what_all_would(seed)


class Failing(Script):
    """A script that trains on up to eight nodes: on more its batch cannot be divided; the first has no time at all."""

    def answer(self, cell: Cell) -> Found:
        if cell.choice == 0:
            return Found(fits=True, reason="nobody documents how long these take there: mylib::attention")
        found = super().answer(cell)
        return found if cell.num_nodes <= 8 else Found(reason="it failed with ValueError: 256 is not divisible")


def test_a_script_that_fails_on_many_nodes_is_planned_on_fewer_and_what_is_unknown_is_said() -> None:
    script, terms = Failing(3, num_choices=2), Terms(tokens=10**10)
    series = script.series(terms)
    picked, _ = search(terms, series, script.ask)
    assert picked.winner is not None
    assert picked.winner.cell == pick(terms, script.every_offer(terms)).winner.cell
    said = {(one.server.name, one.reason) for one in _left_out(script.kinds, series, {})}
    for kind in script.kinds:
        reasons = [reason for server, reason in said if server == kind.server.name]
        assert "batch 1: nobody documents how long these take there: mylib::attention" in reasons
        assert any("64 nodes: it failed with ValueError: 256 is not divisible" in reason for reason in reasons)


class Levelling(Script):
    """A script whose memory hardly grows on seven nodes and fewer, unlike what eight and more nodes let expect."""

    def answer(self, cell: Cell) -> Found:
        found = super().answer(cell._replace(num_nodes=64))
        memory, count = found.memory, cell.num_nodes
        assert memory is not None
        part = 0.3 + 4.8 / count if count >= 8 else 0.95 if count >= 3 else 1.1
        available = memory.peak_reserved_bytes + (memory.headroom_bytes or 0)
        reserved = int(part * available)
        memory = struct_replace(memory, peak_reserved_bytes=reserved, headroom_bytes=available - reserved)
        fits = part < 1
        return replace(found, fits=fits, speed=found.speed if fits else None, memory=memory)


def test_what_is_not_likely_to_fit_is_tried_where_it_would_be_better() -> None:
    script, terms = Levelling(0, num_choices=1), Terms(tokens=10**11)
    picked, _ = search(terms, script.series(terms), script.ask)
    assert picked.fewest_nodes is not None
    assert picked.fewest_nodes.cell.num_nodes == 3
    assert cells_of(picked) == cells_of(pick(terms, script.every_offer(terms)))


def test_only_the_exact_global_batch_is_an_offer() -> None:
    script = next(one for one in map(Script, range(100)) if not one.has_global_batch)
    of_a_node = 4096 * 8
    terms = Terms(tokens=10**11, global_batch_tokens=12 * of_a_node)
    picked, offers = search(terms, script.series(terms), script.ask)
    assert {offer.cell.num_nodes * 2**offer.cell.choice for offer in offers} == {12}
    assert picked.winner is not None
    odd = Terms(tokens=10**11, global_batch_tokens=of_a_node + 1)
    series = script.series(odd)
    picked, offers = search(odd, series, script.ask)
    assert (picked.winner, offers) == (None, [])
    assert any("makes the global batch: 1 of them make" in one.reason for one in _left_out(script.kinds, series, {}))


def test_text_and_page_say_what_is_rehearsed_and_what_is_predicted() -> None:
    script, terms = Script(5), Terms(tokens=10**11, deadline_seconds=60 * SECONDS_PER_DAY)
    picked, offers = search(terms, script.series(terms), script.ask)
    plan = _plan(terms, "torchrun train.py --bs {batch}", picked, offers, [], 0)
    document = script_document(plan)
    text = " ".join(plan_text(document).split())
    winner = plan.winner
    assert winner is not None
    assert text.startswith(f"{winner.cell.num_nodes} x {winner.cell.server}")
    assert "(rehearsed, time predicted, never compared" in text  # these formulas have no range
    assert f"setting batch {winner.values['batch']}" in text or f"batch {winner.values['batch']}" in text
    page = plan_page(from_json(to_json(document), PlanDocument))
    assert page.title == "Plan for torchrun train.py --bs {batch} on 100B tokens"
    assert page.source == "rehearsed, time predicted"
    assert plan.rows()[0]["batch"] == winner.values["batch"]


# -- what rehearsals say, and of which servers -----------------------------------------------------------------------


def test_servers_with_the_same_gpus_share_rehearsals_and_what_is_shown_has_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of two servers with H100, which differ in links and in what NCCL keeps: nine batches on one number of nodes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(rehearsals, "RunningRehearsal", FakeRehearsal)
    FakeRehearsal.started = []

    def script(words: list[str], _rank: int) -> RehearsalReport:
        batch = int(words[-1])
        if batch == 8:
            return struct_replace(REPORT, **OUT)
        step = StepWriter()
        step.product(4096 * batch, 4096, 4096)
        weight, indices = step.tensor(1000, 16), step.tensor(512 * batch, dtype=INT64)
        step.operator("aten::embedding", (step.tensor(512, 16),), weight=(weight,), indices=(indices,))
        step.collective("reduce_scatter_base", 10**9, tuple(range(16)), stream=70)  # of gradients, as FSDP does
        if batch == 4:
            step.operator("mylib::attention", (step.tensor(8),), self=(step.tensor(8),))
        return struct_replace(REPORT, issued=step.read(), world_size=16)

    FakeRehearsal.script = staticmethod(script)  # type: ignore[assignment]
    found = plan_command(
        "python train.py {batch}",
        "1T",
        servers=["p5.48xlarge", "a3-highgpu-8g", "ND-MI300X-v5"],
        nodes=[2],
        each={"batch": [1, 2, 4, 8]},
    )
    winner = found.winner
    assert winner is not None
    assert winner.values == {"batch": "2"}
    shown = {offer.cell for offer in found.picked.all()}
    assert len(FakeRehearsal.started) <= 4 + len(shown)
    left = {one.server.name: one.reason for one in found.left_out}
    assert left["ND-MI300X-v5"].startswith("gpu: MI300X cannot be rehearsed; only GPUs by NVIDIA")
    assert left["p5.48xlarge"] == "batch 4: nobody documents how long these take there: mylib::attention"
    assert winner.range is not None
    assert "scripts on one H100 or H200 were rehearsed" in winner.range.because
