"""Plans against brute force: every setting on every number of nodes, with the allocator's simulation."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as struct_replace

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.catalog.lookup import adapted_model, in_other_code, model
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.purchase.document import document
from fsdp_bench.plan.purchase.fastest import Timed
from fsdp_bench.plan.purchase.goal import Goal, can_run, micro_batches, settings, setup_of
from fsdp_bench.plan.purchase.offer import SettingOffer
from fsdp_bench.plan.purchase.pick import pick, reason_of
from fsdp_bench.plan.purchase.planner import ModelPlan, kinds_of, most_useful_nodes, plan
from fsdp_bench.plan.purchase.searched import ServerType
from fsdp_bench.plan.purchase.simulated import Simulated
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.ranges import peak_range, prediction_errors
from fsdp_bench.report.text.plan import plan_text
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.price import Price, StatedPrice
from fsdp_bench.spec.setup import Api, Checkpointing, Loss, Offload, Precision, ShardingStrategy, TrainSetup

FIXED: dict[str, Any] = {"precision": Precision.parse("bf16-mixed"), "sequence_length": 2048}
ONE_STRATEGY = {**FIXED, "strategy": ShardingStrategy.FULL_SHARD, "api": Api.FSDP2}
"""Where the choice of a strategy is not the subject: each takes as long as all others."""
FULL = {**ONE_STRATEGY, "checkpointing": Checkpointing.FULL}
NODES = (1, 2, 3)


def kind(name: str) -> ServerType:
    server = BUILT_IN.server(name)
    return ServerType(server, BUILT_IN.gpu(server.gpu), BUILT_IN.price(server), server.gpus_per_node)


def goal(name: str, fixed: dict[str, Any] = FIXED, **fields: Any) -> Goal:
    return Goal(model=model(name, 2048), fixed=fixed, tokens=10**10, **fields)


def nodes_of(where: ServerType, nodes: int = 1) -> Hardware:
    return Hardware(server=where.server, gpu=where.gpu, num_nodes=nodes, gpus_per_node=where.gpus_per_node)


def _offer(given: Goal, timed: Timed, price: Price | None, segments: bool = False) -> SettingOffer:
    return SettingOffer(goal=given, timed=timed, price=price, expandable_segments=segments)


def _brute_force(given: Goal, server: str, counts: Sequence[int] = NODES) -> list[SettingOffer]:
    """Return every setup that fits, on every number of nodes."""
    where, found = kind(server), []
    for nodes in counts:
        cluster = nodes_of(where, nodes)
        for setting in settings(given):
            for batch in micro_batches(given):
                setup = setup_of(given, setting, batch, nodes, where.gpus_per_node)
                if setup is None or not can_run(given, setup):
                    continue
                for segments in (False, True):
                    prediction = answer(Question(given.model, setup, cluster, expandable_segments=segments))
                    if prediction.fits:
                        speed = prediction.speed.tokens_per_second_per_gpu
                        found.append(_offer(given, Timed(cluster, setup, speed), where.price, segments))
                        break
                else:
                    break
    return found


@pytest.mark.parametrize("name", ["bert-base-uncased", "a user's own model"])
def test_a_model_whose_loss_is_its_own_is_planned_without_another(name: str) -> None:
    """A plan tries the chunked loss; of these models it is refused, and was, for the whole plan."""
    found = model("bert-base-uncased" if name == "bert-base-uncased" else "Qwen2.5-0.5B", 512, code="huggingface")
    if name == "a user's own model":  # as `record --module` writes it
        code = msgspec.structs.replace(found.code, origin=msgspec.structs.replace(found.code.origin, code="module"))
        found = msgspec.structs.replace(found, code=code)
    asked = Goal(model=found, fixed={**ONE_STRATEGY, "sequence_length": 512}, tokens=10**9)
    winner = plan(asked, [kind("g5.48xlarge")], [1]).picked.winner
    assert winner.timed.setup.loss is Loss.PLAIN


def test_a_stated_price_is_paid_for_every_node() -> None:
    """2 dollars for each GPU-hour, on three nodes of eight GPUs: 48 an hour."""
    where = kind("p4d.24xlarge")
    asked = goal("Llama-2-7B", stated_price=StatedPrice(2.0, True, "EUR"))
    offer = _offer(asked, Timed(nodes_of(where, 3), TrainSetup(**ONE_STRATEGY, world_size=24), 1000.0), where.price)
    assert offer.per_hour == 48
    assert offer.cost == pytest.approx(48 * 10**10 / (24 * 1000.0) / 3600)


def test_a_budget_must_cover_the_slow_end_of_the_range() -> None:
    """Training may take longer, and so cost more, by as much as published runs were predicted too fast."""
    timed = Timed(nodes_of(kind("p4d.24xlarge")), TrainSetup(**ONE_STRATEGY, world_size=8), 1000.0)
    asked = goal("Llama-2-7B", stated_price=StatedPrice(2.0, True))
    predicted = 16 * 10**10 / (8 * 1000.0) / 3600  # 2 dollars for each of 8 GPU-hours
    slow = predicted * (1 + prediction_errors().speed.nodes["one node"][1])
    met = [
        _offer(replace(asked, budget=limit), timed, None).meets_budget
        for limit in (predicted, 0.99 * slow, 1.01 * slow)
    ]
    assert met == [False, False, True]


def _offers(asked: Goal, name: str, speeds: dict[int, float]) -> list[SettingOffer]:
    """Return offers on so many servers each with the speed of one GPU."""
    where, found = kind(name), []
    for nodes, speed in speeds.items():
        setup = TrainSetup(**ONE_STRATEGY, world_size=8 * nodes)
        found.append(_offer(asked, Timed(nodes_of(where, nodes), setup, speed), where.price))
    return found


@pytest.mark.parametrize(
    ("speeds", "most"),
    [
        ({1: 100.0, 2: 90.0, 4: 40.0, 8: 20.0}, 2),  # all GPUs: 800, 1,440, 1,280, 1,280
        ({1: 100.0, 2: 90.0, 4: 50.0}, None),  # 800, 1,440, 1,600
        ({4: 100.0}, None),
    ],
)
def test_more_servers_than_are_useful_are_slower(speeds: dict[int, float], most: int | None) -> None:
    asked = goal("Llama-2-7B")
    offers = _offers(asked, "p4d.24xlarge", speeds)
    others = _offers(asked, "p5.48xlarge", {16: 1000.0})  # of another kind
    assert most_useful_nodes(offers[0], [*offers, *others]) == most


def test_the_reason_of_a_deadline_has_the_least_price_in_time() -> None:
    """p4d.24xlarge at 2 dollars a GPU and hour; 10 billion tokens, so 2 * 10**10 / speed / 3600 dollars."""
    asked = goal("Llama-2-7B", stated_price=StatedPrice(2.0, True, "USD"), deadline_seconds=10.0**6)
    offers = _offers(asked, "p4d.24xlarge", {4: 1000.0, 2: 995.0, 8: 900.0, 1: 10.0})  # the last is late
    picked = pick(asked, offers)
    assert picked.winner is offers[1]
    assert reason_of(asked, picked, 1279) == (
        "1,279 offers fit. Those that meet the deadline, even at the slow end of the range, cost at least 5,556 USD"
        " (predicted); this one needs the fewest GPUs within 1% of that"
    )
    assert reason_of(asked, picked, 1).startswith("no other offer fits, and it meets the deadline, even at the slow")


def test_progress_names_every_kind_of_server_and_then_what_is_searched() -> None:
    said: list[str] = []
    fixed = {**FULL, "micro_batch_size": 1, "loss": Loss.PLAIN}
    names = ["p4d.24xlarge", "p5.48xlarge"]
    found = plan(goal("1B", fixed=fixed), [kind(name) for name in names], (1, 2), said.append)
    assert said[:2] == names
    assert all(any(name in what for name in names) for what in said)
    assert any(re.fullmatch(r"\d x p[45]d?\.\d+xlarge: offer 1 of \d", what) for what in said)
    assert said[-1] == f"a safer setting on {found.winner.cluster.server.name}"


HYBRID = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
SHARDED = {"strategy": (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)}


@pytest.mark.parametrize("server", ["p5.48xlarge", "g5.48xlarge"])
@pytest.mark.parametrize("base", ["bf16", pytest.param("nf4", marks=pytest.mark.slow)])
def test_no_setting_trains_adapters_faster_than_the_bound_by_which_settings_are_left_out(
    base: str, server: str
) -> None:
    """On fast GPUs the host's time for each unit decides, on slow ones what the GPU copies."""
    adapted = adapted_model("Llama-3.2-1B", 2048, LoRA(rank=16, base=base))
    fixed = {**FIXED, "checkpointing": Checkpointing.NONE, "loss": Loss.PLAIN, "micro_batch_size": 1}
    given, where = Goal(model=adapted, fixed=fixed, tokens=10**10), kind(server)
    most, simulated = nodes_of(where), Simulated(given, 1)
    for setting in settings(given):
        setup = setup_of(given, setting, 1, 1, 8)
        if setup is not None and can_run(given, setup):
            speed = answer(Question(adapted, setup, most)).speed.tokens_per_second_per_gpu
            assert speed <= simulated.without_communication(most, setting, 1), setting


