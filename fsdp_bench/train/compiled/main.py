"""Records all compiled blocks: ``python -m fsdp_bench.train.compiled.main FILE [NAME ...]``, on a CUDA device."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import msgspec
import torch

from fsdp_bench.spec.recording.compiled import CompiledCatalog, CompiledCode, symbols_of_block
from fsdp_bench.train.compiled.compile_block import compile_block
from fsdp_bench.train.compiled.formulas import FEWEST_POINTS, merge, most_common
from fsdp_bench.train.compiled.variants import Variant, variants
from fsdp_bench.train.compiled.wrapper_code import UnknownCode


def record(variant: Variant) -> CompiledCode:
    """Compile a variant at all its sizes, and merge what most of them have in common.

    Raises:
        UnknownCode: if Inductor wrote what is not known here, or what no formula holds for.
    """
    gpu = torch.cuda.get_device_properties()
    points, threads = [], gpu.max_threads_per_multi_processor
    for count, point in enumerate(variant.points, start=1):
        case = variant.case._replace(shape=point.shape)
        compiled = compile_block(case, point.batch, point.length)
        points.append((symbols_of_block(point.sizes, gpu.multi_processor_count, threads), compiled))
        if len(alike := most_common(points)) == FEWEST_POINTS:
            print(f"{variant.kind.name}: {len(alike)} of {count} sizes alike", file=sys.stderr, flush=True)
            return merge(alike)
    raise UnknownCode(f"only {len(alike)} of {count} sizes have the same code")


def main(file: Path, names: list[str]) -> None:
    """Write the file; with names, replace only these in it."""
    codes = msgspec.json.decode(file.read_bytes(), type=CompiledCatalog).codes if file.exists() else {}
    for variant in variants():
        if not names or variant.kind.name in names:
            try:
                codes[variant.kind.name] = record(variant)
            except UnknownCode as error:
                print(f"{variant.kind.name}: not recorded: {error}", file=sys.stderr, flush=True)
                codes.pop(variant.kind.name, None)
            date = datetime.datetime.now(datetime.UTC).date().isoformat()
            catalog = CompiledCatalog(torch=torch.__version__.partition("+")[0], date=date, codes=codes)
            file.write_bytes(msgspec.json.encode(catalog))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
