"""read_run(): a run that the user has measured: tokens/s or seconds of a step, from a number, a log or a trace.

A log has torchtitan's lines ("tps: 5,762") or others with tokens/s or seconds of a step, or is a CSV file, or Hugging
Face's trainer_state.json. A trace is torch.profiler's Chrome trace. A TOML or JSON file may hold the setup's options and
the measured value.
"""

import csv
import gzip
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from fsdp_bench.replay.step_parts import Intervals, length, union
from fsdp_bench.spec.calibration_profile import WorkClass
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.files import parse_document, read_text


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run. One of tokens per second and seconds is given."""

    source: str
    """The measurement, in words."""
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    is_of_all_gpus: bool = False
    """Whether the tokens per second are those of all GPUs together."""
    class_seconds: Mapping[WorkClass, float] = field(default_factory=dict)
    """By a trace: the seconds of each class of kernels in a step."""
    idle_seconds: float = 0.0
    """By a trace: the seconds of a step in which the GPU runs nothing."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The setup's options, if the file has them."""


class _Value(NamedTuple):
    unit: str
    """``tok/s`` or ``s``."""
    value: float


_NUMBER = r"([0-9][0-9,_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_TOKENS_PER_SECOND = r"tok(?:en)?s?(?:/|_per_| per )s(?:ec(?:ond)?)?"
_NAMED = "['\"]?\\s*[:=]\\s*['\"]?"
_TOKENS = re.compile(
    rf"(?:\btps|\(tps\)|{_TOKENS_PER_SECOND}(?:(?:/|_per_| per )(?:gpu|device))?){_NAMED}{_NUMBER}"
    rf"|{_NUMBER}\s*{_TOKENS_PER_SECOND}(?![a-z])",
    re.IGNORECASE,
)
_SECONDS = re.compile(
    r"(?:step[_ ]?time|step[_ ]?seconds|(?:seconds|time)[_ ]per[_ ]step|sec/step|end_to_end)(?:[_ (]?(ms|s)\)?)?"
    rf"{_NAMED}{_NUMBER}\s*(ms)?|{_NUMBER}\s*(ms|s)/(?:it|step)\b|{_NUMBER}\s*(it/s)\b",
    re.IGNORECASE,
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_UNITS = {"tok/s": ("tok/s", 1.0), "tokens/s": ("tok/s", 1.0), "s": ("s", 1.0), "ms": ("s", 1e-3)}
_FORMS = "a number such as 5,762tok/s, 0.71s or 712ms, a log, trainer_state.json, a CSV file, a trace, or a TOML file"


def read_run(text: str | Path, column: str | None = None, is_of_all_gpus: bool = False) -> MeasuredRun:
    """Read a measured run.

    Args:
        text: a number with its unit, or the path of a file.
        column: of a CSV file, ``NAME`` or ``NAME=tok/s``, ``NAME=s``, ``NAME=ms``.
        is_of_all_gpus: whether tokens per second are those of all GPUs together, not of each.

    Raises:
        SpecError: for text that is neither, and a file in which nothing is found.
    """
    number = re.fullmatch(rf"\s*{_NUMBER}\s*({'|'.join(_UNITS)})\s*", str(text))
    if number is not None:
        unit, factor = _UNITS[number[2]]
        return _run([_Value(unit, factor * _float(number[1]))], str(text).strip(), is_of_all_gpus)
    path = Path(text)
    if not path.is_file():
        raise SpecError(f"from: {shown(str(text))} is no file, and no measurement: {_FORMS}")
    if column is not None or path.suffix == ".csv":
        return _run(list(_csv_values(path, column)), path.name, is_of_all_gpus)
    if path.suffix == ".toml":
        return _of_document(parse_document(read_text(path, "TOML"), "TOML", path), path, is_of_all_gpus)
    if path.suffix in (".json", ".gz"):
        return _of_json(path, is_of_all_gpus)
    lines = _COLOURS.sub("", read_text(path, "text")).splitlines()
    found = [value for line in lines if (value := _value_in(line)) is not None]
    units = [value.unit for value in found]
    if not found:
        raise SpecError(f"{path}: no line has tokens/s or seconds per step, such as 'tps: 5,762' or 'step_time: 0.71'")
    best = "tok/s" if "tok/s" in units else "s"
    return _run([value for value in found if value.unit == best], path.name, is_of_all_gpus)


def _float(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _value_in(text: str) -> _Value | None:
    """Return the tokens per second or seconds of a step in a line of a log, ``name: number``; None without any."""
    if (found := _TOKENS.search(text)) is not None:
        return _Value("tok/s", _float(found[1] or found[2]))
    if (found := _SECONDS.search(text)) is None:
        return None
    if found[6] is not None:
        return _Value("s", 1 / rate) if (rate := _float(found[6])) else None
    unit = "ms" if "ms" in [str(part).lower() for part in (found[1], found[3], found[5])] else "s"
    return _Value("s", _UNITS[unit][1] * _float(found[2] or found[4]))


def _run(values: list[_Value], where: str, is_of_all_gpus: bool) -> MeasuredRun:
    """Return the median, without the first value, which a warm-up is in. Raises SpecError if it is not positive."""
    steady = [value.value for value in values[1:] or values]
    found = median(steady)
    if not found > 0:
        raise SpecError(f"from: {where}: {found:g} {values[0].unit} is not allowed; a number greater than 0")
    whose = " of all GPUs" if is_of_all_gpus else " per GPU"
    is_rate = values[0].unit == "tok/s"
    text = f"{found:,.0f} tokens/s{whose}" if is_rate else f"{found * 1e3:,.1f} ms a step"
    text += f", the median of {len(steady)} in {where}" if len(values) > 1 or "." in where[-6:] else ""
    if is_rate:
        return MeasuredRun(text, tokens_per_second=found, is_of_all_gpus=is_of_all_gpus)
    return MeasuredRun(text, step_seconds=found)


def _csv_values(path: Path, column: str | None) -> Iterator[_Value]:
    """Yield a column's values. Raises SpecError if the column is not there, its unit is not known, or it is empty."""
    rows = list(csv.DictReader(read_text(path, "CSV").splitlines()))
    names = [name for name in (rows[0] if rows else {}) if name]
    wanted, _, unit = (column or "").partition("=")
    found = [name for name in names if (name == wanted if wanted else _value_in(f"{name}: 1") is not None)]
    if len(found) != 1:
        which = f"has no column {shown(wanted)}" if wanted else f"{len(found)} columns look like tokens/s or seconds"
        raise SpecError(f"{path}: {which}; --column NAME, one of {', '.join(names) or 'none'}")
    name, known = found[0], _value_in(f"{found[0]}: 1")
    if unit in _UNITS:
        known = _Value(*_UNITS[unit])
    if known is None or (unit and unit not in _UNITS):
        raise SpecError(f"{path}: column {shown(name)}: in which unit? --column '{name}=tok/s', =s or =ms")
    cells = [cell for row in rows if (cell := (row[name] or "").strip())]
    try:
        yield from (_Value(known.unit, known.value * _float(cell)) for cell in cells)
    except ValueError as error:
        raise SpecError(f"{path}: column {shown(name)}: {error}") from None
    if not cells:
        raise SpecError(f"{path}: column {shown(name)} is empty")


def _of_json(path: Path, is_of_all_gpus: bool) -> MeasuredRun:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    if b'"traceEvents"' in data:
        try:
            return _of_trace(msgspec.json.decode(data, type=_Trace, strict=False).traceEvents, path.name)
        except msgspec.DecodeError as error:
            raise SpecError(f"{path}: is no Chrome trace: {error}") from None
    document = parse_document(data.decode(errors="replace"), "JSON", path)
    if isinstance(document, dict) and "log_history" in document:
        return _of_trainer(document, path)
    return _of_document(document, path, is_of_all_gpus)


def _of_trainer(state: dict[str, Any], path: Path) -> MeasuredRun:
    """Read Hugging Face's trainer_state.json: the seconds of its training by its steps."""
    done = [one for one in state["log_history"] if isinstance(one, dict) and "train_runtime" in one]
    steps = state.get("global_step") or 0
    if not done or not steps or not done[-1]["train_runtime"] > 0:
        raise SpecError(f"{path}: no `train_runtime` of a training that has ended; its log's tokens/s or s/it do, too")
    seconds = done[-1]["train_runtime"] / steps
    text = f"{seconds * 1e3:,.1f} ms a step: {steps} steps of {path.name}, with start, evaluations and saving"
    return MeasuredRun(text, step_seconds=seconds)


def _of_document(document: Any, path: Path, is_of_all_gpus: bool) -> MeasuredRun:
    """Read a file with options of the setup by name, and ``tokens_per_second`` or ``step_seconds``."""
    options, values = {}, []
    for name, value in document.items() if isinstance(document, dict) else ():
        measured = _value_in(f"{name}: {value}")
        if measured is None:
            options[name.replace("-", "_")] = value
        else:
            values.append(measured)
    if len(values) != 1:
        raise SpecError(f"{path}: has {len(values)} measured values; one, tokens_per_second or step_seconds")
    run = _run(values, path.name, is_of_all_gpus)
    return MeasuredRun(run.source, run.tokens_per_second, run.step_seconds, is_of_all_gpus, options=options)


# -- traces of torch.profiler ------------------------------------------------------------------------------------------


class _TraceEvent(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    traceEvents: list[_TraceEvent]


_KERNELS: tuple[tuple[WorkClass, str], ...] = (
    ("communication", r"nccl"),
    ("attention", r"flash|fmha|sdpa|attention"),
    ("matrix_products", r"gemm|gemv|cublas|cutlass|xmma|nvjet|splitkreduce|matmul|_tem_fused"),
    ("optimizer", r"multi_tensor_apply"),
    ("copies", r"^memcpy (?:htod|dtoh)"),
)
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def kernel_class(name: str) -> WorkClass:
    """Return the class of a kernel or copy by its name in a trace."""
    return next((kind for kind, words in _KERNELS if re.search(words, name, re.IGNORECASE)), "other_operators")


def _of_trace(events: Iterable[_TraceEvent], where: str) -> MeasuredRun:
    """Read the kernels of a trace's first GPU, by class. Raises SpecError without kernels, or steps to count."""
    listed = [event for event in events if event.ph == "X"]
    on_gpu = [event for event in listed if event.cat.lower() in _ON_GPU]
    if not on_gpu:
        raise SpecError(f"from: {where}: a trace without kernels; profile with ProfilerActivity.CUDA")
    first = min(str(event.args.get("device")) for event in on_gpu)
    own = [event for event in on_gpu if str(event.args.get("device")) == first]
    names = [event.name for event in listed if event.cat == "user_annotation"]
    steps = len({name for name in names if name.startswith("ProfilerStep#")})
    if not (steps := steps or sum(name.startswith("Optimizer.step#") for name in names)):
        raise SpecError(f"from: {where}: a trace without a whole step: neither ProfilerStep nor Optimizer.step in it")
    seconds = dict[WorkClass, float]()
    for event in own:
        kind = kernel_class(event.name)
        seconds[kind] = seconds.get(kind, 0.0) + event.dur * 1e-6 / steps
    spans: Intervals = [(event.ts * 1e-6, (event.ts + event.dur) * 1e-6) for event in own]
    step = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / steps
    text = f"{step * 1e3:,.1f} ms a step, with {len(own):,} kernels of {steps} steps in {where}"
    return MeasuredRun(text, step_seconds=step, class_seconds=seconds, idle_seconds=step - length(union(spans)) / steps)
