"""rehearse(): every combination of a command's placeholders, hardware and strategies, as rows."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdp_bench.plan.rehearsal_document import rehearsal_document
from fsdp_bench.plan.script.kept import KeptReports
from fsdp_bench.plan.script.rehearsals import Answered, Rehearsals
from fsdp_bench.plan.script.variants import Variant, read_combinations

ROW_COLUMNS = (
    *("fits", "verdict", "peak_allocated_bytes", "peak_reserved_bytes", "headroom_bytes", "peak_phase", "peak_step"),
    *("peak_line", "step_seconds", "tokens_per_second_per_gpu", "mfu", "gpu", "world_size", "rank", "outcome"),
    *("reason", "command"),
)
"""The columns of a row after those of the placeholders and options that differ."""


def rehearse(
    command: str | Sequence[str],
    each: Mapping[str, Sequence[object]] | Sequence[str] = (),
    progress: Callable[[Answered], None] = lambda one: None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Rehearse a training command once for each combination of values: ``pandas.DataFrame(rehearse(...))``.

    ``rehearse("torchrun train.py --bs {batch}", each={"batch": [1, 2, 4]}, server="p5.48xlarge")``

    Args:
        command: the command, with ``{batch}`` where a value goes, and ``{ckpt:--grad-ckpt|}`` where a switch is on.
        each: the values of each placeholder.
        progress: called with each answer once it is there.
        options: those of ``rehearse_command``; ``server``, ``gpu``, ``nodes``, ``gpus_per_node``, ``world_size`` and
            ``strategy`` take several values. ``env`` and ``edit`` are lists of texts, as on the command line.

    Returns:
        A row for each combination, bytes and seconds, the fastest that fits first; without ``time`` in their order.
        None is unknown; a combination that cannot be rehearsed has its ``reason``.

    Raises:
        SpecError: for values that are not allowed.
        MachineError: if the command's Python has no CUDA build of torch, or there is no C compiler.
    """
    variants = read_combinations(command, each, **options).variants()
    return [answered_row(one) for one in in_order(answer_each(variants, progress))]


def answer_each(variants: Sequence[Variant], progress: Callable[[Answered], None] = lambda one: None) -> list[Answered]:
    """Rehearse every variant; return answers in order. After KeyboardInterrupt the same question resumes."""
    with Rehearsals(KeptReports(["each", [one.command for one in variants]])) as rehearsals:
        return rehearsals.answer(variants, progress)


def in_order(answers: Sequence[Answered]) -> list[Answered]:
    """Return those that fit first, then those of which that is unknown; of each the fastest first, if that is known."""
    return sorted(answers, key=lambda one: ((True, None, False).index(one.fits), -(speed_of(one) or 0.0)))


def speed_of(one: Answered) -> float | None:
    """Return the tokens per second of one GPU; None if that is unknown, or nobody asked."""
    time = one.worst.time if one.worst is not None else None
    return None if time is None else time.tokens_per_second_per_gpu


def answered_row(one: Answered) -> dict[str, Any]:
    """Return an answer as one row: its values, then ROW_COLUMNS."""
    row: dict[str, Any] = {"reason": one.reason, "command": shlex.join(one.variant.command)}
    if one.worst is not None:
        found, time = rehearsal_document(one.worst), one.worst.time
        lines = [held.user_line or held.line for held in found.memory.lines_at_peak or ()]
        line = next(filter(None, lines), None)
        row |= {
            **{name: getattr(found, name) for name in ("fits", "headroom_bytes", "world_size", "rank")},
            **{name: getattr(found.memory, name) for name in _OF_MEMORY},
            "verdict": found.verdict and found.verdict.value,
            "peak_line": line and f"{line.file}:{line.line}",
            "step_seconds": time and time.time.step_seconds,
            "tokens_per_second_per_gpu": time and time.tokens_per_second_per_gpu,
            "mfu": time and time.mfu,
            "gpu": one.worst.gpu.name,
            "outcome": found.outcome.value,
        }
    return {**one.variant.values, **{name: row.get(name) for name in ROW_COLUMNS}}


_OF_MEMORY = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_phase", "peak_step")


def each_document(answers: Sequence[Answered]) -> dict[str, Any]:
    """Return the JSON form: the answers in the order of the combinations, and which is the best."""
    best = in_order(answers)[0]
    return {
        "source": "rehearsed",
        "best": answers.index(best) if best.fits else None,
        "rehearsals": [{"values": dict(one.variant.values), **answered_document(one)} for one in answers],
    }


def answered_document(one: Answered) -> dict[str, Any]:
    """Return the JSON form of an answer, without its values."""
    return {
        "command": list(one.variant.command),
        "reason": one.reason,
        "fits": one.fits,
        "ranks": [rehearsal_document(rank) for rank in one.found],
    }
