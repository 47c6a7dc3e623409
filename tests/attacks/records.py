"""Damages results on disk at random and reads them in every way there is.

``python -m tests.attacks.records --count 10000 --seed 1``. Whatever is damaged, and however: reading ends with what is
whole or with one of the package's own errors, the other records are read as they were, and no byte is lost.
"""

from __future__ import annotations

import argparse
import io
import random
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path

import msgspec
from rich.console import Console

from fsdp_bench.report.charts.frontier import draw_frontier
from fsdp_bench.report.charts.trial_bars import draw_all
from fsdp_bench.report.html.render import html
from fsdp_bench.report.html.write import page_of
from fsdp_bench.report.measured.frontier_text import print_frontier
from fsdp_bench.report.measured.tables import print_communication, print_table
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import FsdpBenchError
from fsdp_bench.spec.record import TrialRecord, read_record
from fsdp_bench.sweep.results.flat import communication_rows, flat_row
from fsdp_bench.sweep.results.load import machine_description, read_frontier_of, read_records
from fsdp_bench.sweep.results.store import Store

RESULTS = Path(__file__).parents[2] / "results" / "xeon-2-cores"
NUM_RECORDS = 3
"""Records of each sweep, so that a damaged one has neighbours."""
NUM_CELLS = 4
"""Cells of a frontier."""
CHARTS_EVERY = 200
"""Charts are drawn for one in so many attacks: they take a second."""

Damage = Callable[[bytes, random.Random], bytes]

_NUMBER = re.compile(rb"(?<=[:\s\[])-?\d+(?:\.\d+)?(?:e-?\d+)?(?=[,\s\]}])")
_VALUE = re.compile(rb'(?<=: )(?:"[^"]*"|-?\d[^,\s]*|null|true|false)')
_TEXT = re.compile(rb'(?<=: ")[^"]+(?=")')


