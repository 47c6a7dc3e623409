"""A sweep file with [frontier] to searches: every cell of [grid] and [[include]] has a dial that is turned.

[frontier]
dial = "params"       the size ladder; or "num_hidden_layers", "micro_batch_size", "sequence_length"
smallest = "10M"      where the dial begins and ends, in its own unit
largest = "70B"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.plan.search.dials import Dial, batch_dial, depth_dial, model_dial, sequence_dial
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.frontier import cell_label
from fsdp_bench.spec.hardware import Gpu
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.record import Device, RunPlan, TrialSpec
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.units import parse_count
from fsdp_bench.sweep.config.cells import Cell, Exclude, excludes, resolvable, setup_of, why_not
from fsdp_bench.sweep.config.grid import check_positions, refuse_if_all_need_gpu, refuse_if_none_runs
from fsdp_bench.sweep.config.reading import check_keys
from fsdp_bench.sweep.config.shapes import shape_of
from fsdp_bench.sweep.config.sweep_file import SweepFile, naming, one_of, table
from fsdp_bench.sweep.config.trial import Trial, trial_id

DIALS = ("params", "num_hidden_layers", "micro_batch_size", "sequence_length")
_KEYS = ("dial", "smallest", "largest")

RESOLUTION = 1.01
"""Steps of a frontier's dial differ by 1 % or more: finer ones within the 5 % around a prediction could not be told
apart in 4 trials."""


@dataclass(frozen=True)
class Search:
    """One cell: everything but the dial's value is fixed."""

    label: str
    dial: Dial
    model: ModelShape
    """The model that the dial begins with."""
    setup: TrainSetup
    run: RunPlan
    device: Device
    skip_reason: str | None

    def trial(self, index: int) -> Trial:
        """Return the trial of a step."""
        step = self.dial[index]
        return Trial(
            spec=TrialSpec(
                id=trial_id(step.model, step.setup, self.run, self.device),
                model=step.model,
                setup=step.setup,
                run=self.run,
                device=self.device,
            )
        )

    def turned(self, model: ModelShape, setup: TrainSetup) -> int:
        """Return the dial's value of a model and its setup."""
        if self.is_on_ladder:
            return model.num_parameters
        value: int = getattr(model if self.dial.name == "num_hidden_layers" else setup, self.dial.name)
        return value

    @property
    def is_on_ladder(self) -> bool:
        """Whether the size of the model is what is turned."""
        return self.dial.name == "num_parameters"


@dataclass(frozen=True)
class FrontierPlan:
    """A frontier sweep, resolved on one machine."""

    name: str
    launcher: str
    device: Device
    run: RunPlan
    card_is_limited: bool
    searches: tuple[Search, ...]
    source: str
    """The sweep file's text."""
    needing_gpu: tuple[str, ...] = ()
    """In words, further cells whose sizes depend on a GPU that is not here."""
    lacks_gpu: bool = False
    """Whether the card is not here, so that nothing is predicted for it."""

    def keep(self, searches: Sequence[Search]) -> FrontierPlan:
        """Return the plan with some of its searches."""
        return replace(self, searches=tuple(searches))


def searches_of(file: SweepFile) -> FrontierPlan:
    """Resolve a file's cells to searches; where its GPU is not here, those whose sizes do not depend on it.

    Raises:
        SweepFileError: one line: the file, the place in it, what is allowed.
        MachineError: when all sizes depend on a GPU that is not here.
    """
    with naming(file.path):
        words = table(file.document, "frontier")
        check_keys("[frontier] ", words, _KEYS)
        word = one_of("[frontier] dial", words.get("dial", "params"), DIALS)
        if file.device == "cpu" and file.run.memory_limit_bytes is None:
            raise SpecError("[frontier] on a CPU needs [run] memory_limit, the budget of a rank that stands for a card")
        excluded = excludes(file)
        for exclude in excluded:
            _refuse_own_key(word, exclude.place, exclude.matches)
        found: dict[str, Search] = {}
        known, needing_gpu = resolvable(file)
        refuse_if_all_need_gpu(file, "cell", known, needing_gpu)
        for place, cell in known:
            _refuse_own_key(word, place, cell)
            try:
                search = _search(word, cell, words, file, excluded)
            except SpecError as error:
                raise SpecError(str(error) if str(error).startswith("[") else f"{place} {error}") from None
            found.setdefault(search.trial(0).spec.id, search)
        refuse_if_none_runs("cell", [search.skip_reason for search in found.values()])
    return FrontierPlan(
        name=file.name,
        launcher=file.launcher,
        device=file.device,
        run=file.run,
        card_is_limited=file.card_is_limited,
        searches=tuple(found.values()),
        source=file.text,
        needing_gpu=tuple(needing_gpu),
        lacks_gpu=file.lacks_gpu,
    )


