"""Run a command with a GPU that is none: ``python tests/hollow_card/card.py COMMAND ...`` beside a CUDA build of torch.

PyTorch's CUDA code runs, all of it: the caching allocator, operators' host code, FSDP's streams. Only NVIDIA's
libraries are others: memory is handed out and counted, events follow each other, and kernels do nothing. So what
PyTorch allocates is what it would allocate on a card, while nothing is computed and no time is told. Not there: NCCL,
cuDNN, cuBLASLt's choice of algorithms, torch.compile. Values that the host reads from the card decide nothing, but for
an overflow in fp16, which may then be seen where none is.

The environment says which card: HOLLOW_CARD_NAME, HOLLOW_CARD_BYTES, HOLLOW_CONTEXT_BYTES, HOLLOW_CAPABILITY,
HOLLOW_MULTIPROCESSORS (an H200), and HOLLOW_HOST how far ahead of it the host is (order.c).
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Who asks for the driver or for NVML by name gets the same library."""
CARD = {
    "HOLLOW_CARD_NAME": "NVIDIA H200",
    "HOLLOW_CARD_BYTES": str(143156 << 20),
    "HOLLOW_CONTEXT_BYTES": str(500 << 20),
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
}


def build(folder: Path) -> Path:
    """Compile the card for this interpreter's torch; needs gcc, nm and CUDA's headers. Returns the library.

    Functions of cuBLAS that torch refers to and that no file here defines return success and do nothing.
    """
    site = Path(sysconfig.get_path("purelib"))
    sources = sorted(HERE.glob("*.c"))
    defined = "".join(source.read_text() for source in sources)
    others = sorted(name for name in _undefined(site) if f" {name}(" not in defined)
    rest = folder / "rest.c"
    rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in others))
    include = [f"-I{path}" for path in (*site.glob("nvidia/*/include"), HERE)]
    library = folder / "libhollow_card.so"
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared"]
    subprocess.run(["gcc", *flags, *include, *map(str, sources), str(rest), "-o", str(library)], check=True)
    for name in NAMES:
        (folder / name).symlink_to(library.name)
    return library


def _undefined(site: Path) -> set[str]:
    """Return the functions of cuBLAS that torch's libraries refer to."""
    libraries = map(str, sorted((site / "torch/lib").glob("lib*.so")))
    listed = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    names = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if " U " in line}
    return {name for name in names if name.startswith("cublas")}


def main() -> None:
    """Build the card, run the command, return its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        words = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": folder}
        sys.exit(subprocess.run(sys.argv[1:], env={**CARD, **os.environ, **words}, check=False).returncode)


if __name__ == "__main__":
    main()