def truncated(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def changed_digit(data: bytes, draw: random.Random) -> bytes:
    """Stays JSON: a number that is another one."""
    places = [match.start() for match in re.finditer(rb"\d", data)]
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        changed[draw.choice(places)] = draw.choice(b"0123456789")
    return bytes(changed)


def torn(data: bytes, draw: random.Random) -> bytes:
    """A page that never reached the disk, or holds what was there before."""
    size = draw.choice((64, 512, 4096))
    begin = draw.randrange(0, len(data), size)
    page = data[begin : begin + size]
    other = bytes(len(page)) if draw.random() < 0.5 else (data[::-1] * 2)[: len(page)]
    return data[:begin] + other + data[begin + size :]


def _replaced(pattern: re.Pattern[bytes], data: bytes, word: bytes, draw: random.Random) -> bytes:
    found = draw.choice(list(pattern.finditer(data)))
    return data[: found.start()] + word + data[found.end() :]


def nested(data: bytes, draw: random.Random) -> bytes:
    depth = draw.choice((1, 50, 900, 1100, 100_000))
    opened, closed = draw.choice(((b"[", b"]"), (b'{"a":', b"}")))
    closing = closed * depth if draw.random() < 0.8 else b""
    return _replaced(_VALUE, data, opened * depth + b"0" + closing, draw)


def not_finite(data: bytes, draw: random.Random) -> bytes:
    words = (b"NaN", b"Infinity", b"-Infinity", b'"nan"', b'"inf"', b'"-inf"', b"1e999", b"-1e999", b"null")
    return _replaced(_NUMBER, data, draw.choice(words), draw)


def huge_or_tiny(data: bytes, draw: random.Random) -> bytes:
    digits = b"9" * draw.choice((10, 15, 18, 19, 25, 310, 4299, 4301, 20_000))
    words = (digits, b"-" + digits, digits + b".0", b"0", b"-1", b"0.0", b"-0.0", b"1e308", b"-1e308", b"5e-324", b"1")
    return _replaced(_NUMBER, data, draw.choice(words), draw)


def other_type(data: bytes, draw: random.Random) -> bytes:
    words = (b"null", b"true", b'""', b'"x"', b"[]", b"{}", b"0", b"1.5", b"[[]]", b'{"a": 1}')
    return _replaced(_VALUE, data, draw.choice(words), draw)


def other_text(data: bytes, draw: random.Random) -> bytes:
    words = (
        b"nan",
        b"\\ud800",
        b"\\u0000",
        b"\xff\xfe",
        b"\\n\\n",
        "é漢".encode(),
        b"x" * 5000,
        b"%s{}$_\\\\",
        b"../x",
    )
    return _replaced(_TEXT, data, draw.choice(words), draw)


def other_content(data: bytes, draw: random.Random) -> bytes:
    whole = (b"", b"null", b"[]", b"{}", b"0", b'"x"', b"{" * 100_000, b"[" * 100_000, b"\xff" * 100, data + data)
    return draw.choice((*whole, data + b"x", b"\xef\xbb\xbf" + data, data.decode().encode("utf-16")))


def without_a_line(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


DAMAGES: tuple[Damage, ...] = (
    truncated, changed_bytes, changed_digit, torn, nested, not_finite, huge_or_tiny, other_type, other_text,
    other_content, without_a_line,
)  # fmt: skip


class Attacked:
    """A sweep's results in a folder of their own, of which one file at a time is damaged."""

    def __init__(self, source: Path, home: Path) -> None:
        self.folder = home / "here" / source.name
        (self.folder / "trials").mkdir(parents=True)
        self.files: dict[Path, bytes] = {}
        for path in sorted((source / "trials").glob("*.json"))[:NUM_RECORDS]:
            self._add(self.folder / "trials" / path.name, path.read_bytes())
        for name in ("machine.json", "frontier.json"):
            if (source / name).exists():
                self._add(self.folder / name, (source / name).read_bytes())
        if (found := read_frontier_of(self.folder)) is not None:
            fewer = msgspec.structs.replace(found, cells=found.cells[:NUM_CELLS])
            self._add(self.folder / "frontier.json", to_json(fewer))
        self.records = {
            path: read_record(data, path.name) for path, data in self.files.items() if path.parent.name == "trials"
        }

    def _add(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        self.files[path] = data

    def attack(self, damage: Damage, draw: random.Random, with_charts: bool) -> str:
        """Damage one file, read everything, put the file back; return what became of it.

        Raises:
            Exception: where something else than an error of the package's own came of it.
        """
        path = draw.choice(list(self.files))
        data = damage(self.files[path], draw)
        path.write_bytes(data)
        try:
            return self._read(path, data, with_charts)
        finally:
            shutil.rmtree(self.folder / "set-aside", ignore_errors=True)
            for outdated in self.folder.glob("*.png"):
                outdated.unlink()
            path.write_bytes(self.files[path])

    def _read(self, damaged: Path, data: bytes, with_charts: bool) -> str:
        answers = [self._report(damaged), self._frontier(damaged, with_charts)]
        assert damaged.read_bytes() == data, "a reader changed a file"
        self._html()
        if with_charts:
            self._charts()
        answers.append(self._sweep(damaged, data))
        return "refused" if "refused" in answers else "set aside" if "set aside" in answers else "read"

    def _report(self, damaged: Path) -> str:
        """Read as report, load_results and trials.csv do."""
        notes: list[str] = []
        try:
            records = read_records(self.folder, notes)
        except FsdpBenchError as error:  # written by a newer version, as far as can be told
            check_line(str(error))
            return "refused"
        for note in notes:
            check_line(note)
            assert str(damaged) in note
        assert len(records) + len(notes) == len(self.records)
        for path, whole in self.records.items():
            assert path == damaged or whole in records, "a neighbour was lost"
        changed = [record for record in records if record not in self.records.values()]
        if changed:  # what is printed of the others does not change
            print_table(changed, quiet())
            print_communication(changed, quiet())
            to_json({"trials": [flat_row(record) for record in changed], "communication": communication_rows(changed)})
        for record in changed:
            assert same(read_record(to_json(record), record.id), record), "a record does not survive writing"
        machine_description(self.folder)
        return "read"

    def _frontier(self, damaged: Path, with_charts: bool) -> str:
        try:
            found = read_frontier_of(self.folder)
        except FsdpBenchError as error:
            check_line(str(error))
            return "refused"
        if found is not None and damaged.name == "frontier.json":
            print_frontier(found, quiet())
        if found is not None and with_charts:
            draw_frontier(found, self.folder)
        return "read"

    def _html(self) -> None:
        try:
            page = page_of(self.folder)
        except FsdpBenchError as error:
            check_line(str(error))
            return
        assert html(page, date(2026, 1, 1)).count("<script>") == 1

    def _charts(self) -> None:
        try:
            records = read_records(self.folder, [])
        except FsdpBenchError:
            return
        draw_all(records, self.folder, machine_description(self.folder))

    def _sweep(self, damaged: Path, data: bytes) -> str:
        """Read as a sweep does that goes on."""
        store = Store(self.folder)
        try:
            records, notes = store.read_all()
        except FsdpBenchError as error:
            check_line(str(error))
            assert damaged.read_bytes() == data
            return "refused"
        if any(record not in self.records.values() for record in records):
            store.write_table(records)
        for note in notes:
            check_line(note)
        assert len(records) + len(notes) == len(self.records)
        if not notes:
            assert damaged.read_bytes() == data
            return "read"
        (aside,) = (self.folder / "set-aside").iterdir()
        assert aside.read_bytes() == data, "what was set aside is not what was there"
        assert not damaged.exists()
        return "set aside"


def same(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether two records are equal; NaN equals itself here."""
    return msgspec.json.encode(msgspec.to_builtins(one, enc_hook=str)) == msgspec.json.encode(
        msgspec.to_builtins(other, enc_hook=str)
    )


def check_line(text: str) -> None:
    assert len(text.splitlines()) == 1, text
    assert len(text) < 1500, f"{len(text)} characters"


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


def run(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Attack so many times; return what became of the files, and what failed."""
    draw, counts, failures = random.Random(seed), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-attacks-") as home:
        targets = [Attacked(RESULTS / name, Path(home)) for name in ("cpu", "max-size-quick")]
        for number in range(count):
            damage, target = draw.choice(DAMAGES), draw.choice(targets)
            try:
                counts[target.attack(damage, draw, number % CHARTS_EVERY == CHARTS_EVERY - 1)] += 1
            except Exception:
                failures.append(f"attack {number} of seed {seed}, {damage.__name__}:\n{traceback.format_exc()}")
                print(failures[-1], flush=True)
            if (number + 1) % 1000 == 0:
                print(f"{number + 1} of {count}: {dict(counts)}, {len(failures)} failures", flush=True)
    return counts, failures


def every_truncation(home: Path) -> int:
    """Cut one record at every byte; return how many of them were taken for a whole one."""
    target = Attacked(RESULTS / "cpu", home)
    path = next(iter(target.records))
    data = target.files[path]
    taken = 0
    for length in range(len(data) - 1):  # the last byte is the newline
        try:
            read_record(data[:length], path.name)
            taken += 1
        except msgspec.DecodeError:
            pass
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    counts, failures = run(asked.count, asked.seed)
    causes = Counter(failure.strip().splitlines()[-1][:150] for failure in failures)
    for cause, number in causes.most_common():
        print(f"{number:6d}  {cause}")
    print(f"{asked.count} damaged files, seed {asked.seed}: {dict(counts)}, {len(failures)} failures")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
