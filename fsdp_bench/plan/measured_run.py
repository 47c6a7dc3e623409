"""read_run(): what a user's own run took, from a number, a log, or a trace of torch.profiler.

A log has lines such as torchtitan's "tps: 5,762", or is a CSV file or Hugging Face's trainer_state.json. A TOML or JSON
file may have the setup's options beside the measured value.
"""

import csv
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from fsdp_bench.replay.step_parts import Intervals, length, union
from fsdp_bench.spec.calibration_profile import WorkClass
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.files import parse_document, read_text


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run: tokens per second, or the seconds of a step."""

    source: str
    """The measurement, in words."""
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    is_of_all_gpus: bool = False
    """Whether the tokens per second are those of all GPUs together."""
    class_seconds: Mapping[WorkClass, float] = field(default_factory=dict)
    """By a trace: the seconds of each class of kernels in a step."""
    idle_seconds: float = 0.0
    """By a trace: the seconds of a step in which the GPU does nothing."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The setup's options, if the file has them."""


_NUMBER = r"['\"]?\s*[:=]\s*['\"]?([0-9][0-9,_]*\.?[0-9]*(?:e[+-]?[0-9]+)?)"
_BEFORE = r"\b([0-9][0-9,_]*\.?[0-9]*)\s*"
_PER_SECOND = r"tok(?:en)?s?(?:/|_per_| per )s(?:ec(?:ond)?)?"
_STEP = r"(?:step[_ ]?(?:time|seconds)|(?:seconds|time)[_ ]per[_ ]step|sec/step|end_to_end)"
_FORMS = (
    (rf"(?:\btps|\(tps\)|{_PER_SECOND}(?:(?:/|_per_| per )(?:gpu|device))?){_NUMBER}", "tok/s", 1.0),
    (rf"{_BEFORE}{_PER_SECOND}(?![a-z_])", "tok/s", 1.0),
    (rf"{_STEP}(?:[_ (]*ms\)?{_NUMBER}|{_NUMBER}\s*ms)", "s", 1e-3),
    (rf"{_STEP}(?:[_ (]*s\)?)?{_NUMBER}", "s", 1.0),
    (rf"{_BEFORE}ms/(?:it|step)\b", "s", 1e-3),
    (rf"{_BEFORE}s/(?:it|step)\b", "s", 1.0),
    (rf"{_BEFORE}(?:it|steps)/s\b", "it/s", 1.0),
)
"""Tokens/s and seconds of a step as logs write them, each with its unit."""
_UNITS = {"tok/s": ("tok/s", 1.0), "tokens/s": ("tok/s", 1.0), "s": ("s", 1.0), "ms": ("s", 1e-3)}
_Values = list[tuple[str, float]]
"""Values, each with its unit: ``tok/s`` or ``s``."""


def read_run(text: str | Path, column: str | None = None, is_of_all_gpus: bool = False) -> MeasuredRun:
    """Read a measured run.

    Args:
        text: a number with its unit, ``5,762tok/s``, ``0.71s`` or ``712ms``, or the path of a file.
        column: of a CSV file, ``NAME`` or ``NAME=tok/s``, ``NAME=s``, ``NAME=ms``.
        is_of_all_gpus: whether tokens per second are those of all GPUs together, not of each.

    Raises:
        SpecError: for text that is neither, and a file in which nothing is found.
    """
    number = re.fullmatch(rf"\s*{_BEFORE}({'|'.join(_UNITS)})\s*", str(text))
    path = Path(text)
    if number is None and not path.is_file():
        allowed = "5,762tok/s, 0.71s or 712ms, a log, trainer_state.json, a CSV or TOML file, a trace"
        raise SpecError(f"from: {shown(str(text))} is no file and no measurement; {allowed}")
    if number is not None:
        unit, times = _UNITS[number[2]]
        run = _run([(unit, times * _float(number[1]))], str(text).strip())
    elif column is not None or path.suffix == ".csv":
        run = _run(_of_csv(path, *(column or "").rpartition("=")[::2]), path.name)
    elif path.suffix == ".toml":
        run = _of_setup(parse_document(read_text(path, "TOML"), "TOML", path), path)
    elif path.suffix in (".json", ".gz"):
        run = _of_json(path)
    else:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", read_text(path, "text"))
        run = _run([value for line in plain.splitlines() for value in _values_in(line)], path.name)
    return replace(run, is_of_all_gpus=is_of_all_gpus)


