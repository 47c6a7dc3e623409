"""Compiles the caching allocator's rules and the streams with Cython; pyproject.toml has all else.

Where there is no C compiler, setuptools warns, and the same source runs as Python. ``compiled.py`` says which is used.
"""

from __future__ import annotations

import os
import runpy

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = "fsdp_bench/replay"
COMPILER = ["-g0", "-ffp-contract=off"]  # products and sums are rounded one by one, as Python's are
COMPILED = runpy.run_path(f"{FOLDER}/compiled.py")


class BuildNamedByDigest(build_ext):
    """Gives each compiled module the file name under which compiled.py looks for it."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of a module's file."""
        *folders, module = fullname.split(".")
        return os.path.join(*folders, COMPILED["file_name"](module))


modules = cythonize(
    [
        Extension(f"{FOLDER}/{module}".replace("/", "."), [f"{FOLDER}/{module}.py"], extra_compile_args=COMPILER)
        for module in COMPILED["MODULES"]
    ],
    build_dir="build/cython",
    force=True,  # not by dates: the digest says of which source a file is
    language_level=3,
    compiler_directives={"annotation_typing": False, "binding": False},
)
for module in modules:
    module.optional = True

setup(ext_modules=modules, cmdclass={"build_ext": BuildNamedByDigest})
