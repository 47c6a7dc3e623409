"""How far a dial can be turned, against a scan of every step from the first one on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.catalog.loader import gpu, model, server
from fsdp_bench.plan.search.dial_steps import MOST_BELOW
from fsdp_bench.plan.search.dials import (
    Dial,
    Step,
    batch_dial,
    depth_dial,
    gpus_dial,
    model_dial,
    sequence_dial,
)
from fsdp_bench.plan.search.search import Judge, largest_model, reach, reach_all
from fsdp_bench.replay.allocator import AllocatorReading
from fsdp_bench.simulate.operators.kernels import CPU_GLOO
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Api, Checkpointing, Offload, Precision, ShardingStrategy, TrainSetup

MIB = 1 << 20
CARD = Judge(headroom_bytes=0)
"""The cards here are smaller than what is kept free of a real one."""
GPT2 = model("gpt2").shape()
CELLS = [
    (ShardingStrategy.FULL_SHARD, Api.FSDP1, "bf16-mixed", Checkpointing.NONE, Offload.NONE),
    (ShardingStrategy.SHARD_GRAD_OP, Api.FSDP1, "bf16-mixed", Checkpointing.FULL, Offload.NONE),
    (ShardingStrategy.NO_SHARD, Api.FSDP2, "bf16-true", Checkpointing.NONE, Offload.NONE),
    (ShardingStrategy.FULL_SHARD, Api.FSDP2, "fp32", Checkpointing.SELECTIVE, Offload.PARAMS),
    (ShardingStrategy.HYBRID_SHARD, Api.FSDP1, "bf16-true", Checkpointing.FULL, Offload.NONE),
]


def card(mib: int) -> Gpu:
    return replace(gpu("A100-SXM-80GB"), usable_memory_bytes=mib * MIB)


ONE_NODE = Cluster(server=server("p5.48xlarge"), gpu=gpu(server("p5.48xlarge").gpu), gpus_per_node=8)


def setup_of(cell: tuple[ShardingStrategy, Api, str, Checkpointing, Offload], **fields: object) -> TrainSetup:
    strategy, api, precision, checkpointing, offload = cell
    return TrainSetup(
        strategy=strategy,
        api=api,
        precision=Precision.parse(precision),
        checkpointing=checkpointing,
        offload=offload,
        world_size=8,
        sequence_length=128,
        **fields,  # type: ignore[arg-type]
    )


def scanned(dial: Dial, judge: Judge) -> int:
    """The last step below the first that does not fit, by trying them all with the estimate that `predict` prints."""
    for index in itertools.count():
        if index == len(dial) or judge.estimate(dial[index]).fits is False:
            return index - 1
    raise AssertionError


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("mib", [900, 1100])
def test_the_largest_model_is_what_a_scan_of_the_ladder_finds(
    cell: tuple[ShardingStrategy, Api, str, Checkpointing, Offload], mib: int
) -> None:
    dial = model_dial(Family.LLAMA, setup_of(cell), card(mib), vocab_size=2000)
    found = reach(dial, CARD)
    # A device alone tells nothing of the host, so `fits` of an offloaded setup is None where the card holds it.
    assert found.fits == scanned(dial, CARD)
    assert found.at is not None
    assert found.beyond is not None
    assert found.at.fits is not False
    assert found.beyond.fits is False
    assert found.runs >= found.fits
    assert judge_runs(dial, found.runs)
    assert not judge_runs(dial, found.runs + 1)


def judge_runs(dial: Dial, index: int) -> bool:
    return CARD.estimate(dial[index]).allocator.out_of_memory is None


@pytest.mark.parametrize("make", [depth_dial, batch_dial, sequence_dial])
def test_other_dials_end_where_a_scan_does(make: object) -> None:
    setup = setup_of(CELLS[0])
    dial = make(replace(GPT2, max_position_embeddings=8192), setup, card(3000))  # type: ignore[operator]
    found = reach(dial, CARD)
    assert 0 <= found.fits < len(dial) - 1
    assert found.fits == scanned(dial, CARD)


def test_fewest_gpus_is_a_dial_that_is_turned_down() -> None:
    node = server("p5.48xlarge")
    cluster = Cluster(server=node, gpu=replace(gpu(node.gpu), usable_memory_bytes=5000 * MIB), gpus_per_node=8)
    shape = model("gpt2-xl").shape()
    setup = setup_of((ShardingStrategy.FULL_SHARD, Api.FSDP1, "bf16-mixed", Checkpointing.FULL, Offload.NONE))
    dial = gpus_dial(shape, setup, cluster)
    found = reach(dial, CARD)
    fewest = dial[found.fits].setup.world_size
    assert found.beyond is not None
    assert dial[found.fits + 1].setup.world_size == found.beyond.setup.world_size
    assert found.beyond.fits is False
    # 16 bytes a parameter and more stay with 4 GPUs, 8 hold them.
    assert 4 < fewest <= 16


def test_host_memory_limits_an_offloaded_model() -> None:
    node = replace(server("p5.48xlarge"), host_memory_bytes=64 * 2**30)
    cluster = Cluster(server=node, gpu=gpu(node.gpu), gpus_per_node=8)
    setup = setup_of((ShardingStrategy.FULL_SHARD, Api.FSDP2, "bf16-mixed", Checkpointing.FULL, Offload.PARAMS))
    dial = model_dial(Family.LLAMA, setup, cluster)
    found = reach(dial, CARD)
    assert found.limited_by is not None
    assert (found.limited_by.place, found.limited_by.phase) == ("host", "training")
    assert found.at is not None
    assert found.at.host.peak_bytes <= 64 * 2**30
    assert found.beyond is not None
    assert found.beyond.host.peak_bytes > 64 * 2**30
    assert found.runs == found.fits


def test_the_hosts_limit_is_below_its_first_failure() -> None:
    """Pinned tensors take powers of two, so a wider model with fewer layers may need less than the one before it."""
    node = server("a3-highgpu-8g")
    cluster = Cluster(server=node, gpu=gpu(node.gpu), gpus_per_node=8)
    setup = setup_of((ShardingStrategy.FULL_SHARD, Api.FSDP2, "bf16-true", Checkpointing.FULL, Offload.PARAMS))
    dial = model_dial(Family.LLAMA, setup, cluster)
    found = reach(dial, CARD)
    shares = [CARD.host_share(step) for step in (dial[index] for index in range(len(dial)))]
    first = next(index for index, share in enumerate(shares) if share > 1)
    assert found.fits == first - 1
    assert any(share <= 1 for share in shares[first:])


@pytest.mark.parametrize(
    ("setup", "hardware", "because"),
    [
        (TrainSetup(world_size=8, precision=Precision.parse("fp16-mixed")), gpu("T4"), "no flash attention"),
        (TrainSetup(strategy=ShardingStrategy.HYBRID_SHARD), card(9000), "at least 2 groups"),
        (TrainSetup(world_size=16), ONE_NODE, "16 is not the cluster's 8 GPUs"),
    ],
)
def test_what_predict_has_no_answer_to_is_refused(setup: TrainSetup, hardware: Cluster | Gpu, because: str) -> None:
    with pytest.raises(SpecError, match=because):
        largest_model(setup, hardware)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("mib", [180, 256, 300])
def test_a_budget_of_live_bytes_stands_for_a_card(
    cell: tuple[ShardingStrategy, Api, str, Checkpointing, Offload], mib: int
) -> None:
    """Live bytes fall where the ladder gets wider and less deep; the answer is below the first that is too large."""
    setup = replace(setup_of(cell), sequence_length=512, world_size=4)
    dial = model_dial(Family.LLAMA, setup, None, vocab_size=4096)
    judge = Judge(kernels=CPU_GLOO, budget_bytes=mib * MIB)
    found = reach(dial, judge)
    lives = [judge.live_bytes(dial[index]) for index in range(found.fits + 2)]
    assert max(lives[:-1], default=0) <= mib * MIB < lives[-1]
    assert found.runs == found.fits  # nothing is tried again where there is no cache to flush


def test_many_dials_are_answered_as_one_by_one() -> None:
    dials = [model_dial(Family.LLAMA, setup_of(cell), card(900), vocab_size=2000) for cell in CELLS[:3]]
    told: list[int] = []
    together = reach_all(dials, CARD, told.append)
    assert told == [1, 2, 3]
    assert [(found.fits, found.runs) for found in together] == [
        (found.fits, found.runs) for found in (reach(dial, CARD) for dial in dials)
    ]


def test_a_card_too_small_for_every_step_has_no_answer() -> None:
    found = reach(model_dial(Family.LLAMA, setup_of(CELLS[0]), card(60)), CARD)
    assert (found.fits, found.at) == (-1, None)
    assert found.beyond is not None
    assert found.beyond.model.num_parameters == model_dial(Family.LLAMA, setup_of(CELLS[0]), None).values[0]


def test_a_card_smaller_than_what_is_kept_free_has_no_answer() -> None:
    found = reach(model_dial(Family.LLAMA, setup_of(CELLS[0]), card(60)), Judge())
    assert (found.fits, found.at) == (-1, None)


def test_a_card_of_unknown_size_is_said_to_be() -> None:
    with pytest.raises(SpecError, match="nobody documents how much of a A100-SXM-80GB"):
        reach(model_dial(Family.LLAMA, setup_of(CELLS[0]), replace(card(1), usable_memory_bytes=None)), CARD)


class Curve:
    """Judges a made-up ladder of four depths a width: what each step reserves is given, live bytes are a part of it."""

    budget_bytes = None

    @dataclass
    class Replay:
        """Reserves the same at first and later."""

        curve: Curve
        reserved: int

        def until(self, _step: int | None = None) -> AllocatorReading:
            self.curve.num_replays += 1
            return AllocatorReading(self.reserved, {}, self.reserved, self.reserved, 0, None, None)

    def __init__(self, reserved: Sequence[int], size: int) -> None:
        self.reserved, self.size = reserved, size
        self.num_replays = 0
        self.dial = Dial("index", range(len(reserved)), self.step)

    def step(self, index: int) -> Step:
        width = 64 * (1 + index // 4)
        shape = replace(
            GPT2, num_hidden_layers=1 + index, hidden_size=width, num_attention_heads=1, num_key_value_heads=1
        )
        return Step(shape, TrainSetup(), None)

    def size_bytes(self, _step: Step) -> int:
        return self.size

    def live_bytes(self, step: Step) -> int:
        return self.reserved[step.model.num_hidden_layers - 1] * 3 // 4

    def refuse(self, _step: Step) -> None:
        """Every step can be judged."""

    def host_share(self, _step: Step) -> float:
        return 0.0

    def program(self, step: Step) -> int:
        return self.reserved[step.model.num_hidden_layers - 1]

    def replay(self, reserved: int, _card_bytes: int | None = None) -> Curve.Replay:
        return self.Replay(self, reserved)

    def estimate(self, *_: object) -> None:
        """Nothing more is known of a made-up step."""

    limit = estimate


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.integers(10, 40), st.floats(-0.03, 0.03)), min_size=3, max_size=60),
    st.integers(900, 12_000),
)
def test_the_first_failure_is_found_where_widths_jump(widths: list[tuple[int, float]], size: int) -> None:
    """Within a width a step adds its own; from one width to the next, what is reserved jumps up to 3 % either way."""
    reserved, base = [], 1000.0
    for added, jump in widths:
        reserved += [round((base + added * depth) * (1 + jump)) for depth in range(4)]
        base = (base + 4 * added) * 1.01
    curve = Curve(reserved, size)
    expected = next((index for index, bytes_ in enumerate(reserved) if bytes_ > size), len(reserved)) - 1
    found = reach(curve.dial, curve)  # type: ignore[arg-type]
    assert found.fits == expected
    # A search by halves, and at most MOST_BELOW steps below its end.
    assert curve.num_replays <= MOST_BELOW + 2 * len(reserved).bit_length() + 4
