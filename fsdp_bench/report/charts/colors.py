"""The looks of all charts: colours on a slide and on a page, and styles of marks."""

from __future__ import annotations

from dataclasses import dataclass

PALETTE = {
    "blue": ("#0072B2", "#3D9BD6"),
    "orange": ("#E69F00", "#E6A817"),
    "green": ("#35AB85", "#3FB58E"),
    "sky": ("#8CCBF0", "#A3D6F4"),
    "plum": ("#5B3A66", "#A583B5"),
    "pale": ("#D4E6F3", "#5F7C91"),
    "red": ("#D55E00", "#E8752A"),
    "peach": ("#F7D9C8", "#6B4732"),
    "yellow": ("#F0E442", "#D9CF45"),
    "pink": ("#CC79A7", "#D68CB4"),
    "grey": ("#8C8C8C", "#9A9A9A"),
    "mauve": ("#8C5A7D", "#B07BA0"),
    "failure": ("#A61C00", "#FF8A70"),
    "ink": ("#333333", "#E8EBEF"),
    "faint": ("#555555", "#B3BCC7"),
    "white": ("#FFFFFF", "#14171B"),
    "paper": ("#FFFFFF", "#14171B"),  # of a bar that failed: its edge and its hatch are of the colour failure
    "light-grey": ("#D0D0D0", "#6A6A6A"),
    "middle-grey": ("#9C9C9C", "#868686"),
    "dark-grey": ("#4D4D4D", "#B0B0B0"),
    "light-orange": ("#F5C977", "#C79A4A"),
    "shade": ("#F3F3F3", "#1D2127"),
    "blue-shade": ("#E8F1F8", "#1B2732"),
    "orange-shade": ("#FDF1DC", "#2E2719"),
    # Behind white letters, on light and dark pages alike
    "steel": ("#4F6F82", "#4F6F82"),
    "navy": ("#0060A0", "#0060A0"),
    "brown": ("#8A4100", "#8A4100"),
    "brick": ("#A61C00", "#A61C00"),
}
"""Colours on a light and on a dark background: Okabe and Ito's palette, and what it lacks."""
PALETTE |= {
    f"{tone}-{name}": (color, color)
    for tone, colors in {
        "pale": ("#9CCBE6", "#FBE3B8", "#BFE3D5", "#E3C9D8", "#F6F0A8", "#E0E0E0"),
        "middle": ("#66A3C7", "#EFC266", "#86CCB5", "#BA9DB1", "#F5ED8E", "#BADFF7"),
    }.items()
    for name, color in zip(("blue", "orange", "green", "mauve", "yellow", "sky"), colors, strict=True)
}


@dataclass(frozen=True)
class Style:
    """The looks of a mark. Hatches, dashes and signs distinguish marks in black and white."""

    color: str
    """A name in PALETTE."""
    hatch: str = ""
    """matplotlib's pattern of an area."""
    is_line: bool = False
    dash: tuple[float, ...] = ()
    """Lengths of dashes and gaps of a line; empty for a solid one."""
    width: float = 1.6
    """The width of a line, in points."""
    sign: str = ""
    """matplotlib's marker of a point. Empty: a box with the point's number, or a dot."""
    opacity: float = 1.0


def ink(color: str) -> str:
    """Return a colour of the palette as a slide has it."""
    return PALETTE[color][0]
