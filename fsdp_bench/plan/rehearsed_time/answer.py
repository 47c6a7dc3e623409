"""rehearsed_times(): how long one step of a rehearsed script would take, with the rates that predict uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf, prod

from msgspec.structs import asdict

from fsdp_bench.plan.document import TimeDocument, time_document
from fsdp_bench.plan.headroom import with_cuda
from fsdp_bench.plan.ranges import Range, if_nearly_full, range_of, range_of_script
from fsdp_bench.plan.rehearsed_time.events import (
    ProcessGroups,
    Replayable,
    events_of,
    kind_of,
    process_groups,
    streams_of,
)
from fsdp_bench.plan.rehearsed_time.operator_work import DTYPES, dtype_of, work_of_operator
from fsdp_bench.plan.speed import Speed
from fsdp_bench.rates.datasheet import Datasheet, datasheet
from fsdp_bench.rates.scaled import SCALED, scaled
from fsdp_bench.replay.schedule import Span, StepTime, run
from fsdp_bench.replay.step_parts import StepPart
from fsdp_bench.replay.together import RankLog, run_together
from fsdp_bench.simulate.events import IN_HOST_MEMORY, Event, Kind, Stream, Work
from fsdp_bench.spec.calibration_profile import Scaling
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import Precision, TrainSetup
from fsdp_bench.spec.subprocesses.issued import (
    Argument,
    IssuedCollective,
    IssuedOperator,
    IssuedStep,
    PhaseBegin,
    TensorNumbers,
    TritonKernel,
)
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalReport

_16_BIT = ("bf16", "fp16")


@dataclass(frozen=True)
class PartTime:
    """All work of one name in a step."""

    name: str
    kind: str
    """``compute``, ``collective``, ``copy`` or ``host``."""
    count: int
    seconds: float
    """One after another."""


@dataclass(frozen=True, kw_only=True)
class RehearsedTime(Speed):
    """The work that one step of a script issued, and its time on its hardware. Unknown values are None.

    ``time`` has no step if the time of anything in it is unknown; its other times are of all else.
    """

    step: int
    """The number of the step that was noted, from 1."""
    at_least_seconds: float | None
    """The step without the work whose time is unknown."""
    unknown: dict[str, int]
    """Work whose time is not known, with how often it was issued."""
    parts: tuple[PartTime, ...]
    """The work that takes the time, the longest first."""
    host_seconds: float
    """In which the host issues work and runs FSDP's hooks."""
    waiting_for_host_seconds: float
    """In which the GPU has nothing to do."""
    is_tokens_given: bool
    sharing_ranks: float | None
    """Ranks that train on the same tokens, by tensor or pipeline parallelism. None if that is not known."""
    stages: tuple[int, ...]
    """This rank and those with which it exchanges messages."""
    num_streams: int
    """Streams on which the script issued work."""

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks that were not rehearsed, and on whose messages the step's time depends."""
        return tuple(int(name.rpartition(" ")[2]) for name in self.unknown if name.startswith(_WAITING))


def rehearsed_times(
    reports: Sequence[RehearsalReport],
    hardware: Hardware,
    tokens_per_step: int | None = None,
    scaling: Scaling | None = None,
) -> dict[int, RehearsedTime]:
    """Return how long a step of several ranks of one command takes, which wait for each other.

    Ranks whose reports note no whole step after the first are left out. ``tokens_per_step`` is what a rank trains on,
    where its embeddings do not tell; ``scaling`` changes the datasheet's rates. Of a GPU alone links are unknown.
    """
    ranks = {one.rank: _RankStep.of(one, hardware, scaling) for one in reports if one.issued is not None}
    times = run_together({rank: one.log for rank, one in ranks.items()})
    if times is None:  # what one rank sends no other one receives
        times = {rank: run(one.log.events, one.log.rates, with_spans=True) for rank, one in ranks.items()}
        for one in ranks.values():
            one.unknown["messages that no rank receives"] += 1
    is_known = True
    for one in ranks.values():
        missing = set(one.report.peers) - ranks.keys()
        one.unknown.update({f"{_WAITING} {rank}": 1 for rank in sorted(missing)})
        is_known &= not one.unknown
    return {
        rank: _answer(one, times[rank], is_known, list(ranks.values()), tokens_per_step) for rank, one in ranks.items()
    }


_WAITING = "messages with rank"
"""The beginning of the name of what is unknown where a rank's messages are with one that was not rehearsed."""


