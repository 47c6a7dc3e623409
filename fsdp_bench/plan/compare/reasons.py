"""Why two setups differ: mechanisms of FSDP, each named only where the bytes or seconds that it changes do differ."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fsdp_bench.plan.compare.comparison import Comparison
from fsdp_bench.plan.compare.difference import Difference
from fsdp_bench.plan.compare.side import Side
from fsdp_bench.spec.setup import Checkpointing, Loss, Offload, Reentrant, ShardingStrategy, Wrap

LASTING = ("parameters", "optimizer_state")
"""Categories that are the same throughout a step; the others differ with the moment of the peak."""
_STATES = ("parameters", "gradients", "optimizer_state")
_COMMUNICATION = ("communication_seconds", "exposed_communication_seconds")
_HOST = ("host_copy_seconds", "cpu_optimizer_seconds")
_CHECKPOINTING = tuple(Checkpointing)
_KEEP = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)


LEAST_SHARE = 0.001
"""Differences below this fraction of the peak, or of the step, are no sign of a mechanism."""


@dataclass(frozen=True)
class Mechanism:
    """A mechanism that one setup uses and the other does not, and the numbers that it makes larger or smaller."""

    text: Callable[[Side, Side], str | None]
    """Says what the first side does; None if it does not, or if the other does, too."""
    more: tuple[str, ...] = ()
    fewer: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reason:
    """A mechanism that tells the two apart, with the numbers that show it."""

    side: str
    """``A`` or ``B``: the one that the text is about."""
    text: str
    bytes_more: dict[str, int] = field(default_factory=dict)
    """Bytes at the peak by category: how much more this side has than the other, negative if less."""
    seconds_more: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the step, in the same way."""


def _is_flat(side: Side) -> bool:
    return side.setup.shard_group_size == 1


def _keeps_gathered(x: Side, y: Side) -> str | None:
    is_so = x.setup.effective_strategy in _KEEP and y.setup.effective_strategy.reshards_after_forward
    return f"{x.strategy} keeps all parameters gathered until backward ends" if is_so else None


def _gathers_twice(x: Side, y: Side) -> str | None:
    is_so = y.setup.effective_strategy in _KEEP and x.setup.effective_strategy.reshards_after_forward
    return f"{x.strategy} gathers each unit again in backward" if is_so else None


def _keeps_whole(x: Side, y: Side) -> str | None:
    is_so = _is_flat(x) and not _is_flat(y)
    return f"{x.strategy} keeps all parameters, gradients and optimizer states on every GPU" if is_so else None


def _gathers(x: Side, y: Side) -> str | None:
    is_so = _is_flat(y) and not _is_flat(x)
    return f"{x.strategy} gathers parameters and reduces gradients unit by unit" if is_so else None


def _shards_further(x: Side, y: Side) -> str | None:
    own, other = x.setup.shard_group_size, y.setup.shard_group_size
    return f"states are sharded over {own} GPUs instead of {other}" if own > other > 1 else None


def _recomputes(x: Side, y: Side) -> str | None:
    own, other = (_CHECKPOINTING.index(side.setup.checkpointing) for side in (x, y))
    return (
        f"checkpointing {x.setup.checkpointing.value} recomputes in backward what it does not save"
        if own > other
        else None
    )


def _has_more_tokens(x: Side, y: Side) -> str | None:
    own, other = (side.setup.micro_batch_size * side.setup.sequence_length for side in (x, y))
    return f"a micro-batch has {own:,} tokens instead of {other:,}" if own > other else None


def _has_more_micro_batches(x: Side, y: Side) -> str | None:
    own, other = (side.setup.gradient_accumulation_steps for side in (x, y))
    return f"a step has {own} micro-batches instead of {other}" if own > other else None


def _offloads(x: Side, y: Side) -> str | None:
    if x.setup.offload is y.setup.offload or x.setup.offload is Offload.NONE:
        return None
    what = "parameters, gradients and optimizer states" if x.setup.offload is Offload.PARAMS else "the optimizer"
    return f"offload {x.setup.offload.value} keeps {what} in host memory"


