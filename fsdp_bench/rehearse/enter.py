"""Mounts overlays and starts the user's Python in them: ``python -I -S enter.py PLAN PYTHON WORDS ...``.

The process is the same, so that it is ended as one. The user's Python starts after the overlays are mounted: a library
that the dynamic linker finds once on the disk and once in an overlay is loaded twice.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Mount, say in a file how that went, and become the user's Python."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from fsdp_bench.rehearse.inside.files.overlay import Overlay
    from fsdp_bench.rehearse.inside.files.places import ENTERED, protected_folders

    plan = Path(sys.argv[1])
    asked = json.loads(plan.read_text())
    folders = protected_folders([*asked["words"], *asked["edited"]])
    said: dict[str, object]
    try:
        overlay = Overlay(str(plan.parent), folders)
        said = {"overlays": overlay.layers, "read_only": overlay.read_only, "silent": overlay.silent}
    except OSError as error:
        said = {"error": error.strerror}
    (plan.parent / ENTERED).write_text(json.dumps(said))
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
