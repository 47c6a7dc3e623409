"""Rehearse the matrix: ``python -m tools.frameworks --torch 2.13.0=.venv-rehearsal/bin/python [ROW ..]``.

Each row is rehearsed at its releases on 8 and 64 GPUs of p5.48xlarge; what is recorded is kept, unless --again is
given. --page writes docs/frameworks.md from the records.
"""

import argparse
import sys
from pathlib import Path

from fsdp_bench.spec.errors import FsdpBenchError, SpecError
from fsdp_bench.spec.files import private_folder
from tools.frameworks.environment import Environments
from tools.frameworks.matrix import NEWEST_TORCH, read_matrix
from tools.frameworks.page import write_page
from tools.frameworks.rehearsal import keep, record_of, rehearse_row

HERE = Path(__file__).parents[2]


def main(words: list[str]) -> None:
    """Rehearse rows, all by default, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.frameworks", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="names of rows or frameworks; all by default")
    parser.add_argument("--torch", action="append", default=[], metavar="VERSION=PYTHON", help="an interpreter with it")
    parser.add_argument("--environments", type=Path, metavar="FOLDER", help="where frameworks are installed and cloned")
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="repositories by name, cloned from there")
    parser.add_argument("--release", metavar="R", help="only this release")
    parser.add_argument("--gpus", type=int, metavar="N", help="only this number of GPUs")
    parser.add_argument("--again", action="store_true", help="rehearse what is recorded, too")
    parser.add_argument("--page", action="store_true", help="write docs/frameworks.md from the records, and end")
    asked = parser.parse_args(words)
    if asked.page:
        write_page(HERE / "docs" / "frameworks.md")
        return
    bases = {NEWEST_TORCH: HERE / ".venv-rehearsal/bin/python"}
    bases |= {version: Path(python).absolute() for version, _, python in (one.partition("=") for one in asked.torch)}
    folder = asked.environments or private_folder("frameworks")
    if folder is None:
        raise SpecError("--environments: say a folder; the cache cannot be written in private")
    places = Environments(folder, bases, asked.sources)
    for framework in read_matrix():
        for row in framework.rows:
            if asked.rows and not {row.name, framework.framework} & set(asked.rows):
                continue
            done = {(one.release, one.gpus) for one in record_of(framework, row).runs if not asked.again}
            for release in framework.of_row(row):
                for gpus in row.gpus:
                    skipped = (release.release, gpus) in done or asked.release not in (None, release.release)
                    if not skipped and asked.gpus in (None, gpus):
                        run = rehearse_row(framework, row, release, gpus, places)
                        keep(framework, row, run)
                        peak = f"{run.peak_allocated_bytes / 2**30:.1f} GiB, {run.seconds:.0f} s"
                        print(f"{row.name} {release.release} on {gpus}: {run.answer} {run.why or peak}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FsdpBenchError as error:
        sys.exit(f"tools.frameworks: {error}")
