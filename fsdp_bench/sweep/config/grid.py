"""Makes each cell of a sweep file one trial."""

from __future__ import annotations

from fsdp_bench.spec.errors import MachineError, SpecError
from fsdp_bench.spec.model_code import ModelCode, TrainedModel
from fsdp_bench.spec.record import TrialSpec
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import SIZES
from fsdp_bench.sweep.config.cells import Cell, excludes, resolvable, setup_of, why_not, with_defaults
from fsdp_bench.sweep.config.shapes import shape_of
from fsdp_bench.sweep.config.sweep_file import NO_GPU, SweepFile, naming
from fsdp_bench.sweep.config.trial import SweepPlan, Trial
from fsdp_bench.sweep.config.trial_id import trial_id


def trials_of(file: SweepFile) -> SweepPlan:
    """Make each cell a trial. Without the file's GPU, only cells whose sizes do not depend on it become trials.

    Raises:
        SweepFileError: one line: the file, the place in it, what is allowed.
        MachineError: if all sizes depend on a GPU that this machine lacks.
    """
    with naming(file.path):
        excluded = excludes(file)
        trials: dict[str, Trial] = {}
        known, needing_gpu = resolvable(file)
        refuse_if_all_need_gpu(file, "trial", known, needing_gpu)
        for place, written in known:
            cell = with_defaults(written, file)
            try:
                setup = setup_of(cell, file.machine)
                shape = shape_of(cell, file.models, file.machine)
                check_positions(shape, setup)
                _check_sizes(shape, written)
            except SpecError as error:
                raise SpecError(f"{place} {error}") from None
            spec = TrialSpec(
                id=trial_id(shape, setup, file.run, file.device),
                model=shape,
                setup=setup,
                run=file.run,
                device=file.device,
            )
            trials.setdefault(spec.id, Trial(spec=spec, skip_reason=why_not(shape, setup, file, excluded)))
        refuse_if_none_runs("trial", [trial.skip_reason for trial in trials.values()])
    return SweepPlan(
        name=file.name,
        launcher=file.launcher,
        device=file.device,
        trials=tuple(trials.values()),
        source=file.text,
        needing_gpu=tuple(needing_gpu),
    )


def check_positions(shape: TrainedModel, setup: TrainSetup) -> None:
    """Refuse a sequence that is longer than the positions that a model learns.

    Raises:
        SpecError: naming both.
    """
    positions = shape.learned_positions
    if positions is not None and setup.sequence_length > positions:
        raise SpecError(
            f"sequence_length: {setup.sequence_length} is longer than {shape.name}'s learned positions,"
            f" max_position_embeddings {positions}"
        )


def _check_sizes(shape: TrainedModel, cell: Cell) -> None:
    """Refuse a size of the batch that a user's function does not take.

    Raises:
        SpecError: naming the size and the function.
    """
    if not isinstance(shape, ModelCode) or shape.function is None:
        return
    for size in SIZES:
        if size in cell and size not in shape.arguments:
            raise SpecError(
                f"{size}: {shape.function}() makes its own batch; give it a parameter {size}, or leave {size} out"
            )


def refuse_if_all_need_gpu(file: SweepFile, what: str, known: list[tuple[str, Cell]], needing_gpu: list[str]) -> None:
    """Refuse a sweep whose cells all depend on a GPU that this machine lacks.

    Raises:
        MachineError: naming what depends on the GPU.
    """
    if needing_gpu and not known:
        raise MachineError(f"{file.path}: every {what} needs the GPU: {'; '.join(needing_gpu)}; and {NO_GPU}")


def refuse_if_none_runs(what: str, skip_reasons: list[str | None]) -> None:
    """Refuse a sweep whose cells are all skipped.

    Raises:
        SpecError: with the first reason.
    """
    if all(skip_reasons):
        reasons = sorted({reason or "" for reason in skip_reasons})
        raise SpecError(f"no {what} can run here: {reasons[0] if reasons else 'the grid is empty'}")