@pytest.mark.parametrize(
    ("name", "server", "counts", "choices", "fixed"),
    [
        ("3B", "g5.48xlarge", NODES, SHARDED, {"api": Api.FSDP2, "loss": Loss.PLAIN, "max_grad_norm": 1.0}),
        *(
            pytest.param(*which, NODES, {}, {}, marks=pytest.mark.slow, id=f"{which[0]} in all settings")
            for which in (
                ("3B", "g5.48xlarge"),
                ("Llama-3.2-1B", "p4d.24xlarge"),
                ("Llama-2-7B", "p4d.24xlarge"),
                ("Llama-3.1-8B", "p5.48xlarge"),
            )
        ),
        # a larger micro-batch begins to fit on 8 nodes, where a GPU is faster than on 4 and on 12
        pytest.param(
            *("Llama-2-13B", "g5.48xlarge", range(1, 13), {}, {}), marks=pytest.mark.slow, id="Llama-2-13B on 12 nodes"
        ),
        # nothing is missed between the numbers of nodes that are searched
        *(
            pytest.param(
                *(name, "p4d.24xlarge", range(1, 13), {"strategy": HYBRID}, {"api": Api.FSDP2, "loss": Loss.PLAIN}),
                marks=pytest.mark.slow,
                id=f"{name} on 12 nodes",
            )
            for name in ("Llama-3.2-1B", "3B", "Llama-2-7B")
        ),
    ],
)
def test_winner_cheapest_and_fewest_nodes_are_those_of_brute_force(
    name: str, server: str, counts: Sequence[int], choices: dict[str, Any], fixed: dict[str, Any]
) -> None:
    asked = goal(name, {**FIXED, **fixed}, stated_price=StatedPrice(2.0, True), open=choices)
    every = _brute_force(asked, server, counts)
    found = plan(asked, [kind(server)], counts)
    picked = found.picked
    cheapest = min(every, key=lambda offer: offer.cost or 0.0)
    assert picked.cheapest.cost == pytest.approx(cheapest.cost, rel=0.003)
    fastest = max(every, key=lambda offer: offer.tokens_per_second)
    assert picked.fastest.tokens_per_second == pytest.approx(fastest.tokens_per_second, rel=0.003)
    assert picked.fewest_nodes.cluster.num_nodes == min(offer.cluster.num_nodes for offer in every)
    allowed = [offer for offer in every if (offer.cost or 0.0) <= 1.05 * (cheapest.cost or 0.0)]
    winner = max(allowed, key=lambda offer: offer.tokens_per_second)
    assert picked.winner.tokens_per_second == pytest.approx(winner.tokens_per_second, rel=0.003)


