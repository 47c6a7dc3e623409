"""``make recordings``: records what the models of the catalogue run, or those that are named, where it is missing.

A model whose code a recording holds for already is left out; to record all anew, empty the folder first. A recording
takes from half a minute to three minutes.
"""

from __future__ import annotations

import sys

from fsdp_bench.catalog.loader import models
from fsdp_bench.spec.errors import FsdpBenchError
from fsdp_bench.sweep.architectures import record_missing


def main() -> None:
    """Record what is missing; say what cannot be recorded."""
    for entry in models():
        if sys.argv[1:] and entry.name not in sys.argv[1:]:
            continue
        try:
            for path in record_missing(entry):
                print(f"{path.name}: {path.stat().st_size // 1024} KiB", flush=True)
        except FsdpBenchError as error:
            print(f"{entry.name}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