def _differs(name: str, what: str, default: object = None) -> Callable[[Side, Side], str | None]:
    """Return a text about a side whose field is another than the other's, and than ``default``."""

    def text(x: Side, y: Side) -> str | None:
        own, other = getattr(x.setup, name), getattr(y.setup, name)
        return what.format(own=own, other=other) if own != other and own != default else None

    return text


def _precision(part: str, what: str) -> Callable[[Side, Side], str | None]:
    def text(x: Side, y: Side) -> str | None:
        own, other = (getattr(side.setup.precision, part) for side in (x, y))
        return f"{what} in {own} instead of {other}" if other == "fp32" != own else None

    return text


def _is_larger(x: Side, y: Side) -> str | None:
    own, other = (side.shape[-1] if side.shape else None for side in (x, y))
    is_so = own is not None and other is not None and own > other
    return f"the model is {x.model} instead of {y.model}" if is_so else None


def _reduces_in_buckets(x: Side, y: Side) -> str | None:
    own, other = (one.setup.is_ddp and not one.setup.is_bare for one in (x, y))
    return "DistributedDataParallel reduces in buckets as large as the gradients" if own and not other else None


def _has_other_gpu(x: Side, y: Side) -> str | None:
    own, other = x.facts.get("gpu"), y.facts.get("gpu")
    return f"the GPU is {own} instead of {other}" if own and other and own != other else None


def _has_more_gpus(x: Side, y: Side) -> str | None:
    own, other = x.setup.world_size, y.setup.world_size
    return f"collectives are among {own} GPUs instead of {other}" if own > other else None


_ALL = (*_STATES, "unsharded_parameters", "reduction_buffers", "activations", "logits", "temporary")
MECHANISMS = (
    Mechanism(_is_larger, more=(*_ALL, "compute_seconds", *_COMMUNICATION)),
    Mechanism(_keeps_gathered, more=("unsharded_parameters",)),
    Mechanism(_gathers_twice, more=_COMMUNICATION),
    Mechanism(_keeps_whole, more=_STATES),
    Mechanism(_reduces_in_buckets, more=("reduction_buffers",)),
    Mechanism(_gathers, more=("unsharded_parameters", "reduction_buffers", *_COMMUNICATION)),
    Mechanism(_shards_further, fewer=_STATES),
    Mechanism(_recomputes, fewer=("activations",), more=("compute_seconds",)),
    Mechanism(_has_more_tokens, more=("activations", "logits", "temporary", "compute_seconds")),
    Mechanism(_has_more_micro_batches, more=("gradients", "compute_seconds", *_COMMUNICATION)),
    Mechanism(_offloads, fewer=_STATES, more=_HOST),
    Mechanism(
        _differs("activation_offload", "what blocks save is in host memory", False),
        fewer=("activations",),
        more=("host_copy_seconds",),
    ),
    Mechanism(
        _differs(
            "reentrant", "reentrant checkpointing computes a block again whole, and holds its output", Reentrant.NO
        ),
        more=("activations", "compute_seconds", *_COMMUNICATION),
    ),
    Mechanism(_precision("store", "parameters are stored"), fewer=_STATES),
    Mechanism(
        _precision("compute", "operators compute"),
        fewer=("activations", "logits", "unsharded_parameters", "compute_seconds", *_COMMUNICATION),
    ),
    Mechanism(_precision("reduce", "gradients are reduced"), fewer=("reduction_buffers", "gradients", *_COMMUNICATION)),
    Mechanism(
        _differs("loss", "the cross-entropy is {own} instead of {other}", Loss.PLAIN), fewer=("logits", "temporary")
    ),
    Mechanism(
        _differs("optimizer", "the optimizer is {own} instead of {other}"), fewer=("optimizer_state", "temporary")
    ),
    Mechanism(
        _differs("optimizer_in_backward", "gradients are freed in backward, where the optimizer runs", False),
        fewer=("gradients", "temporary"),
    ),
    Mechanism(
        _differs("compile", "torch.compile fuses the operators of blocks", False),
        fewer=("activations", "temporary", "compute_seconds"),
    ),
    Mechanism(
        _differs("wrap", "wrap {own} instead of {other}", Wrap.BLOCK),
        more=("unsharded_parameters", "reduction_buffers"),
    ),
    Mechanism(
        _differs("wrap", "wrap {own} instead of {other}", Wrap.BLOCK),
        fewer=("unsharded_parameters", "reduction_buffers", *_COMMUNICATION),
    ),
    Mechanism(
        _differs("reshard_after_forward", "units stay sharded over {own} ranks between forward and backward"),
        more=("parameters", "unsharded_parameters"),
    ),
    Mechanism(
        _differs("reshard_last_block", "the last block stays gathered after forward", True),
        more=("unsharded_parameters",),
    ),
    Mechanism(
        _differs("forward_prefetch", "forward gathers the next unit early", False), more=("unsharded_parameters",)
    ),
    Mechanism(
        _differs("limit_all_gathers", "no rate limiter holds all-gathers back", True), more=("unsharded_parameters",)
    ),
    Mechanism(_has_other_gpu, fewer=("compute_seconds",)),
    Mechanism(_has_more_gpus, more=_COMMUNICATION),
)
"""Named in this order only where their numbers differ; the field alone is no reason."""