def _refuse_own_key(word: str, place: str, keys: dict[str, Any]) -> None:
    """The dial's own key, and on the ladder every name of a model, has no place in a cell."""
    for key in ("params", "model") if word == "params" else (word,):
        if key in keys:
            raise SpecError(f"{place} {key}: [frontier] turns {word!r}; leave it out here, or choose another dial")


def _search(word: str, cell: Cell, words: dict[str, Any], file: SweepFile, excluded: list[Exclude]) -> Search:
    dial, setup = _dial(word, cell, file)
    dial = _bounded(word, dial, words)
    step = dial[0]
    name = step.model.family.value if word == "params" else step.model.name
    return Search(
        label=cell_label(setup, name, dial.name),
        dial=dial,
        model=step.model,
        setup=step.setup,
        run=file.run,
        device=file.device,
        skip_reason=why_not(step.model, step.setup, file, excluded),
    )


def _dial(word: str, cell: Cell, file: SweepFile) -> tuple[Dial, TrainSetup]:
    setup, card = setup_of(cell, file.machine), card_of(file)
    if word == "params":
        vocab_size = shape_of({**cell, "params": "10M"}, {}, file.machine).vocab_size  # it checks the words too
        return model_dial(Family(cell.get("family", "llama")), setup, card, vocab_size), setup
    shape = shape_of(cell, file.models, file.machine)
    if word != "sequence_length":
        check_positions(shape, setup)
    build = {"num_hidden_layers": depth_dial, "micro_batch_size": batch_dial, "sequence_length": sequence_dial}[word]
    return build(shape, setup, card), setup


def card_of(file: SweepFile) -> Gpu | None:
    """Return the machine's GPU as the catalogue knows it, with the memory that it is limited to; None if unknown."""
    gpus = file.machine.gpus if file.device == "cuda" else ()
    gpu = gpu_by_product_name(gpus[0].name) if gpus else None
    limit = file.run.memory_limit_bytes
    if gpu is None or limit is None:
        return gpu
    return msgspec.structs.replace(gpu, usable_memory_bytes=min(limit, gpu.usable_memory_bytes or limit))


def _bounded(word: str, dial: Dial, words: dict[str, Any]) -> Dial:
    """Cut a dial to smallest and largest, and thin it to the resolution."""
    read = partial(_bound, word, words)
    smallest, largest = read("smallest", 1), read("largest", dial.values[-1])
    if largest > dial.values[-1] and "largest" in words:
        raise SpecError(f"[frontier] largest: {shown(words['largest'])} is beyond the dial's end, {dial.values[-1]}")
    if smallest > largest:
        raise SpecError(f"[frontier] smallest: {shown(words['smallest'])} is above largest")
    values: list[int] = []
    for value in dial.values:
        if smallest <= value <= largest and (not values or value >= RESOLUTION * values[-1]):
            values.append(value)
    last = max((value for value in dial.values if value <= largest), default=0)
    if values and values[-1] != last:
        values[-1] = last  # the end is a step of its own, whatever the resolution
    if not values:
        raise SpecError(f"[frontier] smallest, largest: {dial.name} has no step between {smallest} and {largest}")
    return replace(dial, values=tuple(values))


def _bound(word: str, words: dict[str, Any], key: str, default: int) -> int:
    value = words.get(key, default)
    if word == "params":
        return parse_count(value, f"[frontier] {key}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"[frontier] {key}: {shown(value)} is not allowed; 1 or more")
    return value
