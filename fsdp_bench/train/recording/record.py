"""Records a model's code: every variant, at as many points as its formulas need."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.config import Architecture
from fsdp_bench.spec.recording.recorded import (
    MULTIPLE,
    Input,
    ModuleRecord,
    Origin,
    RecordedCode,
    RecordedParameter,
    Variant,
)
from fsdp_bench.spec.recording.variants import KINDS, VariantKind, offloaded, with_frozen
from fsdp_bench.train.dry_run.fake_world import fake_device
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.models.lora import stored_apart
from fsdp_bench.train.models.user_module import block_class, block_lists, default_dtype, loss_of, named_class
from fsdp_bench.train.recording.formulas import Formulas, Point, Size, merged
from fsdp_bench.train.recording.loops import Writer
from fsdp_bench.train.recording.variant import RawStep, record_step

Build = Callable[[Point], tuple[nn.Module, Any]]
"""Returns a bare model on the current device, and a batch, at one point: values of B, S and other symbols."""


@dataclass(frozen=True)
class Subject:
    """The code to record."""

    build: Build
    points: Sequence[Point]
    """The first is the model as it was asked for."""
    origin: Origin
    loss: Callable[[Any, Any], torch.Tensor] = loss_of
    """Returns the loss, given the model's output and the batch."""
    block_path: str | None = None
    """The class of the blocks, ``pkg.mod:Class``; None to find it."""
    beyond: int = 0
    """Sequences are longer than this sliding window."""
    longest: int | None = None
    """The sliding window, where sequences are no longer."""
    only: int | None = None
    """The length of all sequences, where the recording is for one alone."""
    positions: int | None = None
    """The positions that the model has learned."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """The number of blocks that are left out, by what the name of their list contains: ``decoder``, or nothing."""
    architecture: Architecture | None = None
    """The config.json files that a recording for all sizes holds for."""
    before_sm80: bool = False
    """Whether it runs as on GPUs of compute capability 7.0 and 7.5 (Gpu.is_before_sm80)."""


def record(
    subject: Subject, progress: Callable[[str], None] = lambda what: None, activation_offload: bool = False
) -> RecordedCode:
    """Record every variant of a model's code, with ``activation_offload`` also offloaded; ``progress`` gets each.

    Raises SpecError, with the reason, for code that cannot be recorded.
    """
    with fake_device("cuda", subject.before_sm80) as device:
        gc.freeze()  # what is there already need not be looked through after every step
        bare, block = _without_variants(subject, device)
        recording = _Recording(subject, device, bare.num_blocks, block)
        is_trained = all(parameter.is_trained for parameter in bare.parameters)
        kinds = KINDS if is_trained else with_frozen(subject.origin.lora)
        for kind in (*kinds, *offloaded(kinds)) if activation_offload else kinds:
            progress(kind.name)
            recording.add(kind)
    if recording.notes:
        raise SpecError(f"the model cannot be recorded exactly: {recording.notes[0]}")
    refuse_unlike_loops(recording.variants)
    if not recording.variants:
        raise SpecError(f"the model does not run: {next(iter(recording.missing.values()))}")
    return msgspec.structs.replace(
        bare,
        variants={name: msgspec.Raw(msgspec.json.encode(each)) for name, each in recording.variants.items()},
        same=recording.same,
        missing=recording.missing,
    )


def _left_out(subject: Subject, path: str) -> int:
    parts = (part for part in subject.left_out if part and part in path)
    return subject.left_out.get(next(parts, ""), 0)


class _Recording:
    """The variants that were recorded."""

    def __init__(self, subject: Subject, device: torch.device, lists: dict[str, int], block: type[nn.Module]) -> None:
        self._subject, self._device, self._lists, self._block = subject, device, lists, block
        self.variants: dict[str, Variant] = {}
        self.same: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.notes: list[str] = []
        self._first: dict[VariantKind, RawStep] = {}
        """The step of each recorded kind at the first point."""

    def add(self, kind: VariantKind) -> None:
        """Record a variant, for several sequences and for one. If it is like another one, note only its name."""
        point = self._subject.points[0]
        if kind.fallback is not None and kind.fallback.name in self.missing:
            return
        try:
            first, notes = self._step(point, kind)
        except SpecError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            self.missing[kind.name] = " ".join(str(error).split())[:200]
            return
        like = next((other for other, step in self._first.items() if step == first), None)
        if like is not None:
            self.same |= {_name(kind, is_single): _name(like, is_single) for is_single in (False, True)}
            return
        self._first[kind] = first
        for is_single in (False, True):
            points = [{**each, "B": 1} if is_single else each for each in self._subject.points]
            points = [each for index, each in enumerate(points) if each not in points[:index]]
            steps = [(first, notes) if each == point else self._step(each, kind) for each in points]
            formulas = Formulas(points)
            top, nodes, loss, buffers = merged([step for step, _ in steps], formulas)
            writer = Writer(top, nodes, self._lists, self._places())
            self.variants[_name(kind, is_single)] = writer.variant(loss, buffers, tuple(formulas.texts))
            self.notes += [note for _, notes in steps for note in notes]

    def _places(self) -> dict[str, tuple[int, int]] | None:
        """Return where the loops of the first variant are: all have the same.

        With frozen parameters more blocks may differ than with all trained; where blocks cast their inputs, fewer.
        """
        first = next(iter(self.variants.values()), None)
        return None if first is None else {loop.path: (loop.first, loop.period) for loop in first.loops}

    def _step(self, point: Point, kind: VariantKind) -> tuple[RawStep, list[str]]:
        model, batch = _built(self._subject, point, self._device, DTYPES[kind.store])
        if kind.trains:
            train_flat_parameters(model, self._block if kind.trains == "units" else None)
        gc.collect()
        gc.disable()  # a collection would free cycles at another moment than in another run
        try:
            dtype, loss = DTYPES[kind.compute], self._subject.loss
            return record_step(model, batch, dtype, kind, self._device, self._block, loss)
        finally:
            gc.enable()


def train_flat_parameters(model: nn.Module, block: type[nn.Module] | None) -> None:
    """Let each parameter need a gradient if one of its FSDP1 unit does; a unit is a block, what is in none, or all.

    With use_orig_params a parameter is a view of its flat parameter, which needs a gradient if any does
    (FlatParamHandle._validate_tensors_to_flatten), and so every view does (_use_unsharded_views).
    """
    rest = dict.fromkeys(model.parameters())
    units = []
    for module in model.modules():
        if block is not None and isinstance(module, block):
            units.append([parameter for parameter in module.parameters() if parameter in rest])
            for parameter in units[-1]:
                del rest[parameter]
    for unit in [*units, list(rest)]:
        if any(parameter.requires_grad for parameter in unit):
            for parameter in unit:
                parameter.requires_grad_(parameter.is_floating_point())


def refuse_unlike_loops(variants: Mapping[str, Variant]) -> None:
    """Refuse variants with unlike loops, which would mean different models. Raises SpecError, naming two."""
    loops = {name: [(loop.path, loop.first, loop.period) for loop in found.loops] for name, found in variants.items()}
    (first, expected), *others = loops.items() or [("", [])]
    for name, found in others:
        if found != expected:
            raise SpecError(f"the model cannot be recorded: in {name} other blocks are alike than in {first}")


def _built(
    subject: Subject, point: Point, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Any]:
    with default_dtype(dtype), torch.device(device):
        model, batch = subject.build(point)
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
    return model.train(), batch


def _name(kind: VariantKind, is_single: bool) -> str:
    return f"{kind.name}, one sequence" if is_single else kind.name


def _without_variants(subject: Subject, device: torch.device) -> tuple[RecordedCode, type[nn.Module]]:
    """Return what is the same in all variants, as the modules, the parameters and the batch; and the blocks' class."""
    built = [_built(subject, point, device) for point in subject.points]
    model = built[0][0]
    kind = named_class(model, subject.block_path) if subject.block_path else block_class(model)
    lists = block_lists(model, kind)
    if not lists:
        raise SpecError(
            f"transformer-block: no list holds modules of the class {kind.__name__}; give the model an attribute that"
            " is an nn.ModuleList or nn.Sequential of them"
        )
    formulas = Formulas(subject.points)
    everywhere = [dict(model.named_parameters()) for model, _ in built]
    parameters = []
    for name, parameter in model.named_parameters():
        dimensions = zip(*(each[name].shape for each in everywhere), strict=True)
        shape = tuple(formulas.text([Size.product(n) for n in sizes]) for sizes in dimensions)
        parameters.append(RecordedParameter(name, shape, parameter.requires_grad, *stored_apart(parameter)))
    bare = RecordedCode(
        origin=msgspec.structs.replace(subject.origin, before_sm80=subject.before_sm80),
        block=kind.__name__,
        num_blocks=lists,
        counts={path: count + _left_out(subject, path) for path, count in lists.items()},
        sizes={name: value for name, value in subject.points[0].items() if name not in "BS"},
        parameters=tuple(parameters),
        modules=tuple(_module_records(model)),
        batch=tuple(_inputs([batch for _, batch in built], formulas)),
        variants={},
        same={},
        missing={},
        multiple=MULTIPLE if subject.only is None else 1,
        shortest=subject.only or subject.beyond + 1,
        longest=subject.only or subject.longest,
        positions=subject.positions,
        architecture=subject.architecture,
    )
    return bare, kind


def _module_records(model: nn.Module) -> list[ModuleRecord]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    seen: set[nn.Parameter] = set()
    records = []
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None and p not in seen]
        seen.update(own)
        records.append(ModuleRecord(name, type(module).__name__, tuple(names[p] for p in own)))
    return records


def _inputs(batches: Sequence[Any], formulas: Formulas) -> list[Input]:
    leaves = [[leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)] for batch in batches]
    names = list(batches[0]) if isinstance(batches[0], Mapping) else [str(index) for index in range(len(leaves[0]))]
    return [
        Input(
            name,
            formulas.text([Size.product(*t.shape) for t in same]),
            same[0].element_size(),
            same[0].is_floating_point(),
        )
        for name, same in zip(names, zip(*leaves, strict=True), strict=False)
    ]
