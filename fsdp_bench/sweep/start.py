"""sweep(), the function for Python users; open_session(), which reads a sweep file; --only and --part."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from fsdp_bench.spec.checked import build, read
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import SpecError, nearest, not_allowed, shown
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.model_code import TrainedModel
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.setup import FIELDS as SETUP
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.units import parse_bytes
from fsdp_bench.sweep.config.grid import trials_of
from fsdp_bench.sweep.config.reading import FIELD_ALIASES, check_folder_name
from fsdp_bench.sweep.config.sweep_file import SweepFile, read_file
from fsdp_bench.sweep.config.trial import SweepPlan, Trial, keeping
from fsdp_bench.sweep.frontier.file import Search, searches_of
from fsdp_bench.sweep.launchers.launcher import Cluster
from fsdp_bench.sweep.machine import probe_machine
from fsdp_bench.sweep.results.store import Store
from fsdp_bench.sweep.session import SearchSession, SweepResults, TrialSession, Watcher

RETRYABLE = ("crashed", "timeout", "oom_gpu", "oom_host")
"""Outcomes that --retry may name."""


MOST_EMULATED_RANKS = 4096


def sweep(
    file: str | Path,
    *,
    results: str | Path = "results",
    machine: str | None = None,
    only: str | Sequence[str] = (),
    part: str | None = None,
    retry: str | Sequence[str] = (),
    gpu_memory: str | int | None = None,
    emulate_world: int | None = None,
    rehearse: str | None = None,
    trace: bool = False,
    memory_snapshot: bool = False,
    watcher: Watcher | None = None,
) -> SweepResults:
    """Run every trial of a sweep file on this machine, and record memory and time. Resumes an interrupted sweep.

    Needs torch. Trials run in processes of their own: running out of memory, a crash or a hang is that trial's outcome.
    Recorded trials are not repeated. ``fsdp-bench chart`` draws charts.

    Args:
        file: a sweep file, ``sweeps/quick.toml`` for example.
        results: the results folder; records go to RESULTS/MACHINE/SWEEP.
        machine: the name of this machine's folder in ``results``.
        only: run only trials that match: the beginning of an ID, or ``"FIELD=VALUE"``; several must all match.
        part: run only a part of the trials: ``"2/4"`` is the second quarter in their order.
        retry: outcomes whose trials run again: ``crashed``, ``timeout``, ``oom_gpu`` or ``oom_host``.
        gpu_memory: limit torch to this much memory of each GPU, ``"22GiB"`` or bytes.
        emulate_world: run every trial as rank 0 of this many ranks, alone on one device.
        rehearse: rehearse every trial as rank 0 on this GPU of the catalogue, which need not be there: no times.
        trace: keep the trace of a profiled step of every rank, for Perfetto.
        memory_snapshot: record every allocation on the GPU, and keep the snapshot.
        watcher: callbacks, called as trials begin and end.

    Raises:
        SweepFileError: one line: the file, the place in it, what is allowed.
        SpecError: for other arguments that are not allowed.
        MachineError: if torch is not installed, or this machine lacks the GPU that the file asks for.
        ResultsError: if results cannot be read or written. Stored records stay.
    """
    again = outcomes(retry)
    session = open_session(
        file, results, machine, only, part, gpu_memory, emulate_world, trace, memory_snapshot, rehearse
    )
    return session.run(again, watcher)


def outcomes(retry: str | Sequence[str]) -> frozenset[Outcome]:
    """Return the outcomes whose trials run again. Raises SpecError for an outcome that is not in RETRYABLE."""
    names = _texts("retry", retry)
    for name in names:
        if name not in RETRYABLE:
            raise not_allowed("retry", name, RETRYABLE)
    return frozenset(map(Outcome, names))


def open_session(
    file: str | Path,
    results: str | Path = "results",
    machine_name: str | None = None,
    only: str | Sequence[str] = (),
    part: str | None = None,
    gpu_memory: str | int | None = None,
    emulate_world: int | None = None,
    trace: bool = False,
    snapshot: bool = False,
    rehearse: str | None = None,
    cluster: Cluster | None = None,
) -> TrialSession | SearchSession:
    """Read a sweep file; return the session that runs it, on ``cluster`` if given. Arguments are those of ``sweep``.

    Raises SweepFileError, SpecError as ``sweep``; MachineError if all sizes depend on a GPU that this machine lacks.
    """
    if not isinstance(file, str | Path) or not isinstance(results, str | Path):
        wrong = results if isinstance(file, str | Path) else file
        raise SpecError(f"{'file' if wrong is file else 'results'}: {shown(wrong)} is not allowed; a path")
    machine = probe_machine()
    if cluster is not None:
        machine = replace(machine, num_nodes=cluster.num_nodes, ranks_per_node=cluster.ranks_per_node)
    limit = None if gpu_memory is None else parse_bytes(gpu_memory, "--gpu-memory")
    world = read(Annotated[int, Meta(ge=1, le=MOST_EMULATED_RANKS)] | None, emulate_world, "emulate-world")
    found = read_file(Path(file), machine, limit, world, rehearse)
    machine = found.machine if found.run.rehearsed_on is not None else machine
    selections = _texts("only", only)
    check_selections(selections, part)
    if machine_name is not None:
        check_folder_name(machine_name, "--machine")
    store = Store(Path(results) / (machine_name or machine.name) / found.name)
    _check_kept(found, trace, snapshot)
    if found.has_frontier:
        if part is not None:
            raise SpecError(
                "--part cuts a sweep's trials, and a file with [frontier] has cells; --only chooses among them"
            )
        whole = searches_of(found)
        return SearchSession(store, machine, whole, select(whole, selections), cluster)
    trials = trials_of(found)
    chosen = keeping(select_part(select(trials, selections), part), trace, snapshot)
    return TrialSession(store, machine, trials, chosen, cluster)


def _texts(field: str, value: str | Sequence[str]) -> tuple[str, ...]:
    texts: tuple[str, ...] = read(tuple[str, ...], (value,) if isinstance(value, str) else value, field)
    return texts


def _check_kept(file: SweepFile, trace: bool, snapshot: bool) -> None:
    if trace and (file.has_frontier or not file.run.communication_steps):
        what = "a file with [frontier]" if file.has_frontier else "communication_steps = 0"
        raise SpecError(f"--trace keeps profiled steps, and {what} has none")
    if snapshot and file.device != "cuda":
        raise SpecError("--memory-snapshot records the allocator of a GPU, and this sweep runs on a CPU")
    if snapshot and file.has_frontier:
        raise SpecError(
            "--memory-snapshot is for single trials, and a file with [frontier] searches; give the trial a file"
        )


# -- --only and --part: which trials of a sweep to run, or which cells of a frontier sweep to search -------------------

AnyCell = TypeVar("AnyCell", Trial, Search)

FIELDS = (*ModelShape.__struct_fields__, *TrainSetup.__struct_fields__, "model")
"""Fields that FIELD=VALUE may name."""


def check_selections(selections: tuple[str, ...], part: str | None) -> None:
    """Refuse values of --only and --part that are wrong for every sweep, before the cells are read."""
    for selection in selections:
        if "=" in selection:
            _read(selection, FIELDS)
        elif not re.fullmatch(r"[0-9a-f]+", selection):
            raise SpecError(f"--only {selection}: neither the beginning of an ID nor FIELD=VALUE")
    if part is not None:
        _piece(part, None)


def select(plan: SweepPlan[AnyCell], selections: tuple[str, ...]) -> SweepPlan[AnyCell]:
    """Keep the trials or searches that match every selection: FIELD=VALUE, or the beginning of an ID."""
    kept = [one for one in plan.cells if all(_matches(one, selection) for selection in selections)]
    if not kept:
        what = "cell" if plan.file.has_frontier else "trial"
        unknown = f"; more need the GPU to be known: {'; '.join(plan.needing_gpu)}" if plan.needing_gpu else ""
        raise SpecError(f"--only {' '.join(selections)}: no {what} of this sweep matches; --list shows them{unknown}")
    return plan.keep(kept)


def select_part(plan: SweepPlan[Trial], part: str | None) -> SweepPlan[Trial]:
    """Keep one part of a sweep: ``2/4`` is the second quarter of its trials, in their order."""
    if part is None:
        return plan
    number, of = _piece(part, len(plan.cells))
    cuts = [round(index * len(plan.cells) / of) for index in (number - 1, number)]
    return plan.keep(plan.cells[cuts[0] : cuts[1]])


def _piece(part: str, num_trials: int | None) -> tuple[int, int]:
    """Read K/N. ``num_trials`` is None if it is not known yet."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", part)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= of or of > (num_trials or of):
        most = "the number of trials" if num_trials is None else f"{num_trials}, the number of trials"
        raise SpecError(
            f"--part: {shown(part)} is not allowed; K/N with 1 <= K <= N <= {most}: 2/4 is the second quarter"
        )
    return number, of


