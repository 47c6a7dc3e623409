"""Intervals of time: pairs of begin and end in seconds."""

from __future__ import annotations

Intervals = list[tuple[float, float]]
"""Begin and end in seconds, in order."""


def union(spans: Intervals) -> Intervals:
    """Return spans without overlap, in order."""
    merged: Intervals = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(spans: Intervals) -> float:
    """Return the seconds of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def overlap(one: Intervals, other: Intervals) -> float:
    """Return the seconds that two lists of such spans share."""
    shared, index = 0.0, 0
    for begin, end in one:
        while index < len(other) and other[index][1] <= begin:
            index += 1
        position = index
        while position < len(other) and other[position][0] < end:
            shared += min(end, other[position][1]) - max(begin, other[position][0])
            position += 1
    return shared