def _plan(server: str = "p4d.24xlarge", **fields: Any) -> ModelPlan:
    return plan(goal("1B", FULL, **fields), [kind(server)], (1, 2, 4))


def test_an_offer_fits_with_its_headroom_and_has_the_time_of_predict() -> None:
    offer = _plan(global_batch_tokens=2**20).picked.winner
    assert offer.prediction.fits
    whole = answer(Question(offer.goal.model, offer.timed.setup, offer.cluster))
    assert whole.speed.tokens_per_second_per_gpu == pytest.approx(offer.tokens_per_second_per_gpu, rel=0.002)
    assert whole.needed_bytes == pytest.approx(offer.prediction.needed_bytes, rel=0.01)
    setup = offer.timed.setup
    made = setup.tokens_per_step_per_rank * setup.world_size
    assert made == pytest.approx(2**20, rel=0.1)


def test_a_power_limit_makes_the_same_setting_slower_and_stands_in_the_answer() -> None:
    default, limited = (
        plan(goal("Llama-3.1-8B", FULL), kinds_of(BUILT_IN.under_power(limit), ["p5.48xlarge"]), (1,))
        for limit in (None, "500W")
    )
    fast, slow = (one.picked.winner.tokens_per_second_per_gpu for one in (default, limited))
    assert 1.2 < fast / slow < 628 / 428  # products, which take 628 / 428 as long, are most of the step
    assert "(8 H100-SXM at 500 W)" in plan_text(document(limited, with_step=False))
    assert "(8 H100-SXM)" in plan_text(document(default, with_step=False))


