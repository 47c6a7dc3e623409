"""Records compiled blocks, on a CUDA device: those of the benchmark models, or one of transformers' code.

``python -m fsdp_bench.train.compiled.main FILE`` or ``... FILE BLOCK CONFIG``, where CONFIG is a config.json as text.
What FILE holds already is kept.
"""

from __future__ import annotations

import datetime
import json
import lzma
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

from fsdp_bench.spec.recording.compiled import CompiledCatalog, CompiledCode, symbols_of_block
from fsdp_bench.train.compiled.compile_block import compile_block
from fsdp_bench.train.compiled.formulas import ENOUGH_POINTS, merge, most_common
from fsdp_bench.train.compiled.variants import Variant, benchmark_variants, huggingface_variants
from fsdp_bench.train.compiled.wrapper_code import UnknownCode


def record(variant: Variant, others: Iterable[CompiledCode]) -> CompiledCode:
    """Compile a variant at all its sizes, and merge what most of them have in common.

    ``others`` are recordings of the same block, whose formulas are taken where no two sizes have the same code.

    Raises:
        UnknownCode: if Inductor wrote what is not known here, or what no formula holds for.
    """
    gpu, kind = torch.cuda.get_device_properties(), variant.kind
    points = []
    for point in variant.points:
        compiled = compile_block(point.subject(variant.dtype), kind.checkpointing, kind.policy)
        sizes = symbols_of_block(point.sizes, gpu.multi_processor_count, gpu.max_threads_per_multi_processor)
        points.append((sizes, compiled))
        if len(alike := most_common(points)) == ENOUGH_POINTS:
            break
    print(f"{kind.name}: {len(alike)} of {len(points)} sizes alike", file=sys.stderr, flush=True)
    return merge(alike, others)


def write(file: Path, variants: Iterable[Variant]) -> None:
    """Record what is missing in a file, compressed by xz; say what cannot be recorded."""
    codes = msgspec.json.decode(lzma.decompress(file.read_bytes()), type=CompiledCatalog).codes if file.exists() else {}
    for variant in variants:
        if variant.kind.name in codes:
            continue
        try:
            prefix = f"{variant.kind.block} {8 * variant.kind.itemsize} bits "
            others = [code for name, code in codes.items() if name.startswith(prefix)]
            codes[variant.kind.name] = record(variant, others)
        except UnknownCode as error:
            print(f"{variant.kind.name}: not recorded: {error}", file=sys.stderr, flush=True)
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        catalog = CompiledCatalog(torch=torch.__version__.partition("+")[0], date=date, codes=codes)
        file.write_bytes(lzma.compress(msgspec.json.encode(catalog)))


if __name__ == "__main__":
    _, path, *of_config = sys.argv
    block, config = of_config or (None, None)
    write(
        Path(path),
        benchmark_variants() if block is None else huggingface_variants(block, json.loads(str(config))),
    )
