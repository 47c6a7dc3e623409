"""Looks up a user's function and class without running their code: a misspelt name is a SpecError at once."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from fsdp_bench.spec.errors import SpecError, nearest
from fsdp_bench.spec.subprocesses.dry_run import UserModule


def check_names(module: UserModule) -> None:
    """Refuse names that certainly do not exist. Names that the source alone does not show are found on import."""
    _check(module.function, "module", module.folder)
    if module.block is not None:
        _check(module.block, "transformer-block", module.folder)


def source_of(module: UserModule) -> str:
    """Return the text of the file with the user's function; nothing if it is no file of Python's."""
    name = module.function.partition(":")[0]
    found = _find(name, [module.folder, *sys.path])
    if found is None:
        raise SpecError(f"module: cannot import {name}")
    if found.origin is None or not found.origin.endswith(".py"):
        return ""
    try:
        return Path(found.origin).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SpecError(f"module: {found.origin}: cannot be read: {error.strerror}") from None


def _check(path: str, option: str, folder: str) -> None:
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise SpecError(f"{option}: {path!r} is not allowed; write it like 'package.module:name'")
    found = _find(module, [folder, *sys.path])
    if found is None:
        raise SpecError(f"{option}: cannot import {module}: no module of that name in {folder} or where Python looks")
    names = _names(found)
    first = name.partition(".")[0]
    if names is not None and first not in names:
        raise SpecError(f"{option}: {module} has no {first!r}{nearest(first, names)}")


def _find(module: str, folders: list[str]) -> ModuleSpec | None:
    """Return the spec of a module without importing its packages."""
    found, where = None, list(folders)
    parts = module.split(".")
    for index in range(len(parts)):
        found = PathFinder.find_spec(".".join(parts[: index + 1]), where)
        if found is None:
            return None
        where = list(found.submodule_search_locations or [])
    return found


def _names(found: ModuleSpec) -> set[str] | None:
    """Return every name that a module's source binds anywhere. None if the module may have others."""
    if found.origin is None or not found.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(found.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # the import says what is wrong
    names = set(_bound(tree))
    return None if names & {"*", "__getattr__", "globals", "exec", "setattr"} else names


def _bound(tree: ast.AST) -> Iterator[str]:
    """Yield the names that are bound, and the names that are used, because calls of these may bind others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