@dataclass(frozen=True)
class _RankStep:
    report: RehearsalReport
    step: IssuedStep
    hardware: Hardware
    flops: StepFlops
    setup: TrainSetup
    log: RankLog
    rates: Datasheet
    unknown: Counter[str]
    num_streams: int

    @staticmethod
    def of(report: RehearsalReport, hardware: Hardware, scaling: Scaling | None) -> _RankStep:
        """Return the step that a report has."""
        step = report.issued
        assert step is not None
        if scaling is None or not scaling.factors:  # which are over the catalogue's rates
            hardware = with_cuda(hardware, report.cuda)
        flops, groups = flops_of(step), process_groups(step, hardware, report.rank)
        setup = _setup(flops.dtype, report.world_size)
        rates = scaled(datasheet(hardware, setup, groups.groups), scaling)
        found = events_of(step, groups)
        events, unknown = _known(found, rates, groups)
        log = RankLog(events, found.meetings, rates)
        return _RankStep(report, step, hardware, flops, setup, log, rates, unknown, found.num_streams)


def _answer(
    one: _RankStep, time: StepTime, is_known: bool, ranks: Sequence[_RankStep], tokens_per_step: int | None
) -> RehearsedTime:
    """Return the answer of one of several ranks, which together look up the tokens and compute the FLOPs."""
    gpu, flops, rates = one.hardware.gpu, one.flops, one.rates
    model = [each.flops.model for each in ranks]
    sharing = sharing_ranks(one.step, one.report.rank, one.report.world_size)
    looked_up = max((count for each in ranks if (count := tokens_of(each.step)) is not None), default=None)
    own_tokens = None if looked_up is None or sharing is None else round(looked_up / sharing)
    return RehearsedTime(
        step=one.step.number,
        time=time if is_known else replace(time, step_seconds=None),
        at_least_seconds=time.step_seconds,
        unknown=dict(one.unknown.most_common()),
        parts=_parts(time.spans),
        host_seconds=_host_seconds(time.spans, rates),
        waiting_for_host_seconds=_idle_seconds(time),
        model_flops=None if None in model else sum(each for each in model if each is not None) / len(ranks),
        hardware_flops=sum(each.flops.hardware for each in ranks) / len(ranks),
        tokens_per_step=own_tokens if tokens_per_step is None else tokens_per_step,
        is_tokens_given=tokens_per_step is not None,
        sharing_ranks=sharing,
        stages=tuple(sorted({one.report.rank, *one.report.peers})) if one.report.peers else (),
        peak_flops_per_second=gpu.peak_flops_per_second(flops.dtype) if flops.dtype else None,
        source=rates.source,
        is_over_pcie=rates.is_over_pcie,
        num_streams=one.num_streams,
        range=_range(one, time) if sharing == 1.0 and one.rates.source != SCALED else None,
    )


def _range(one: _RankStep, time: StepTime) -> Range | None:
    """Return the range of a step that shares its tokens with no other rank: no others were compared."""
    gpu, is_16_bit = one.hardware.gpu, one.flops.dtype in _16_BIT
    published = range_of(one.hardware, one.setup, one.rates.is_over_pcie) if is_16_bit else None
    span = range_of_script(gpu, published, is_on_gpu=not time.cpu_optimizer_seconds)
    return span and if_nearly_full(span, one.report.peak_reserved_bytes, gpu.usable_memory_bytes)


def why_no_time(report: RehearsalReport) -> str:
    """Return why there is no step whose time could be computed."""
    if report.why_nothing_issued is not None:
        return report.why_nothing_issued
    if report.peak is None:
        return "the script never used the GPU"
    return f"a step after the first is needed, and the script made {report.num_steps} (--steps 2 or more)"


def _setup(dtype: str | None, world_size: int) -> TrainSetup:
    """Return what is known of the script's setup. ``dtype`` is the one in which most FLOPs are computed."""
    computed = dtype if dtype is not None and dtype in _16_BIT else "bf16"
    return TrainSetup(world_size=world_size, precision=Precision(computed, computed, computed))


def _known(found: Replayable, rates: Datasheet, groups: ProcessGroups) -> tuple[list[Event], Counter[str]]:
    """Return all events but the work whose time nobody knows, and the names of that."""
    unknown, known, seconds = Counter(found.unknown), list[Event](), dict[tuple[Kind, Work], float | None]()
    for event in found.events:
        if event.work is not None:
            key = event.kind, event.work
            if key not in seconds:
                seconds[key] = _seconds(event, rates)
            if seconds[key] is None:
                size = groups.sizes.get(event.work.group)
                unknown[event.work.name if size is None else f"{event.work.name} of {size} ranks"] += 1
                continue
        known.append(event)
    return known, unknown


