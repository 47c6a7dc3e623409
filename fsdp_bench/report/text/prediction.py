"""One prediction as text: the answer first, then the peak's place and its breakdown."""

from collections.abc import Sequence

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.remedies import Remedy, smaller_bases
from fsdp_bench.plan.setup_text import spaced
from fsdp_bench.plan.speed import SECONDS_OF_A_PUBLISHED_RETRY
from fsdp_bench.report.text.common import UNKNOWN, assumed_lines, communicators_fact, fact
from fsdp_bench.report.text.conditions import conditions
from fsdp_bench.report.text.speed import step_text, time_facts
from fsdp_bench.simulate.step import STEPS
from fsdp_bench.spec.units import format_gib


def verdict(prediction: Prediction) -> str:
    """Return whether a setup fits, by how much, and why not if it does not."""
    is_known = prediction.fits is not None
    return ("in eager it " if is_known and prediction.for_eager else "") + _verdict(prediction)


def _verdict(prediction: Prediction) -> str:
    reading = prediction.allocator
    if prediction.question.kernels != "cuda":
        return "unknown whether it fits (predicted): kernels of a CPU; --kernels cuda for a GPU"
    if prediction.gpu_bytes is None:
        why = "no GPU is named; --server NAME or --gpu NAME"
        if prediction.gpu is not None:
            why = f"nobody documents how much of a {prediction.gpu.name} a process can use"
        return f"unknown whether it fits (predicted): {why}"
    if not prediction.knows_attention:
        lacks = (
            "torch has no FlashAttention for this GPU; peaks below assume it, because the model's code was not recorded"
            " without it"
        )
        if prediction.verdict is None:
            return f"unknown whether it fits (predicted): {lacks}"
        least = format_gib(prediction.least_bytes)
        return f"does not fit (predicted): {least} or more of {_available(prediction)} with any attention; {lacks}"
    reserved = f"reserved {format_gib(reading.peak_reserved_bytes)} of {format_gib(prediction.gpu_bytes)} usable"
    if prediction.verdict is Verdict.FITS:
        kept = prediction.required_headroom.num_bytes
        required = f"; {format_gib(kept)} of that kept free" if kept else ""
        return f"fits (predicted): {reserved}, {format_gib(prediction.headroom_bytes or 0)} left{required}"
    if prediction.verdict is None:
        return f"unknown whether it fits (predicted): the GPU's {reserved}; host memory of a node is not known"
    if reading.out_of_memory is not None:
        return f"does not fit (predicted): {_shortage(prediction)}"
    if prediction.verdict is Verdict.RUNS_WITH_RETRIES:
        retries = retries_text(reading.num_alloc_retries, reading.num_retries_later)
        return f"does not fit, but runs with {retries} (predicted): {_needed(prediction)}{_would_be_left(prediction)}"
    host, node = format_gib(prediction.host.peak_bytes), format_gib(prediction.host_memory_bytes or 0)
    return f"does not fit (predicted): {host} of host memory of {node} a node has; the GPU: {reserved}"


def fits_text(verdict: Verdict | None, lacks_host_memory: bool) -> str:
    """Return whether a setup fits, in one to three words."""
    if lacks_host_memory:
        return "NO: host memory"
    texts = {Verdict.FITS: "yes", Verdict.RUNS_WITH_RETRIES: "NO: retries", Verdict.DOES_NOT_FIT: "NO"}
    return UNKNOWN if verdict is None else texts[verdict]


def retries_text(count: int, later: int | None) -> str:
    """Return the number of allocation retries in the first steps as text, and of each later step; None: unknown."""
    text = "1 allocation retry" if count == 1 else f"{count} allocation retries"
    if not count:
        return text
    afterwards = f"{UNKNOWN} later" if later is None else f"up to {later} in each later one" if later else "none later"
    return f"{text} in the first {STEPS} steps, {afterwards}"


def place_text(phase: str, block: int | None) -> str:
    """Return a phase, with the block if there is one."""
    return phase if block is None else f"{phase}, block {block}"


def _available(prediction: Prediction) -> str:
    kept, usable = prediction.required_headroom.num_bytes, f"{format_gib(prediction.gpu_bytes or 0)} usable"
    return f"{usable} less {format_gib(kept)} kept free" if kept else usable


def _needed(prediction: Prediction) -> str:
    memory, needed = prediction.memory, format_gib(prediction.needed_bytes)
    peak, available = format_gib(memory.peak_allocated_bytes), _available(prediction)
    if memory.peak_allocated_bytes <= (prediction.available_bytes or 0):
        return f"{available} would hold the peak of {peak}, but the allocator's segments need {needed}"
    mostly = prediction.largest_category.replace("_", " ")
    return f"{needed} reserved, {peak} of them allocated, of {available}, mostly {mostly}"


def _would_be_left(prediction: Prediction) -> str:
    left = prediction.headroom_bytes or 0
    return f"; {format_gib(left)} would be left" if left > 0 else ""


def _shortage(prediction: Prediction) -> str:
    full = prediction.allocator.out_of_memory
    assert full is not None
    where = place_text(full.phase, full.block if full.block >= 0 else None)
    return f"{_needed(prediction)}{_would_be_left(prediction)}; it runs out in {where} at {full.label}"


_BAR = 30
"""Characters of the longest bar."""


