"""The search of a border agrees with brute force, asks both sides, and few values."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.plan.script.border import MOST_REFUSED, Border, Tried
from fsdp_bench.spec.units import GIB

LIMIT = 1000


def searched(
    answer: Callable[[int], Tried], sizes: Sequence[float], start: Sequence[int] = (0, 1), limit: int = LIMIT
) -> Border:
    border = Border(sizes, start)
    while wanted := border.wanted(limit):
        assert len(wanted) == len(set(wanted)) <= 2
        assert not border.tried.keys() & set(wanted), "asked twice"
        border.tried |= {index: answer(index) for index in wanted}
    return border


def by_memory(memory: Sequence[int], limit: int = LIMIT) -> Callable[[int], Tried]:
    return lambda index: Tried(True, memory[index]) if memory[index] <= limit else Tried(False)


def counted(count: int) -> list[float]:
    return [float(value) for value in range(1, count + 1)]


STARTS = st.integers(0, 10_000)
"""Where the first pair is: anywhere in the range, as near a neighbour's border."""


@given(st.lists(st.integers(0, 200), min_size=2, max_size=300), STARTS, st.booleans())
def test_where_memory_grows_the_border_is_that_of_a_full_scan(steps: list[int], start: int, is_fewest: bool) -> None:
    memory = list(accumulate(steps))
    fitting = sum(size <= LIMIT for size in memory)
    first = start % (len(memory) - 1)
    sizes = [1 / value for value in range(len(memory), 0, -1)] if is_fewest else counted(len(memory))
    border = searched(by_memory(memory), sizes, (first, first + 1))
    assert border.is_found
    assert not border.is_uneven
    assert border.largest == (fitting - 1 if fitting else None)
    assert border.next == (fitting if fitting < len(memory) else None)


ANSWERS = st.one_of(
    st.integers(0, LIMIT).map(lambda size: Tried(True, size)),
    st.just(Tried(False)),
    st.just(Tried(False, LIMIT)),  # with retries
    st.just(Tried(None)),
    st.just(Tried(None, 10)),
)


@given(st.lists(ANSWERS, min_size=2, max_size=60), STARTS)
def test_whatever_the_answers_both_sides_were_asked(answers: list[Tried], start: int) -> None:
    """Of any answers: the largest fits, the next does not, and all between is refused."""
    first = start % (len(answers) - 1)
    border = searched(answers.__getitem__, counted(len(answers)), (first, first + 1))
    tried, largest, following = border.tried, border.largest, border.next
    assert all(tried[index] == answers[index] for index in tried)
    fitting = [index for index, one in tried.items() if one.fits]
    assert largest == max(fitting, default=None)
    if following is not None:
        assert tried[following].fits is False
        assert following > (-1 if largest is None else largest)
    assert border.is_uneven == any(one.fits is False and index < (largest or 0) for index, one in tried.items())
    refused = [index for index, one in tried.items() if one.fits is None]
    assert len(refused) <= MOST_REFUSED + 1
    if border.is_found:
        above = -1 if largest is None else largest
        assert set(range(above + 1, len(answers) if following is None else following)) <= set(refused)
    else:
        assert len(refused) == len(tried) or len(refused) >= MOST_REFUSED


@given(st.integers(2, 60), st.integers(2, 24), st.integers(0, 200))
def test_values_that_a_script_refuses_are_on_neither_side(fitting: int, multiple: int, base: int) -> None:
    """A script that takes multiples alone; the first pair has one that works."""
    count = multiple * 64
    slope = (LIMIT - base) // fitting

    def answer(index: int) -> Tried:
        if (index + 1) % multiple:
            return Tried(None)
        size = base + slope * ((index + 1) // multiple)
        return Tried(True, size) if size <= LIMIT else Tried(False)

    border = searched(answer, counted(count), (multiple - 1, multiple))
    num_refused = sum(one.fits is None for one in border.tried.values())
    assert num_refused <= MOST_REFUSED + 1
    if border.is_found and border.largest is not None and border.next is not None:
        assert border.next - border.largest == multiple
    else:
        assert num_refused >= MOST_REFUSED or slope == 0


MEMORY: dict[str, Callable[[float, float, float], float]] = {
    "a line": lambda base, slope, value: base + slope * value,
    "2 % of noise": lambda base, slope, value: (base + slope * value) * (1 + 0.02 * (value * 7919 % 5) / 4),
    "the optimizer's peak, then a line": lambda base, slope, value: max(base, 300 * GIB + slope * value),
    "a square": lambda base, slope, value: base + slope * (value + value**2 / 100),
}


@pytest.mark.parametrize(("kind", "most_on_average"), list(zip(MEMORY, (6, 11, 9, 16), strict=True)))
def test_few_values_are_asked(kind: str, most_on_average: float) -> None:
    """Halving 16,384 values would ask 14, most of them far too large."""
    random, counts = Random(5), []
    for _ in range(60):
        base, slope = random.uniform(0, 600) * GIB, 400 * GIB / random.uniform(1, 300)
        memory = [int(MEMORY[kind](base, slope, value)) for value in range(1, 16_385)]
        border = searched(by_memory(memory, 1000 * GIB), counted(16_384), limit=1000 * GIB)
        assert border.is_found
        counts.append(len(border.tried))
    assert mean(counts) <= most_on_average, mean(counts)


def test_nothing_is_asked_again_where_all_is_refused() -> None:
    assert list(searched(lambda _: Tried(None), counted(100)).tried) == [0, 1]