def _seconds(event: Event, rates: Datasheet) -> float | None:
    assert event.work is not None
    ask = {Kind.KERNEL: rates.run, Kind.COPY: rates.copy, Kind.HOST_WORK: rates.host}
    return ask.get(event.kind, rates.collective)(event.work)


def _parts(spans: Sequence[Span]) -> tuple[PartTime, ...]:
    counts, seconds = Counter[tuple[str, str]](), dict[tuple[str, str], float]()
    for span in spans:
        key = span.work.name, span.kind
        counts[key] += 1
        seconds[key] = seconds.get(key, 0.0) + span.end - span.begin
    found = [PartTime(_plain(name), kind, count, seconds[name, kind]) for (name, kind), count in counts.items()]
    return tuple(sorted(found, key=lambda part: -part.seconds))


def _plain(name: str) -> str:
    return f"{name.removeprefix(IN_HOST_MEMORY)} on the CPU" if name.startswith(IN_HOST_MEMORY) else name


def _host_seconds(spans: Sequence[Span], rates: Datasheet) -> float:
    """Return what the host needs to issue everything: an operator after another, and hooks between them."""
    return sum(span.end - span.begin if span.kind == "host" else rates.launch_seconds for span in spans)


def sharing_ranks(step: IssuedStep, rank: int, world_size: int) -> float | None:
    """Return how many ranks train on the same tokens: all ranks by those over which gradients are reduced.

    FSDP reduces them on streams of its own; tensor parallelism communicates on the stream of forward, and in backward
    the same sizes. Other sizes there are gradients, as of DDP, or of norms alone under tensor parallelism, which are
    fewer than the embedding's numbers. Where nobody reduces gradients, all ranks that communicate in forward, or send
    each other messages there, as pipeline stages do, train on the same tokens. It is unknown (None) where only a part
    of the ranks was seen to communicate.
    """
    compute = {stream for stream, name in streams_of(step.events).items() if name is Stream.COMPUTE}
    by_fsdp, forward, backward = set[_Ranks](), dict[_Ranks, set[int]](), Counter[_Ranks]()
    is_forward, sends_messages, sizes = True, False, set[int]()
    for event in step.events:
        is_forward &= not (isinstance(event, PhaseBegin) and event.name == "backward")
        if not isinstance(event, IssuedCollective) or event.ranks is None:
            continue
        ranks, kind = frozenset(event.ranks), kind_of(event)
        sends_messages |= event.peer is not None
        sizes.add(len(ranks))
        if kind in _REDUCE and event.stream >= 0 and event.stream not in compute:
            by_fsdp.add(ranks)
        elif len(ranks) < 2 or event.num_bytes <= _A_NUMBER:
            continue
        elif is_forward and (event.peer is not None or kind in (*_REDUCE, "all_gather")):
            forward.setdefault(ranks, set()).add(event.num_bytes)
        elif kind in _REDUCE and event.num_bytes not in forward.get(ranks, ()):
            backward[ranks] += event.num_bytes
    numbers = max(map(prod, _looked_up(step)), default=inf)
    reduces = by_fsdp or {one for one, size in backward.items() if one not in forward or size >= numbers}
    if not reduces:
        is_known = sends_messages or sizes <= {1, world_size}
        return None if not is_known else float(world_size) if forward else 1.0
    own, with_own_tokens = frozenset({rank}), 1
    seen = own
    for group in sorted(reduces, key=len, reverse=True):
        if group & seen == own:  # another dimension of the mesh; experts' groups are parts of the largest one
            with_own_tokens, seen = with_own_tokens * len(group), seen | group
    return world_size / with_own_tokens if by_fsdp or forward or with_own_tokens == world_size else None


_Ranks = frozenset[int]
_REDUCE = ("reduce_scatter", "all_reduce")
_A_NUMBER = 8
"""Bytes of a loss or a norm, which do not tell who shares tokens."""


def _idle_seconds(time: StepTime) -> float:
    """Return the seconds in which nothing runs and no other rank is waited for."""
    idle = end = 0.0
    for span in sorted((span for span in time.spans if span.kind != "host"), key=lambda span: span.begin):
        idle += max(span.begin - end, 0.0)
        end = max(end, span.end)
    idle += max((time.step_seconds or end) - end, 0.0)
    return idle - time.parts.get(StepPart.WAITING_FOR_RANKS, 0.0)


class RehearsedTimeDocument(TimeDocument, frozen=True, kw_only=True):
    """The JSON form: the keys of ``predict --json``, and those of the step that was noted."""

    issued: str = "rehearsed"
    durations: str = "predicted"
    step: int
    at_least_seconds: float | None
    host_seconds: float
    waiting_for_host_seconds: float
    num_streams: int
    tokens_per_step: int | None
    model_flops: float | None
    hardware_flops: float
    sharing_ranks: float | None = None
    stages: tuple[int, ...] = ()
    unknown: dict[str, int]  # type: ignore[assignment]  # with how often it was issued
    parts: tuple[PartTime, ...]


