"""The largest value of a quantity that fits, against a scan of every step from the first one on."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.catalog.loader import gpu, model, server
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.search.fit import FitCheck
from fsdp_bench.plan.search.quantity import Quantity, batch_sizes, layer_counts, sequence_lengths, size_ladder
from fsdp_bench.plan.search.search import find_all, find_largest
from fsdp_bench.replay.live_memory import worst_rank
from fsdp_bench.simulate.operators.kernels import CPU_GLOO
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Api, Checkpointing, Offload, Precision, ShardingStrategy, TrainSetup
from tests.profiles import draws

MIB = 1 << 20
PRECISIONS = ("fp32", "bf16-mixed", "bf16-mixed-bf16-reduce", "fp16-mixed", "bf16-true")
CARD = FitCheck(headroom_bytes=0)
"""The cards here are smaller than what is kept free of a real one."""
GPT2 = model("gpt2").shape()
CELLS = [
    (ShardingStrategy.FULL_SHARD, Api.FSDP1, "bf16-mixed", Checkpointing.NONE, Offload.NONE),
    (ShardingStrategy.SHARD_GRAD_OP, Api.FSDP1, "bf16-mixed", Checkpointing.FULL, Offload.NONE),
    (ShardingStrategy.NO_SHARD, Api.FSDP2, "bf16-true", Checkpointing.NONE, Offload.NONE),
    (ShardingStrategy.FULL_SHARD, Api.FSDP2, "fp32", Checkpointing.SELECTIVE, Offload.PARAMS),
    (ShardingStrategy.HYBRID_SHARD, Api.FSDP1, "bf16-true", Checkpointing.FULL, Offload.NONE),
]


def card(mib: int | None) -> Hardware:
    usable = None if mib is None else mib * MIB
    return Hardware.of_gpu(replace(gpu("A100-SXM-80GB"), usable_memory_bytes=usable))


NOT_NVIDIA = Hardware.of_gpu(replace(gpu("T4"), compute_capability=None))
ONE_NODE = Hardware(server=server("p5.48xlarge"), gpu=gpu(server("p5.48xlarge").gpu), gpus_per_node=8)
Cell = tuple[ShardingStrategy, Api, str, Checkpointing, Offload]


def setup_of(cell: Cell) -> TrainSetup:
    names = ("strategy", "api", "precision", "checkpointing", "offload")
    return TrainSetup(world_size=8, sequence_length=128, **dict(zip(names, cell, strict=True)))


def fits(quantity: Quantity, index: int, check: FitCheck = CARD) -> bool:
    """Whether the estimate that `predict` prints does not deny it; without a server nothing is known of the host."""
    return check.on(quantity[index]).prediction.fits is not False


def drawn_cell(number: int) -> Cell:
    draw = random.Random(number)
    kinds = (ShardingStrategy, Api, PRECISIONS, Checkpointing, Offload)
    while True:
        cell = tuple(draw.choice(list(kind)) for kind in kinds)
        with suppress(SpecError):
            if impossible(setup_of(cell), "cuda") is None:
                return cell


@pytest.mark.parametrize(
    "cell", [*CELLS, *(pytest.param(drawn_cell(n), marks=pytest.mark.slow) for n in range(draws(6, 24)))], ids=str
)
@pytest.mark.parametrize(
    ("mib", "family", "expandable_segments"),
    [
        (900, Family.LLAMA, False),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in ((1100, Family.LLAMA, True), (1400, Family.GPT2, False))
        ),
    ],
)
def test_the_largest_model_is_what_a_scan_of_the_ladder_finds(
    cell: Cell, mib: int, family: Family, expandable_segments: bool
) -> None:
    """The definition, model by model: the last width whose shallowest model fits, then the most layers that fit."""
    quantity = size_ladder(family, setup_of(cell), card(mib), vocab_size=2000)
    check = dataclasses.replace(CARD, expandable_segments=expandable_segments)
    widths = itertools.takewhile(lambda width: check.on(quantity[width[0]]).fullness <= 1, quantity.widths)
    *_, last = [width for width in widths if fits(quantity, width[0], check)]
    found = find_largest(quantity, check)
    assert found.fits == max(index for index in last if fits(quantity, index, check))
    assert found.at.fits is not False
    assert found.beyond.fits is False
    assert found.runs >= found.fits
    runs = [check.on(quantity[found.runs + above]).prediction.allocator.out_of_memory is None for above in (0, 1)]
    assert runs == [True, False]


@pytest.mark.parametrize("make", [layer_counts, batch_sizes, sequence_lengths])
def test_other_quantities_end_below_the_first_that_does_not_fit(make: object) -> None:
    setup = setup_of(CELLS[0])
    quantity = make(replace(GPT2, max_position_embeddings=8192), setup, card(3000))
    found = find_largest(quantity, CARD)
    assert 0 <= found.fits < len(quantity) - 1
    assert found.fits == next(index for index in itertools.count() if not fits(quantity, index)) - 1


def test_the_largest_that_the_host_holds_may_be_above_one_that_it_does_not_hold() -> None:
    """Pinned tensors take powers of two, so a wider model with fewer layers may need less than the one before it."""
    node = server("a3-highgpu-8g")
    cluster = Hardware(server=node, gpu=gpu(node.gpu), gpus_per_node=8)
    setup = setup_of((ShardingStrategy.FULL_SHARD, Api.FSDP2, "bf16-true", Checkpointing.FULL, Offload.PARAMS))
    quantity = size_ladder(Family.LLAMA, setup, cluster)
    found = find_largest(quantity, CARD)
    shares = [CARD.question(quantity[index]).host_memory_fraction for index in range(len(quantity))]
    assert found.fits == max(index for index, share in enumerate(shares) if share <= 1)
    assert any(share > 1 for share in shares[: found.fits])


@pytest.mark.parametrize(
    ("setup", "hardware", "because"),
    [
        (TrainSetup(precision=Precision.parse("fp16-mixed")), NOT_NVIDIA, "no Flash"),
        (TrainSetup(strategy=ShardingStrategy.HYBRID_SHARD), card(9000), "at least 2 groups"),
        (TrainSetup(world_size=16), ONE_NODE, "16 is not the cluster's 8 GPUs"),
    ],
)
def test_a_question_that_predict_refuses_is_refused(setup: TrainSetup, hardware: Hardware, because: str) -> None:
    with pytest.raises(SpecError, match=because):
        find_largest(size_ladder(Family.LLAMA, setup, hardware), FitCheck())


@pytest.mark.parametrize("cell", [CELLS[0], *(pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS[1:])])
def test_a_budget_of_live_bytes_stands_for_a_card(cell: Cell) -> None:
    """Live bytes fall where the ladder gets wider and less deep; the answer is the largest of all that hold."""
    setup = replace(setup_of(cell), sequence_length=512, world_size=4)
    quantity = size_ladder(Family.LLAMA, setup, None, vocab_size=4096)
    at = [quantity[index] for index in range(200)]
    peaks = [worst_rank(SimulatedSteps(one.model, one.setup, CPU_GLOO).for_memory)[1].peak_bytes for one in at]
    for mib in (180, 256, 300):
        found = find_largest(quantity, FitCheck(kernels=CPU_GLOO, budget_bytes=mib * MIB))
        within = [index for index, peak in enumerate(peaks) if peak <= mib * MIB]
        assert found.fits == max(within, default=-1) < 180
        assert found.runs == found.fits  # nothing is tried again where there is no cache to flush


def test_many_quantities_are_answered_as_one_by_one() -> None:
    quantities = [size_ladder(Family.LLAMA, setup_of(cell), card(900), vocab_size=2000) for cell in CELLS[:3]]
    done: list[int] = []
    together = find_all(quantities, CARD, done.append)
    assert done == [1, 2, 3]
    assert [(found.fits, found.runs) for found in together] == [
        (found.fits, found.runs) for found in (find_largest(quantity, CARD) for quantity in quantities)
    ]


def test_a_card_too_small_for_every_step_or_for_what_is_kept_free_has_no_answer() -> None:
    ladder = size_ladder(Family.LLAMA, setup_of(CELLS[0]), card(60))
    found, kept_free = find_largest(ladder, CARD), find_largest(ladder, FitCheck())
    assert (found.fits, found.at) == (kept_free.fits, kept_free.at) == (-1, None)
    assert found.beyond.model.num_parameters == size_ladder(Family.LLAMA, setup_of(CELLS[0]), None).values[0]


class Curve:
    """Checks a made-up ladder of four depths a width, of which each candidate's reserved bytes are given."""

    budget_bytes = None

    def __init__(self, reserved: Sequence[int], size: int) -> None:
        self.reserved, self.size = reserved, size
        self.num_replays = 0
        self.quantity = Quantity("num_parameters", range(len(reserved)), self.candidate)

    def candidate(self, index: int) -> Question:
        width = 64 * (1 + index // 4)
        shape = replace(
            GPT2, num_hidden_layers=1 + index, hidden_size=width, num_attention_heads=1, num_key_value_heads=1
        )
        return Question(shape, TrainSetup(), None)

    def refuse(self, candidate: Question) -> None:
        """Refuse nothing."""

    def on(self, candidate: Question, _any_depth: object = None) -> SimpleNamespace:
        """Return a candidate of which nothing else is known. Its live bytes never fall with the depth."""
        reserved = self.reserved[candidate.model.num_hidden_layers - 1 :]

        @functools.cache
        def fits() -> bool:
            self.num_replays += 1
            return reserved[0] <= self.size

        return SimpleNamespace(
            simulated=SimpleNamespace(forget=lambda: None),
            fullness=min(reserved) * 3 // 4 / self.size,
            fits=fits,
            runs=lambda: True,
            prediction=None,
            replayed=lambda: None,
            limit=SimpleNamespace(place="host"),
        )


@given(
    st.lists(st.tuples(st.integers(10, 40), st.floats(-0.2, 0.2)), min_size=3, max_size=60), st.integers(900, 12_000)
)
def test_the_answer_is_defined_by_widths_wherever_what_is_reserved_jumps(
    widths: list[tuple[int, float]], size: int
) -> None:
    reserved, base = [], 1000.0
    for added, jump in widths:
        reserved += [round((base + added * depth) * (1 + jump)) for depth in range(4)]
        base = (base + 4 * added) * 1.01
    curve = Curve(reserved, size)
    last = max((index for index in range(0, len(reserved), 4) if reserved[index] <= size), default=-4)
    expected = max((index for index in range(last, last + 4) if index >= 0 and reserved[index] <= size), default=-1)
    assert find_largest(curve.quantity, curve).fits == expected
    assert curve.num_replays <= len(reserved)  # each at most once
