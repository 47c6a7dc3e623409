"""A GPU and a server as the TOML of a file for ``--catalog``. Facts that are unknown are there as comments."""

import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any

import msgspec

from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.hardware import Gpu, Server

_TEXTS = tomllib.loads(resources.files(__package__).joinpath("unknown_facts.toml").read_text())
"""The comments in the place of facts that are not known."""


def catalog_entry(gpu: Gpu, server: Server) -> str:
    """Return the text of a file that ``load_user_catalog`` reads."""
    asked = [link for link in _TEXTS["links"] if link != "intra_node" or server.gpus_per_node > 1]
    unknown = [_TEXTS["links"][link] for link in asked if not getattr(server, link)]
    parts = [
        _TEXTS["beginning"].format(name=server.name),
        "\n".join(_table("gpu", _without_none(to_builtins(gpu)), _TEXTS["gpu"])) + "\n",
        "\n".join(_table("server", _without_none(to_builtins(server)), _TEXTS["server"])) + "\n",
        *unknown,
        _TEXTS["price"].format(name=server.name),
    ]
    return "\n".join(parts)


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value not in (None, [], ())
    }


def _table(path: str, facts: dict[str, Any], unknown: dict[str, list[str]]) -> Iterator[str]:
    yield f"[{path}]" if "." in path else f"[[{path}]]"
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict)}
    yield from msgspec.toml.encode(plain).decode().splitlines()
    for key, (example, where) in unknown.items():
        if key not in facts:
            yield f"# {f'{key} = {example}':40} # {where}"
    if path == "gpu.dense_flops_per_second" and not facts:
        yield from _TEXTS["peaks"].splitlines()
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from _table(f"{path}.{key}", value, {})
