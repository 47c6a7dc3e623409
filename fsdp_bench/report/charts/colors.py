"""The looks of all charts: colours on a slide and on a page, and styles of marks."""

import tomllib
from dataclasses import dataclass
from importlib import resources

_FILE = resources.files(__package__).joinpath("palette.toml")
PALETTE: dict[str, tuple[str, str]] = {name: tuple(both) for name, both in tomllib.loads(_FILE.read_text()).items()}
"""Colours by name, each on a light and on a dark background."""


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