def test_a_deadline_is_met_at_the_slow_end_by_the_cheapest() -> None:
    free = _plan().picked
    assert free.cheapest is not None
    limit = free.fastest.slow_seconds * 1.5
    found = _plan(deadline_seconds=limit).picked
    assert found.winner.slow_seconds <= limit
    assert found.winner.cluster.num_nodes > 1


def test_offload_is_planned_where_nothing_else_fits() -> None:
    found = plan(goal("13B"), [kind("g5.48xlarge")], (1,))
    assert found.winner.timed.setup.offload is Offload.PARAMS


def test_servers_without_an_answer_are_named_with_the_reason() -> None:
    found = plan(goal("400B"), [kind("g5.48xlarge"), kind("p3dn.24xlarge")], (1,))
    assert found.picked.winner is None
    assert {left.server.name: left.reason for left in found.left_out} == {
        "g5.48xlarge": "nothing fits on up to 1 node",
        "p3dn.24xlarge": "plans train in bf16, which its GPU has not; max-size --precision fp16-mixed says what fits",
    }


def test_servers_that_are_never_searched_could_not_have_been_picked() -> None:
    asked = goal("3B", ONE_STRATEGY, stated_price=StatedPrice(2.0, True))
    kinds = [kind(name) for name in ("g5.48xlarge", "p4d.24xlarge", "p5.48xlarge", "ND-H100-v5")]
    alone = [plan(asked, [one], (1, 2)).picked for one in kinds]
    picked = plan(asked, kinds, (1, 2)).picked
    cheapest, fastest = picked.cheapest, picked.fastest
    assert cheapest.cost == min(one.cheapest.cost or 0.0 for one in alone if one.cheapest)
    speeds = [one.fastest.tokens_per_second for one in alone if one.fastest]
    assert fastest.tokens_per_second == max(speeds)


def test_every_server_of_the_catalogue_has_offers_or_is_left_out_with_a_reason() -> None:
    asked = goal("1B", fixed={**FULL, "loss": Loss.PLAIN})
    found = plan(asked, kinds_of(BUILT_IN, []), (1,))
    assert found.winner.cluster.server.name in found.looked_at
    left = {one.server.name: one.reason for one in found.left_out}
    assert all(left.values())
    assert left.keys() | set(found.looked_at) == {server.name for server in BUILT_IN.servers()}