def reasons(found: Comparison) -> list[Reason]:
    """Return why two sides differ, the most bytes first; of peaks in different phases only what lasts counts."""
    least = LEAST_SHARE * _peak(found)
    compared = [one for one in found.categories or () if not peak_moves(found) or one.name in LASTING]
    categories = {one.name: int(one.difference) for one in compared if abs(one.difference) >= least}
    least = LEAST_SHARE * max(found.step.a, found.step.b) if found.step else 0.0
    times = (*found.parts, *found.other_times)
    seconds = {one.name: one.difference for one in times if abs(one.difference) >= least}
    named = [
        reason
        for mechanism in MECHANISMS
        for side, x, y, sign in (("A", found.a, found.b, -1), ("B", found.b, found.a, 1))
        if (reason := _reason(mechanism, side, mechanism.text(x, y), categories, seconds, sign)) is not None
    ]
    return sorted(named, key=_weight)


def peak_moves(found: Comparison) -> bool:
    """Whether the peaks are in different phases, so that what is alive there differs."""
    return found.a.peak_phase != found.b.peak_phase


def is_elsewhere(found: Comparison) -> bool:
    """Whether the peaks are in different phases or, where that is known, at different operators."""
    places = (found.a.peak_place, found.b.peak_place)
    return peak_moves(found) or (None not in places and places[0] != places[1])


def _weight(reason: Reason) -> tuple[float, float]:
    return -sum(map(abs, reason.bytes_more.values())), -sum(map(abs, reason.seconds_more.values()))


def _peak(found: Comparison) -> int:
    return max(found.a.peaks.get("allocated", 0), found.b.peaks.get("allocated", 0))


def _reason(
    mechanism: Mechanism, side: str, text: str | None, categories: dict[str, int], seconds: dict[str, float], sign: int
) -> Reason | None:
    """Return the reason, if a number differs as the mechanism says."""
    if text is None:
        return None

    def is_so(name: str, value: float) -> bool:
        return value > 0 if name in mechanism.more else value < 0 if name in mechanism.fewer else False

    bytes_more = {name: sign * value for name, value in categories.items() if is_so(name, sign * value)}
    seconds_more = {name: sign * value for name, value in seconds.items() if is_so(name, sign * value)}
    return Reason(side, text, bytes_more, seconds_more) if bytes_more or seconds_more else None


def unexplained(found: Comparison, named: list[Reason]) -> Iterator[Difference]:
    """Yield the categories of at least a hundredth of the peak that no mechanism names."""
    explained = {name for reason in named for name in reason.bytes_more}
    for one in found.categories or ():
        if abs(one.difference) >= 0.01 * _peak(found) and one.name not in explained:
            yield one
