"""Build the hollow card beside a CUDA torch: ``python build.py FOLDER``; needs a C compiler and CUDA's headers.

Functions of cuBLAS that torch refers to and no file here defines return success and do nothing.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")
"""What asks for the driver or NVML by name gets the same library."""


def undefined(site: Path) -> set[str]:
    """Return the functions of cuBLAS that torch's libraries refer to."""
    libraries = sorted((site / "torch/lib").glob("lib*.so"))
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *map(str, libraries)], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if " U " in line}
    return {name for name in names if name.startswith("cublas")}


def main() -> None:
    """Compile, and leave the libraries in the folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    site = Path(sysconfig.get_path("purelib"))
    sources = sorted(HERE.glob("*.c"))
    defined = "".join(source.read_text() for source in sources)
    rest = folder / "rest.c"
    rest.write_text(
        "".join(f"int {n}(void) {{ return 0; }}\n" for n in sorted(undefined(site)) if f" {n}(" not in defined)
    )
    include = [f"-I{path}" for path in (*site.glob("nvidia/*/include"), HERE)]
    library = folder / "libhollow_card.so"
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared"]
    subprocess.run(["gcc", *flags, *include, *map(str, sources), str(rest), "-o", str(library)], check=True)
    for name in NAMES:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library.name)


if __name__ == "__main__":
    main()