def test_a_server_whose_memory_the_allocator_alone_exceeds_is_left_out_with_the_reason() -> None:
    """Live bytes fit on all numbers of nodes, what the allocator reserves on none; NO_SHARD takes as much on each."""
    fixed = {"strategy": ShardingStrategy.NO_SHARD, "api": Api.FSDP2, "loss": Loss.PLAIN, "offload": Offload.NONE}
    given = goal("1B", {**FIXED, **fixed, "checkpointing": Checkpointing.NONE, "micro_batch_size": 1})
    where = kind("p4d.24xlarge")
    asked = Question(given.model, TrainSetup(**given.fixed, world_size=32), nodes_of(where, 4))
    each = [answer(replace(asked, expandable_segments=segments)) for segments in (False, True)]
    between = (each[0].memory.peak_allocated_bytes + min(one.needed_bytes for one in each)) // 2
    found = plan(replace(given, headroom_bytes=where.gpu.usable_memory_bytes - between), [where], range(1, 20))
    assert [(left.server.name, left.reason) for left in found.left_out] == [
        ("p4d.24xlarge", "nothing fits on up to 19 nodes")
    ]


def test_a_global_batch_that_the_most_nodes_cannot_make_is_planned_on_fewer() -> None:
    asked = goal("1B", global_batch_tokens=2**17, fixed=ONE_STRATEGY)
    found = plan(asked, [kind("p4d.24xlarge")], (1, 2, 16))
    assert found.winner.cluster.num_nodes < 16
    with pytest.raises(SpecError, match="no number of nodes makes a global batch of 1,000 tokens"):
        plan(goal("1B", global_batch_tokens=1000), [kind("p4d.24xlarge")], (1, 2))


def _without(link: str) -> ServerType:
    where = kind("g6e.48xlarge")
    return replace(where, server=struct_replace(where.server, **{link: None}))


LATE, POOR = {"deadline_seconds": 60.0}, {"budget": 1.0}
SPENT = r"--deadline \d+d, or more nodes; the cheapest costs [\d,]+ at the slow end: --budget \d+k$"
NOT_CONNECTED = (
    r"^(?!.*nothing fits).*nothing says how fast its {} are connected \(fsdp-bench calibrate measures it there\)"
    r".*fsdp-bench predict --server g6e.48xlarge --nodes {} says its memory"
)


