"""check(): rehearses the commands of a file, and compares each with a baseline that lies beside it.

The file is TOML::

    limit = "1%"                          # by how much a peak may grow; a recipe may have its own

    [recipes.llama-8b]
    command = "torchrun --nproc-per-node 8 train.py --bs 2"
    server = "p5.48xlarge"                # and other options of rehearse, with underscores

Commands run in the file's folder. Where options take lists, each combination is one recipe.
"""

from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import structs

from fsdp_bench.catalog.loader import load_user_catalog
from fsdp_bench.plan.compare.scripts import DEFAULT_LIMIT, Gate, ScriptSide, Status, limit_bytes, read_script
from fsdp_bench.plan.rehearsal_document import RehearsalDocument
from fsdp_bench.plan.script.kept import KeptReports
from fsdp_bench.plan.script.rehearsals import Answered, Rehearsals
from fsdp_bench.plan.script.variants import Variant, read_combinations
from fsdp_bench.spec.checked import Checked, build
from fsdp_bench.spec.codec import from_versioned, to_json
from fsdp_bench.spec.errors import ExitCode, SpecError
from fsdp_bench.spec.files import read_document, write_atomically

SCHEMA_VERSION = 1


class Recipe(Checked, frozen=True, kw_only=True):
    """A command and the GPUs that it is meant for. Options without a value are as ``rehearse`` has them."""

    command: str
    limit: str | None = None
    """By how much a peak may grow; by default the file's."""
    each: dict[str, Any] | None = None
    env: tuple[str, ...] = ()
    edit: tuple[str, ...] = ()
    server: Any = None
    gpu: Any = None
    nodes: Any = None
    gpus_per_node: Any = None
    world_size: Any = None
    strategy: Any = None
    power: Any = None
    gpu_memory: Any = None
    headroom: Any = None
    steps: Any = None
    ranks: Any = None
    max_gpu_memory: Any = None
    random_weights: bool = False
    random_data: Any = None
    balanced_routing: bool = False
    unsupported: Literal["stop", "warn"] = "stop"
    time: bool = False
    tokens_per_step: Any = None
    timeout: Any = None

    def variants(self, catalog: Path | None) -> list[Variant]:
        """Return a variant for each combination of values. Raises SpecError for a value that is not allowed."""
        given = {name: value for name, value in structs.asdict(self).items() if value is not None}
        stops = given.pop("unsupported") == "stop"
        given.pop("limit", None)
        entries = load_user_catalog(catalog).under_power(given.pop("power", None))
        options = {"stops_at_unsupported": stops, "catalog": entries}
        found = read_combinations(given.pop("command"), **given, **options).variants()
        if (refused := next((one.refused for one in found if one.refused), None)) is not None:
            raise SpecError(refused)
        return found