def _float(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _values_in(line: str) -> _Values:
    for pattern, unit, times in _FORMS:
        if (found := re.search(pattern, line, re.IGNORECASE)) is not None:
            value = times * _float(next(filter(None, found.groups())))
            return [(unit, value)] if unit != "it/s" else [("s", 1 / value)] if value else []
    return []


def _run(values: _Values, where: str) -> MeasuredRun:
    """Return the median, without the first value, which a warm-up is in. Tokens/s count before seconds."""
    if not values:
        raise SpecError(
            f"from: {where}: nothing in it like 'tps: 5,762', '5762 tokens/s', 'step_time: 0.71', '0.71 s/it'"
        )
    unit = max(unit for unit, _ in values)
    own = [value for its_unit, value in values if its_unit == unit]
    found = median(own[1:] or own)
    if not 0 < found < inf:
        raise SpecError(f"from: {where}: {found:g} {unit} is not allowed; a number greater than 0")
    text = f"{found:,.0f} tokens/s" if unit == "tok/s" else f"{found * 1e3:,.1f} ms a step"
    text += f", the median of {len(own[1:])} in {where}" if own[1:] else ""
    return MeasuredRun(text, *((found, None) if unit == "tok/s" else (None, found)))


def _of_csv(path: Path, name: str, unit: str) -> _Values:
    if unit not in _UNITS:
        name, unit = "=".join(filter(None, (name, unit))), ""
    rows = list(csv.DictReader(read_text(path, "CSV").splitlines()))
    names = [one for one in (rows[0] if rows else {}) if one and (one == name if name else _values_in(f"{one}: 1"))]
    if len(names) != 1:
        known = ", ".join(filter(None, rows[0])) if rows else "none"
        raise SpecError(
            f"{path}: {len(names)} columns are {shown(name) if name else 'tokens/s or seconds'}; --column, of {known}"
        )
    cells = [cell for row in rows if (cell := (row[names[0]] or "").strip())]
    known_unit = [_UNITS[unit]] if unit else _values_in(f"{names[0]}: 1")
    if not known_unit:
        raise SpecError(f"{path}: column {shown(names[0])}: in which unit? --column '{names[0]}=tok/s', =s or =ms")
    try:
        return [(known_unit[0][0], known_unit[0][1] * _float(cell)) for cell in cells]
    except ValueError as error:
        raise SpecError(f"{path}: column {shown(names[0])}: {error}") from None


def _of_json(path: Path) -> MeasuredRun:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found = msgspec.convert(json.loads(data), _Json, strict=False)  # json reads the NaN that Trainer writes, too
    except (OSError, EOFError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    if found.traceEvents is not None:
        return _of_trace(found.traceEvents, path.name)
    if found.log_history is None:
        return _of_setup(parse_document(data.decode(), "JSON", path), path)
    steps, seconds = found.global_step, sum(one.train_runtime for one in found.log_history)
    if steps <= 0 or not 0 < seconds < inf:
        raise SpecError(f"{path}: no `train_runtime`: the training has not ended; lines of its log have s/it, too")
    text = f"{seconds / steps * 1e3:,.1f} ms a step: {steps} steps with start, evaluations and saving in {path.name}"
    return MeasuredRun(text, step_seconds=seconds / steps)


def _of_setup(document: Any, path: Path) -> MeasuredRun:
    """Read options of the setup by name, and ``tokens_per_second`` or ``step_seconds``."""
    found = {name: _values_in(f"{name}: {value}") for name, value in dict(document).items()}
    options = {name.replace("-", "_"): document[name] for name, values in found.items() if not values}
    return replace(_run([value for values in found.values() for value in values], path.name), options=options)


class _TraceEvent(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Logged(msgspec.Struct):
    train_runtime: float = 0.0


class _Json(msgspec.Struct):
    traceEvents: list[_TraceEvent] | None = None
    log_history: list[_Logged] | None = None
    global_step: int = 0


_KERNELS: tuple[tuple[WorkClass, str], ...] = (
    ("communication", r"nccl"),
    ("attention", r"flash|fmha|sdpa|attention"),
    ("matrix_products", r"gemm|gemv|cublas|cutlass|xmma|nvjet|splitkreduce|matmul|_tem_fused"),
    ("optimizer", r"multi_tensor_apply"),
    ("copies", r"^memcpy (?:htod|dtoh)"),
    ("other_operators", r""),
)
"""The classes of kernels and copies, each with what their names contain, in any case."""


def _of_trace(events: Sequence[_TraceEvent], where: str) -> MeasuredRun:
    """Read the kernels of a trace's first GPU, by class. Raises SpecError without kernels, or steps to count."""
    on_gpu = [one for one in events if one.ph == "X" and one.cat.lower() in ("kernel", "gpu_memcpy", "gpu_memset")]
    names = [one.name for one in events if one.ph == "X" and one.cat == "user_annotation"]
    steps = len({name for name in names if name.startswith("ProfilerStep#")})
    steps = steps or sum(name.startswith("Optimizer.step#") for name in names)
    if not on_gpu or not steps:
        missing = "kernels; profile with ProfilerActivity.CUDA" if not on_gpu else "ProfilerStep and Optimizer.step"
        raise SpecError(f"from: {where}: a trace without {missing}")
    first = min(str(one.args.get("device")) for one in on_gpu)
    seconds, spans = dict[WorkClass, float](), Intervals()
    for one in on_gpu:
        if str(one.args.get("device")) == first:
            kind = next(kind for kind, words in _KERNELS if re.search(words, one.name, re.IGNORECASE))
            seconds[kind] = seconds.get(kind, 0.0) + one.dur * 1e-6 / steps
            spans.append((one.ts * 1e-6, (one.ts + one.dur) * 1e-6))
    step = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / steps
    text = f"{step * 1e3:,.1f} ms a step, with {len(spans):,} kernels of {steps} steps in {where}"
    return MeasuredRun(text, step_seconds=step, class_seconds=seconds, idle_seconds=step - length(union(spans)) / steps)