def report(prediction: Prediction, remedies: Sequence[Remedy] = ()) -> str:
    """Return one prediction as about twenty lines; the first line is the answer."""
    lines = [verdict(prediction), *assumed_lines(prediction.question.assumptions)]
    lines += [f"  {remedy_line(remedy)}" for remedy in remedies]
    lines += [*(f"  {words}" for words in smaller_bases(prediction)), ""]
    lines += [
        *(fact(*one) for one in conditions([prediction.document(with_time=False, with_communication=False)])),
        "",
        *_peak(prediction),
        "",
    ]
    lines.append(fact("allocator", _allocator(prediction)))
    lines += [fact(*one) for one in communicators_fact(prediction.communicators)]
    lines += [fact("host memory", _host(prediction)), fact("communication", _sent(prediction))]
    lines += [
        *time_facts(prediction.speed, prediction.question.profile, _mode(prediction)),
        *_not_predicted(prediction),
        fact("reserved", "holds if Python keeps up with the GPU; small models may reserve less"),
    ]
    lines += [fact("note", note) for note in prediction.notes]
    return "\n".join(lines)


def _mode(prediction: Prediction) -> str:
    is_compiled = prediction.setup.compile and not prediction.for_eager
    kind = "compiled blocks" if is_compiled else "eager"
    if prediction.verdict is Verdict.RUNS_WITH_RETRIES and prediction.allocator.num_retries_later != 0:
        seconds = prediction.speed.retries_seconds
        own = "" if seconds is None else f"about {step_text(seconds)} as on one H100, without what other ranks wait; "
        published = f"about {SECONDS_OF_A_PUBLISHED_RETRY:g} s each in the one published run"
        return f"{kind}, without the time of the retries: {own}{published}"
    return f"{kind}, if it did fit" if prediction.verdict is Verdict.DOES_NOT_FIT else kind


def _not_predicted(prediction: Prediction) -> list[str]:
    known = prediction.communicators is not None and prediction.communicators.num_bytes is not None
    missing = [] if known else ["NCCL buffers"]
    if prediction.context_bytes is None:
        missing.insert(0, "CUDA context")
    return [fact("not predicted", f"{' and '.join(missing)} (memory beyond reserved)")] if missing else []


def remedy_line(remedy: Remedy) -> str:
    """Return the predicted result of a change to the command line."""
    found, switch = remedy.prediction, f"{remedy.switch}:"
    if found.fits:
        reserved, tokens = format_gib(found.allocator.peak_reserved_bytes), found.speed.tokens_per_second_per_gpu
        speed = "" if tokens is None else f", {tokens:,.0f} tokens/s per GPU"
        return f"{switch} fits, reserved {reserved}{speed} (predicted)"
    open_question = "does not fit yet" if found.fits is False else "GPU memory suffices, host memory is unknown"
    return f"{switch} reserved {format_gib(found.needed_bytes)} (predicted); {open_question}"


def _peak(prediction: Prediction) -> list[str]:
    memory, top = prediction.memory, prediction.memory.peak_allocated_bytes
    place = place_text(memory.peak_phase, memory.peak_block)
    lines = [fact("peak allocated", f"{format_gib(top)} (predicted) in {place}, at {memory.peak_operator}"), ""]
    lines += ["predicted peak by phase", *(_row(phase, size, top, "") for phase, size in memory.phases.items()), ""]
    parts = sorted(memory.breakdown_bytes.items(), key=lambda item: -item[1])
    shown = [(spaced(name), size) for name, size in parts if size >= 0.001 * top]
    rest = top - sum(size for _, size in shown)
    shown += [("others", rest)] if rest >= 0.0005 * top else []
    return [*lines, "predicted breakdown at the peak", *(_row(*one, top, f"{one[1] / top:.1%}") for one in shown)]


def _row(name: str, size: int, top: int, percent: str) -> str:
    bar = "#" * round(_BAR * size / top)
    return f"  {name:<22}{format_gib(size):>11} {percent:>7}  {bar}".rstrip()


def _allocator(prediction: Prediction) -> str:
    reading = prediction.allocator
    if prediction.question.kernels != "cuda":
        return "none on a CPU"
    if reading.out_of_memory is not None:
        reserved = format_gib(reading.peak_reserved_bytes)
        asked = format_gib(reading.out_of_memory.num_bytes)
        return f"out of memory with {reserved} reserved (predicted), asked for {asked} more"
    return (
        f"reserved {format_gib(reading.peak_reserved_bytes)}, active {format_gib(reading.peak_active_bytes)}, "
        f"{retries_text(reading.num_alloc_retries, reading.num_retries_later)} (predicted)"
    )


def _host(prediction: Prediction) -> str:
    if prediction.peak_host_bytes_per_node is None:
        return "unknown: how many ranks share a node's memory; --server NAME"
    if prediction.peak_host_bytes_per_node == 0:
        return "no tensors there"
    host, has = prediction.host, prediction.host_memory_bytes
    of = f" of {format_gib(has)}" if has else ""
    parts = {
        "parameters, pinned": host.pinned_parameters_bytes,
        "gradients, pinned": host.pinned_gradients_bytes,
        "activations, pinned": host.pinned_activations_bytes,
        "optimizer state": host.optimizer_state_bytes,
        "temporary": host.temporary_bytes,
        "while the model is built": host.load_bytes,
    }
    named = ", ".join(f"{name} {format_gib(size)}" for name, size in parts.items() if size)
    return (
        f"{format_gib(prediction.peak_host_bytes_per_node)}{of} on a node (predicted), without the processes: {named}"
    )


def _sent(prediction: Prediction) -> str:
    kinds = sorted(prediction.traffic, key=lambda one: -one.message_bytes)
    sent = [
        f"{one.kind.replace('_', '-')} {format_gib(one.message_bytes)} in {one.calls} call{'s' * (one.calls != 1)}"
        f" among {one.group_size}"
        for one in kinds
    ]
    return "; ".join(sent) + " a step (predicted)" if sent else "none: one rank"