def rehearsed_time_document(found: RehearsedTime | None) -> RehearsedTimeDocument | None:
    """Return the JSON form of a time, if there is one."""
    if found is None:
        return None
    own = {name: getattr(found, name) for name in _OF_STEP}
    return RehearsedTimeDocument(**{**asdict(time_document(found)), **own})


_OF_STEP = {one.name for one in fields(RehearsedTime)} & {*RehearsedTimeDocument.__struct_fields__}


# -- FLOPs and tokens of a rehearsed step: of its matrix products and attention, and of its embeddings -----------------

_ROUNDING = 1e-3


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step's forward and backward passes, two for a multiply-add. The optimizer's are not counted."""

    forward: float
    """FLOPs of forward, without recomputation."""
    backward: float
    """FLOPs of the gradients, without recomputation."""
    recomputed: float
    dtype: str | None
    """The dtype in which most of them are computed: fp32, bf16 or fp16."""

    @property
    def model(self) -> float | None:
        """FLOPs without recomputation.

        None if that is not known: gradients need at most twice what forward needs, so more was computed again.
        """
        return self.forward + self.backward if self.backward <= 2 * self.forward * (1 + _ROUNDING) else None

    @property
    def hardware(self) -> float:
        """All FLOPs."""
        return self.forward + self.backward + self.recomputed


def flops_of(step: IssuedStep) -> StepFlops:
    """Return the FLOPs of a step.

    Compiled code does not say what it computes again in backward: the products and the attention that forward has, too,
    with the same shapes and strides. Those of gradients have one factor transposed. Batched products, of attention that
    is written out, are left aside: there the shapes of both may be the same.
    """
    phase, totals, dtypes = "forward", Counter[str](), Counter[str]()
    of_forward = set[_Kind]()
    is_compiled = any(isinstance(event, TritonKernel) and event.is_inductors for event in step.events)
    for event in step.events:
        if isinstance(event, PhaseBegin):
            phase = event.name
        if not isinstance(event, IssuedOperator) or phase == "optimizer":
            continue
        work = work_of_operator(event, step.tensors)
        flops = _flops(work) if work is not None and work.dims else 0.0
        is_recomputed = event.is_recomputed or (is_compiled and phase == "backward" and _kind(event) in of_forward)
        if phase == "forward" and event.name not in _BATCHED:
            of_forward.add(_kind(event))
        totals["recomputed" if is_recomputed else phase] += flops  # type: ignore[assignment]
        if flops:
            dtypes[DTYPES.get(dtype_of(event, step.tensors), "bf16")] += flops  # type: ignore[assignment]
    most = max(dtypes, key=lambda dtype: dtypes[dtype], default=None)
    return StepFlops(float(totals["forward"]), float(totals["backward"]), float(totals["recomputed"]), most)


_BATCHED = "aten::bmm", "aten::baddbmm"
_Kind = tuple[str, frozenset[tuple[str, Argument]]]


def _kind(event: IssuedOperator) -> _Kind:
    return event.name, frozenset(pair for pair in event.arguments.items() if pair[0] not in event.outputs)


def _flops(work: Work) -> float:
    """Return the FLOPs of a product or of attention, whose backward counts twice: recomputation within it does not."""
    if work.is_product:
        m, n, k = work.dims
        return 2.0 * m * n * k
    batch, heads, _groups, length, head_dim, keys, is_causal = work.dims
    seen = (keys + 1) / 2 if is_causal else keys
    return (2 if work.is_backward else 1) * 4.0 * batch * heads * length * seen * head_dim


def tokens_of(step: IssuedStep) -> int | None:
    """Return how many tokens a rank trained on: the most that any embedding looked up. None without embeddings.

    Positions have embeddings, too, but fewer or as many are looked up.
    """
    return max(_looked_up(step).values(), default=None)


def _looked_up(step: IssuedStep) -> Counter[tuple[int, ...]]:
    looked_up = Counter[tuple[int, ...]]()
    for event in step.events:
        if isinstance(event, IssuedOperator) and event.name == "aten::embedding" and not event.is_recomputed:
            weight, indices = (event.arguments.get(name) for name in ("weight", "indices"))
            if isinstance(weight, TensorNumbers) and isinstance(indices, TensorNumbers):
                looked_up[step.tensors[weight.tensors[0]].shape] += prod(step.tensors[indices.tensors[0]].shape)
    return looked_up