class CheckFile(Checked, frozen=True, kw_only=True):
    """The tables of the file."""

    limit: str = DEFAULT_LIMIT
    baseline: str | None = None
    """Another file for the baseline, from this one's folder. By default NAME.baseline.json."""
    catalog: str | None = None
    """A TOML file with further hardware."""
    recipes: dict[str, Recipe]


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The memory and time of each recipe, without what depends on the machine that rehearsed it."""

    schema_version: int = SCHEMA_VERSION
    recipes: dict[str, RehearsalDocument] = {}


@dataclass(frozen=True)
class CheckRow:
    """One recipe: what was found and the baseline, or the reason why it could not be rehearsed."""

    name: str
    gate: Gate | None
    reason: str | None = None

    @property
    def status(self) -> Status:
        """The answer."""
        return Status.CRASHED if self.gate is None else self.gate.status


@dataclass(frozen=True)
class CheckResult:
    """All recipes of a file, in its order."""

    file: Path
    rows: tuple[CheckRow, ...]
    only_in_baseline: tuple[str, ...]
    updated: Path | None = None
    """The baseline, if it was written."""

    @property
    def failed(self) -> tuple[CheckRow, ...]:
        """The recipes that crashed, do not fit any more, or grew."""
        return tuple(row for row in self.rows if row.status.exit_code is not ExitCode.DONE)

    @property
    def exit_code(self) -> ExitCode:
        """1 if one crashed; 3 if one does not fit any more or grew, unless that is the baseline now; 0 otherwise."""
        codes = {row.status.exit_code for row in self.rows}
        if ExitCode.CRASHED in codes:
            return ExitCode.CRASHED
        return ExitCode.DONE if self.updated else max(codes, default=ExitCode.DONE)


def check(
    file: str | Path, update: bool = False, progress: Callable[[CheckRow, int, int], None] = lambda *_: None
) -> CheckResult:
    """Rehearse the recipes of a file, several at once where memory allows, and compare each with the baseline.

    An interrupt raises KeyboardInterrupt; the same check then repeats nothing.

    Args:
        file: the TOML file.
        update: write what is found as the baseline. A recipe that crashed keeps what it had there.
        progress: called with each recipe once it is done, its number, and how many there are.

    Raises:
        SpecError: naming the file, the place in it and what is allowed.
        MachineError: if a command's Python has no CUDA build of torch, or there is no C compiler.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise SpecError(f"{path}: no such file; a TOML file with [recipes.NAME]")
    with chdir(path.parent):
        asked, variants = _read(path)
        baseline_file = path.parent / (asked.baseline or f"{path.stem}.baseline.json")
        before = _read_baseline(baseline_file)
        rows: dict[str, CheckRow] = {}

        def done(one: Answered) -> None:
            name = next(name for name, (_, variant) in variants.items() if variant is one.variant)
            rows[name] = _row(name, one, before.get(name), variants[name][0].limit or asked.limit)
            progress(rows[name], len(rows), len(variants))

        with Rehearsals(KeptReports(["check", path.name])) as rehearsals:
            rehearsals.answer([variant for _, variant in variants.values()], done)
    found = tuple(rows[name] for name in variants)
    if update:
        now = {row.name: _kept(row.gate.now.found) for row in found if row.gate and row.status is not Status.CRASHED}
        kept = {name: one for name, one in before.items() if name in variants}
        write_atomically(baseline_file, to_json(Baseline(recipes={**kept, **now})))
    missing = tuple(name for name in before if name not in variants)
    return CheckResult(Path(file), found, missing, baseline_file if update else None)


def _read(path: Path) -> tuple[CheckFile, dict[str, tuple[Recipe, Variant]]]:
    """Return the file, and each recipe by its name and values. Raises SpecError, naming the place in the file."""
    document = read_document(path, "TOML")
    try:
        asked = build(CheckFile, document)
        catalog = None if asked.catalog is None else Path(asked.catalog)
        found: dict[str, tuple[Recipe, Variant]] = {}
        for name, recipe in asked.recipes.items():
            try:
                limit_bytes(recipe.limit or asked.limit)
                for variant in recipe.variants(catalog):
                    found[f"{name}: {variant.title}" if variant.values else name] = recipe, variant
            except SpecError as error:
                raise SpecError(f"[recipes.{name}] {error}") from None
        if not found:
            raise SpecError("has no [recipes.NAME]")
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    return asked, found


def _row(name: str, answered: Answered, before: RehearsalDocument | None, limit: str) -> CheckRow:
    if answered.worst is None:
        return CheckRow(name, None, answered.reason)
    baseline = ScriptSide("the baseline", before) if before else None
    return CheckRow(name, Gate(read_script(answered.worst, "now"), baseline, limit))


def _read_baseline(path: Path) -> Mapping[str, RehearsalDocument]:
    """Read a baseline; without a file it is empty. Raises SpecError for a broken file."""
    if not path.exists():
        return {}
    try:
        return from_versioned(path.read_bytes(), Baseline, path.name, SCHEMA_VERSION).recipes
    except msgspec.DecodeError as error:
        raise SpecError(f"{path}: is no baseline ({str(error).splitlines()[0]}); --update writes it anew") from None


def _kept(found: RehearsalDocument) -> RehearsalDocument:
    """Return what the baseline keeps: files from the command's folder, nothing about this machine or single steps."""
    server = structs.replace(found.server, gpu_memory_source=None)
    host = structs.replace(found.host, peak_bytes=0)
    return structs.replace(found, server=server, host=host, folder=None, spans=(), reads=(), failure=None)


def document(found: CheckResult, answer: str, lines: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON form, with the answer in a sentence, and a line for each recipe."""
    return {
        "answer": answer,
        "passes": not found.failed,
        "recipes": [
            {
                "name": row.name,
                "status": row.status,
                "line": lines[row.name],
                "limit": row.gate and row.gate.limit,
                "now": row.gate and row.gate.now.found,
                "before": row.gate and row.gate.before and row.gate.before.found,
            }
            for row in found.rows
        ],
        "only_in_baseline": list(found.only_in_baseline),
        "updated": None if found.updated is None else str(found.updated),
    }
