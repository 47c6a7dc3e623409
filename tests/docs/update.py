"""Updates the outputs, tables and pictures of README.md and docs/: ``python -m tests.docs.update``.

With names of pages it updates those alone. Read ``git diff`` afterwards.
"""

import sys
import tempfile
from pathlib import Path

from tests.docs.pages import CUDA_BUILD, PAGES, PICTURES, ROOT, run_page
from tests.docs.tables import with_tables


def main(names: list[str]) -> None:
    """Update pages; with ``--rehearsals`` only what rehearses, which needs PyTorch's CUDA build."""
    only = CUDA_BUILD if "--rehearsals" in names else None
    for name in [name for name in names if name != "--rehearsals"] or PAGES:
        path = ROOT / name
        with tempfile.TemporaryDirectory() as folder:
            result = run_page(path.read_text(), name, Path(folder), only)
            for made in Path(folder).glob("*.*"):
                for there in (PICTURES / made.name, path.parent / made.name):
                    if there.exists() and there != path:
                        there.write_bytes(made.read_bytes())
        path.write_text(with_tables(name, result.updated(path.read_text())))
        print(f"{name}: {result.num_run} commands and examples, {len(result.replacements)} outputs changed")
        for failure in result.failures:
            if "exit code" in failure.split("\n")[0]:
                print(f"  {failure}")


if __name__ == "__main__":
    main(sys.argv[1:])
