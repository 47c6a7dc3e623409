"""Records compiled blocks, on a CUDA device: those of the benchmark models, or one of transformers' code.

``python -m tools.compiled.main FILE``, or ``... FILE float8`` for the benchmark Llama's in float8, or
``... FILE BLOCK CONFIG``, where CONFIG is a config.json as text. Recordings that FILE holds already are kept.
"""

import datetime
import json
import lzma
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from fsdp_bench.spec.recording.compiled import CompiledCatalog, CompiledCode, symbols_of_block, symbols_of_float8
from fsdp_bench.spec.setup import Float8
from tools.compiled.compile_block import compile_block
from tools.compiled.formulas import ENOUGH_FLOAT8_POINTS, ENOUGH_POINTS, FLOAT8_PRODUCTS, merge, most_common
from tools.compiled.variants import Point, Variant, benchmark_variants, float8_variants, huggingface_variants
from tools.compiled.wrapper_code import Compiled, UnknownCode


def record(variant: Variant, others: Sequence[CompiledCode]) -> CompiledCode:
    """Compile a variant at its sizes, and merge what most of them have in common.

    ``others`` are recordings of the same block, whose formulas are taken where no two sizes have the same code.

    Raises:
        UnknownCode: if Inductor wrote what is not known here, or what no formula holds for.
    """
    points, products = _Points(variant), FLOAT8_PRODUCTS if variant.kind.float8 is not Float8.NONE else ()
    alike = points.alike(with_in_place=False)
    try:
        return merge(alike, others, products)
    except UnknownCode:
        if products:
            return merge(points.last(), others, products)
        return merge(points.alike(with_in_place=True), others, products)


class _Points:
    """The sizes at which a variant is compiled, as many as are needed."""

    def __init__(self, variant: Variant) -> None:
        self._variant, self._points = variant, iter(variant.points)
        self._is_float8 = variant.kind.float8 is not Float8.NONE
        self._enough = ENOUGH_FLOAT8_POINTS if self._is_float8 else ENOUGH_POINTS
        self._compiled: list[tuple[dict[str, int], Compiled]] = []

    def alike(self, with_in_place: bool) -> list[tuple[dict[str, int], Compiled]]:
        """Return enough sizes with the same code, or as many as there are."""
        found = most_common(self._compiled, with_in_place) if self._compiled else []
        while len(found) < self._enough and (point := next(self._points, None)) is not None:
            self._compiled.append(self._compile(point))
            found = most_common(self._compiled, with_in_place)
        name = self._variant.kind.name
        print(f"{name}: {len(found)} of {len(self._compiled)} sizes alike", file=sys.stderr, flush=True)
        return self.last() if self._is_float8 and len(found) == 1 else found

    def last(self) -> list[tuple[dict[str, int], Compiled]]:
        """Return the last size, which is enough by itself in float8."""
        for point in [*self._points][-1:]:
            self._compiled.append(self._compile(point))
        return self._compiled[-1:]

    def _compile(self, point: Point) -> tuple[dict[str, int], Compiled]:
        gpu = torch.cuda.get_device_properties()
        symbols = symbols_of_float8 if self._is_float8 else symbols_of_block
        sizes = symbols(point.sizes, gpu.multi_processor_count, gpu.max_threads_per_multi_processor)
        return sizes, compile_block(point.subject(self._variant.dtype), self._variant.kind)


def write(file: Path, variants: Iterable[Variant]) -> None:
    """Record what is missing in a file, compressed by xz; say what cannot be recorded."""
    codes = msgspec.json.decode(lzma.decompress(file.read_bytes()), type=CompiledCatalog).codes if file.exists() else {}
    for variant in variants:
        if variant.kind.name in codes:
            continue
        try:
            others = [code for name, code in codes.items() if name.startswith(f"{variant.kind.dtypes} ")]
            codes[variant.kind.name] = record(variant, others)
        except UnknownCode as error:
            print(f"{variant.kind.name}: not recorded: {error}", file=sys.stderr, flush=True)
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        catalog = CompiledCatalog(torch=torch.__version__.partition("+")[0], date=date, codes=codes)
        file.write_bytes(lzma.compress(msgspec.json.encode(catalog)))


def _variants(which: Sequence[str]) -> Iterator[Variant]:
    if not which:
        return benchmark_variants()
    if len(which) == 1:
        return float8_variants()
    block, config = which
    return huggingface_variants(block, json.loads(config))


if __name__ == "__main__":
    _, path, *which = sys.argv
    write(Path(path), _variants(which))
