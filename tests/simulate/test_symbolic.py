"""A trace against the simulation itself: for every model that a trace answers for, the same events size by size."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.catalog.ladder import rungs
from fsdp_bench.replay import host_memory as host
from fsdp_bench.simulate import step, symbolic
from fsdp_bench.simulate.operators.kernels import CPU, CUDA, CUDA_OBSERVED, Kernels
from fsdp_bench.simulate.step import Simulation
from fsdp_bench.simulate.symbolic import SymInt, Trace, traced
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import Checkpointing, Offload, Precision, TrainSetup, impossible
from fsdp_bench.validate.random_setups import draw_cells
from tests.conftest import simulating
from tests.simulate.test_step import shape

CELLS = [cell for cell in draw_cells(300, seed=31, device="cuda") if cell.model.head_dim % 4 == 0]
SETUPS = [replace(cell.setup, sequence_length=min(cell.setup.sequence_length, 512)) for cell in CELLS]
MODELS = [cell.model for cell in CELLS]
MODELS += [replace(model, max_position_embeddings=2048) for family in Family for model in rungs(family)[::37]]
OFFLOADING = [replace(setup, offload=Offload.PARAMS) for setup in SETUPS]
OFFLOADING = [setup for setup in OFFLOADING if impossible(setup, "cuda") is None]


@simulating
@given(
    st.sampled_from(SETUPS),
    st.sampled_from(list(Family)),
    st.sampled_from([CPU, CUDA, CUDA_OBSERVED]),
    st.lists(st.sampled_from(MODELS), min_size=3, max_size=6),
)
def test_a_trace_has_the_sizes_of_each_model(
    setup: TrainSetup, family: Family, kernels: Kernels, models: list[ModelShape]
) -> None:
    for model in models:
        if model.family is not family or model.max_position_embeddings < setup.sequence_length:
            continue
        same = replace(model, num_hidden_layers=max(model.num_hidden_layers, 7))
        course, _ = step._stretchable(same, setup, kernels, 3, 0)
        found = step.simulate(same, setup, kernels, others_follow=True, rank=0)
        assert found.events == (
            step.simulate(same, setup, kernels, 10**6, rank=0).events if course is None else course.events
        )
        (instructions, _), _ = step._alike(same, setup, kernels, 0)
        if instructions is not None:
            program = step.first_steps(same, setup, kernels, others_follow=True, rank=0)
            assert list(program.instructions.num_bytes) == list(instructions.num_bytes)
            for column in ("parts", "kind", "tensor", "stride", "stream"):
                assert getattr(program.instructions, column) == getattr(instructions, column)
            labels = [(event.kind, event.category, event.label) for event in instructions.events]
            assert [(event.kind, event.category, event.label) for event in program.instructions.events] == labels


@simulating
@given(st.sampled_from(OFFLOADING), st.lists(st.sampled_from(MODELS), min_size=3, max_size=6))
def test_host_memory_is_that_of_each_model(setup: TrainSetup, models: list[ModelShape]) -> None:
    for model in (replace(model, num_hidden_layers=1 + model.num_hidden_layers % 9) for model in models):
        pinned, held = host._shards(model, setup)
        plain, sizes = host._on_host(Simulation(model, setup, CUDA, model.num_hidden_layers))
        assert sum(num_bytes * count for num_bytes, count in pinned) == sum(sizes[: plain.num_pinned])
        assert held == sum(sizes[plain.num_pinned :])


def counted(function: Any) -> tuple[Any, list[ModelShape]]:
    """Return a function that can be traced, and the shapes with which it was called."""
    calls: list[ModelShape] = []

    def call(model: ModelShape) -> Any:
        calls.append(model)
        return function(model)

    return call, calls


def test_what_decides_by_a_size_is_run_again_where_it_decides_differently() -> None:
    def halves(model: ModelShape) -> Any:
        if model.hidden_size < 100:
            return "narrow", [model.hidden_size // 2]
        return "wide", [model.hidden_size * model.vocab_size, 7]

    function, calls = counted(halves)
    widths = [64, 32, 128, 256, 96, 4096]
    found = [traced(function, shape(hidden_size=width)) for width in widths]
    assert [(name, list(sizes)) for name, sizes in found] == [
        ("narrow", [width // 2]) if width < 100 else ("wide", [width * 1000, 7]) for width in widths
    ]
    assert len(calls) == 2


def test_where_a_plain_integer_is_needed_the_trace_holds_for_it_alone() -> None:
    function, calls = counted(lambda model: ("", [model.hidden_size] * len(range(model.num_hidden_layers))))
    for layers in (3, 5, 3, 5):
        assert list(traced(function, shape(num_hidden_layers=layers))[1]) == [64] * layers
    assert len(calls) == 2


def test_nothing_is_traced_where_no_others_follow() -> None:
    function, calls = counted(lambda model: (type(model.hidden_size), [model.hidden_size]))
    assert traced(function, shape(), others_follow=False) == (int, [64])
    assert traced(function, shape())[0] is SymInt
    assert traced(function, shape(hidden_size=128), others_follow=False)[0] is SymInt
    assert len(calls) == 2


def test_arguments_and_families_have_traces_of_their_own() -> None:
    calls = []

    def function(model: ModelShape, argument: int) -> Any:
        calls.append(argument)
        return argument, [model.hidden_size + argument]

    tied = shape(hidden_size=128)
    for argument in (1, 2, 1):
        assert traced(function, tied, argument)[0] == argument
    traced(function, replace(tied, tie_word_embeddings=True), 1)
    traced(function, replace(tied, family=Family.GPT2), 1)
    assert calls == [1, 2, 1, 1]


def test_an_error_is_of_the_model_that_it_is_raised_for() -> None:
    """And says its size; other models are not refused with it."""
    setup = TrainSetup(sequence_length=16, precision=Precision.parse("fp32"), checkpointing=Checkpointing.NONE)
    narrow = shape(num_hidden_layers=9, hidden_size=24)
    for _ in range(2):
        with pytest.raises(Exception, match="head size 6:"):
            step.simulate(narrow, setup, CUDA, others_follow=True)
    wide = replace(narrow, hidden_size=32)
    assert step.simulate(wide, setup, CUDA, others_follow=True).replay().peak_bytes > 0


NAMES = ["add", "sub", "mul", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne"]
OPERATIONS = [getattr(operator, name) for name in NAMES]


@given(st.data())
def test_expressions_are_evaluated_as_python_would(data: st.DataObject) -> None:
    """Random expressions over the dimensions and plain integers, on either side, for another shape."""
    steps = data.draw(
        st.lists(
            st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 20), st.integers(0, 20), st.integers(1, 9)),
            min_size=1,
            max_size=20,
        )
    )

    def function(model: ModelShape) -> Any:
        known: list[Any] = [model.hidden_size, model.vocab_size, model.intermediate_size]
        outcomes = []
        for operation, left, right, plain in steps:
            a = known[left % len(known)] if left < 15 else plain
            b = known[right % len(known)] if right < 15 else plain
            value = operation(a, b) if operation not in (operator.floordiv, operator.mod) or b else -a
            if isinstance(value, bool):
                outcomes.append(value)
            elif -(2**40) < value < 2**40:
                known.append(value)
        return outcomes, known

    models = [shape(hidden_size=64 * width, vocab_size=vocab) for width, vocab in ((1, 64), (2, 1000), (3, 192))]
    trace = Trace(function, models[0])
    for model in models:
        sizes = trace.sizes(model)
        if sizes is not None:
            assert (trace.result, list(sizes)) == function(model)
        assert (traced(function, model)[0], list(traced(function, model)[1])) == function(model)


def test_one_expression_is_one_object() -> None:
    def function(model: ModelShape) -> Any:
        wide: Any = model.hidden_size
        assert isinstance(wide, SymInt)
        assert wide * 4 is wide * 4
        assert wide * 4 is 4 * wide
        return None, [wide]

    symbolic.Trace(function, shape())
