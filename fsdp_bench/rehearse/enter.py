"""Mounts overlays and starts the user's Python in them: ``python -I -S enter.py PLAN PYTHON WORDS ...``.

The process is the same, so that it is ended as one. The user's Python starts after the overlays are mounted: a library
that the dynamic linker finds once on the disk and once in an overlay is loaded twice.
"""

import os
import sys
from pathlib import Path

FORKS = "--forks"
"""The option of inside/main.py with which a process forks others, which leave its overlays for their own."""


def main() -> None:
    """Mount, say in a file how that went, and become the user's Python."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from fsdp_bench.rehearse.inside.files.overlay import enter

    said = enter(Path(sys.argv[1]).parent, keeps_outside=FORKS in sys.argv)
    for descriptor in said.get("outside", ()):
        os.set_inheritable(descriptor, True)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