@pytest.mark.parametrize(
    ("asked", "where", "nodes", "reason"),
    [
        (goal("1B", FULL, **LATE), kind("p4d.24xlarge"), (1, 2, 4), "--deadline"),
        (goal("1B", FULL, **POOR), kind("p4d.24xlarge"), (1, 2, 4), "--budget"),
        (goal("1B", FULL, budget=1e9), kind("DGX-H100"), (1, 2, 4), "--price"),
        (goal("1B", FULL, **LATE, **POOR), kind("p4d.24xlarge"), (1, 2, 4), SPENT),
        (goal("30B", {**ONE_STRATEGY, "offload": Offload.NONE}), kind("p4d.24xlarge"), (1,), "--nodes {nearest}"),
        (
            goal("7B", {**FIXED, "sequence_length": 2**19}),
            *(kind("p4d.24xlarge"), (1, 2), "more GPUs do not help.*no strategy shards activations"),
        ),
        (
            goal("7B"),
            *(kind("ND-MI300X-v5"), (1, 2)),
            "^(?!.*do not help).*it may fit on 1 node, but its speed is not known",
        ),
        (goal("1B", ONE_STRATEGY), _without("intra_node"), (1,), NOT_CONNECTED.format("GPUs", 1)),
        (goal("1B", ONE_STRATEGY), _without("inter_node"), (2,), NOT_CONNECTED.format("nodes", 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_without_a_winner_says_why_and_what_would_change_it(
    asked: Goal, where: ServerType, nodes: tuple[int, ...], reason: str
) -> None:
    found = plan(asked, [where], nodes)
    assert found.winner is None
    nearest = found.picked.nearest
    assert re.search(reason.format(nearest=nearest[0].cluster.num_nodes) if "{" in reason else reason, found.reason)
    if asked.deadline_seconds or asked.budget or "{" in reason:
        assert nearest[0].prediction.fits


def test_gpus_on_pcie_have_a_wide_range_and_do_not_win_before_hardware_that_was_compared_with_runs() -> None:
    """Processors of g6e.48xlarge are not documented."""
    cheap = kind("g6e.48xlarge")
    cheap = replace(cheap, price=struct_replace(cheap.price, on_demand_per_hour=0.1))
    found = plan(goal("1B", FULL), [cheap, kind("p4d.24xlarge")], (1,)).picked
    assert found.winner.cluster.server.name == "p4d.24xlarge"
    assert found.cheapest.cluster.server.name == "g6e.48xlarge"
    for pcie in (found.cheapest, _plan("g5.48xlarge").winner):
        assert pcie.slow_seconds == pytest.approx(8.7 * pcie.seconds)


def test_hardware_that_was_compared_with_runs_wins_before_other_hardware() -> None:
    asked = goal("1B", deadline_seconds=30 * 86_400.0, fixed=ONE_STRATEGY)
    found = plan(asked, [kind("p6-b200.48xlarge"), kind("p5.48xlarge")], (1, 2))
    assert found.winner.range.is_like_published
    alone = plan(asked, [kind("p6-b200.48xlarge")], (1, 2))
    assert "even 0.3 times as fast as predicted, as no run on B200 was ever compared" in alone.reason
    assert "slow end" not in alone.reason


def test_energy_is_that_of_the_slow_end() -> None:
    found = plan(goal("1B", stated_price=StatedPrice(2.0, True)), [kind("DGX-H100")], (1,)).winner
    watts = found.cluster.server.power_watts
    assert found.slow_megawatt_hours == pytest.approx(watts * found.slow_seconds / 3.6e9)  # joules of a MWh


def test_a_plan_says_what_its_servers_take_with_the_other_code() -> None:
    """The winner's setting if it fits, else the best that does: what a plan for that code on these servers finds."""
    own, other = model("Llama-3.1-8B", 2048), model("Llama-3.1-8B", 2048, code="huggingface")
    for size, fits in ((1, True), (2, False)):  # 2 sequences of the benchmark's code fit without checkpointing
        fixed = {**ONE_STRATEGY, "loss": Loss.PLAIN, "micro_batch_size": size}
        some = {"checkpointing": (Checkpointing.NONE, Checkpointing.FULL)}
        asked = Goal(model=own, other=other, fixed=fixed, open=some, tokens=10**10)
        where = [kind("p4d.24xlarge")]
        beside, alone = (plan(each, where, (4,)) for each in (asked, replace(asked, model=other, other=None)))
        assert beside.other_code.is_same_setting is fits
        assert beside.other_code.offer.cost == pytest.approx(alone.winner.cost)


def test_a_model_without_other_code_has_one_price() -> None:
    assert in_other_code("Qwen3-8B", model("Qwen3-8B", 2048), 2048) is None
    llama = model("Llama-3.1-8B", 2048)
    other = in_other_code("Llama-3.1-8B", llama, 2048)
    assert other is not None
    assert in_other_code("Llama-3.1-8B", other, 2048) == llama


def test_the_safest_offer_fits_with_the_highest_peak_that_other_code_took_and_meets_the_deadline() -> None:
    asked = goal("Llama-2-7B", ONE_STRATEGY)
    free = plan(asked, [kind("p4d.24xlarge")], (1,)).picked
    span = peak_range(compiled=False)
    assert not free.winner.fits_if_higher(span.highest)
    usable = free.safest.prediction.available_bytes
    assert free.safest.prediction.needed_bytes * span.highest <= usable
    assert (free.safest.cost or 0.0) >= (free.winner.cost or 0.0)
    days = (free.winner.slow_seconds or 0.0) * 1.01  # in which the winner alone ends on one node
    late = plan(replace(asked, deadline_seconds=days), [kind("p4d.24xlarge")], (1, 2, 3)).picked
    assert late.winner.cluster.num_nodes == 1
    assert late.safest.meets_deadline
    assert late.safest.cluster.num_nodes == 2


def test_a_winner_that_leaves_enough_is_the_safest() -> None:
    fixed = {**FULL, "micro_batch_size": 1}
    picked = plan(goal("1B", fixed=fixed), [kind("p4d.24xlarge")], (1,)).picked
    assert picked.safest is picked.winner is not None