def _matches(cell: Trial | Search, selection: str) -> bool:
    if isinstance(cell, Trial):
        if "=" not in selection:
            return cell.spec.id.startswith(selection)
        return _has(_facts(cell.spec.model, cell.spec.setup), selection)
    if "=" not in selection:
        raise SpecError(f"--only {selection}: a [frontier] sweep has cells, not trials; FIELD=VALUE")
    facts = _facts(cell.model, cell.setup)
    if cell.quantity.is_model_size:
        facts = {name: facts[name] for name in ("family", "vocab_size", *SETUP)}
    facts.pop(cell.quantity.name, None)
    return _has(facts, selection)


def _facts(model: TrainedModel, setup: TrainSetup) -> dict[str, Any]:
    unknown = dict.fromkeys(FIELDS)  # a model of other code has no heads
    return {**unknown, **to_builtins(model), **to_builtins(setup), "family": model.kind, "model": model.name}


def _has(facts: dict[str, Any], selection: str) -> bool:
    field, wanted = _read(selection, facts)
    return str(facts[field]).lower() == wanted.lower()


def _read(selection: str, fields: Collection[str]) -> tuple[str, str]:
    field, _, wanted = selection.partition("=")
    field = FIELD_ALIASES.get(field, field)
    if field not in fields:
        raise SpecError(f"--only: unknown field {shown(field)}{nearest(field, fields)}")
    if field not in SETUP or not SETUP[field].has_words:
        return field, wanted
    stored = getattr(build(TrainSetup, {field: wanted}), field)  # so that aliases match too
    return field, str(to_builtins(stored))
