"""The symbols of a shared library, read from the file: what ``nm -D`` prints, without binutils."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SECTION_OF_DYNAMIC_SYMBOLS = 11
"""SHT_DYNSYM of the ELF specification."""
WEAK = 2
"""STB_WEAK of the ELF specification."""


@dataclass(frozen=True)
class Symbols:
    """The names in a library's dynamic symbol table, without versions."""

    defined: set[str] = field(default_factory=set)
    weak: set[str] = field(default_factory=set)
    """Those of the defined ones that another definition may replace."""
    undefined: set[str] = field(default_factory=set)
    """The symbols that the library expects from others."""


def symbols_of(library: Path) -> Symbols:
    """Read a library's dynamic symbols; none of a file that is not a 64-bit little-endian ELF library."""
    symbols = Symbols()
    with library.open("rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            return symbols
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for name, binding, section in _dynamic_symbols(content):
                if section == 0:
                    symbols.undefined.add(name)
                    continue
                symbols.defined.add(name)
                if binding == WEAK:
                    symbols.weak.add(name)
    return symbols


def _dynamic_symbols(content: mmap.mmap) -> Iterator[tuple[str, int, int]]:
    """Yield name, binding and section of each symbol; section 0 is: not defined here."""
    (sections_at,) = struct.unpack_from("<Q", content, 0x28)
    entry_size, num_sections = struct.unpack_from("<HH", content, 0x3A)
    # of a section: name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, sections_at + i * entry_size) for i in range(num_sections)]
    for section in sections:
        if section[1] != SECTION_OF_DYNAMIC_SYMBOLS:
            continue
        offset, size, strings = section[4], section[5], sections[section[6]]
        names = content[strings[4] : strings[4] + strings[5]]
        for name_at, info, _other, index, _value, _size in struct.iter_unpack(
            "<IBBHQQ", content[offset : offset + size]
        ):
            if name_at:
                yield names[name_at : names.index(b"\0", name_at)].decode("ascii", "replace"), info >> 4, index
