"""Uses the readers of events as Cython has compiled them, where they are compiled from the source that is here.

A compiled module's file name has a digest of the source (setup.py builds it). So one whose source has changed since is
never loaded: the .py runs instead, with the same answers, and ``make install`` compiles it again.
"""

import hashlib
import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

MODULES = (
    *("caching_allocator/blocks", "caching_allocator/allocator", "caching_allocator/expandable_segments"),
    "streams",
)
"""In the order in which they import each other. Beside each .py is a .pxd with its types in C."""

_FOLDER = Path(__file__).parent


def file_name(module: str) -> str:
    """Return the path of the file of a compiled module."""
    digest = hashlib.sha256()
    for name in MODULES:
        for suffix in (".py", ".pxd"):
            digest.update((_FOLDER / name).with_suffix(suffix).read_bytes())
    return f"{module}.{digest.hexdigest()[:16]}{EXTENSION_SUFFIXES[0]}"


def load(package: str) -> None:
    """Load the compiled modules into this package; none if one of them is missing."""
    files = {f"{package}.{module}".replace("/", "."): _FOLDER / file_name(module) for module in MODULES}
    if not all(file.exists() for file in files.values()):
        return
    for name, file in files.items():
        spec = spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        import_module(name.rpartition(".")[0])
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
