"""The conditions of answers as names and values, a line each on terminal and pages, below the chart of pictures."""

from collections.abc import Collection, Iterable, Sequence

from fsdp_bench.plan.document import AnswerDocument, HardwareDocument, ModelDocument
from fsdp_bench.plan.setup_text import setup_line
from fsdp_bench.rates.nccl_buffers import Bounds
from fsdp_bench.report.text.common import UNKNOWN, bounds_text
from fsdp_bench.report.text.common import Fact as Fact
from fsdp_bench.spec.units import format_count, format_gib


def conditions(
    answers: Sequence[AnswerDocument],
    differing: Collection[str] = (),
    sought: str | None = None,
    models: Iterable[str] | None = None,
) -> list[Fact]:
    """Return the conditions of answers, each once, without the fields in which their setups differ.

    ``sought`` is the field whose best value is searched for, if any; ``models`` are texts in place of the answers'
    models.
    """
    first = answers[0]
    facts = [
        *(("model", text) for text in (map(model_text, (one.model for one in answers)) if models is None else models)),
        ("setup", setup_line(first.values, differing, sought)),
        *hardware_facts(answers, "up to " if sought == "world_size" and first.server.name else ""),
        ("modelled" if first.source == "predicted" else "ran", _ran(first, is_alone=len(answers) == 1)),
        *headroom_facts((one.required_headroom_bytes, one.required_headroom_source) for one in answers),
    ]
    return list(dict.fromkeys(facts))


def model_text(model: ModelDocument) -> str:
    """Return a model with what is known of it."""
    if model.description is not None:
        return f"{model.name}: {model.description}"
    size = "" if model.num_parameters is None else f", {format_count(model.num_parameters)} parameters"
    whose = "" if model.code == "benchmark" else f", {model.code}"
    return f"{model.name}{size}{whose}{'' if model.lora is None else f' with {model.lora.title}'}"


def hardware_text(server: HardwareDocument, world_size: object) -> str:
    """Return the hardware as text: ``2 x p5.48xlarge (16 x H100-SXM)``, GPUs without a server, or ranks on a CPU."""
    limit = "" if server.stated_power_watts is None else f" at {server.stated_power_watts:g} W"
    if server.name is None:
        return f"{world_size} x {server.gpu or 'CPU'}{limit}"
    each, nodes = server.gpus_per_node, server.num_nodes
    gpus = nodes * each if nodes and each else world_size
    return f"{f'{nodes} x ' if nodes else ''}{server.name} ({gpus} x {server.gpu}{limit})"


def hardware_facts(answers: Sequence[AnswerDocument], prefix: str = "") -> list[Fact]:
    """Return each kind of hardware, and how much of its GPU's memory can be used, with the source.

    ``prefix``: words before the largest of a kind, where its number is searched.
    """
    kinds: dict[HardwareDocument, list[AnswerDocument]] = {}
    for one in answers:
        server = one.server
        kind = HardwareDocument(name=server.name, gpu=server.gpu, gpus_per_node=server.gpus_per_node)
        kinds.setdefault(kind, []).append(one)
    facts = []
    for kind, alike in kinds.items():
        server = alike[0].server
        sizes = {one.server.num_nodes or _number(one.setup.get("world_size")): one for one in alike}
        texts = [hardware_text(one.server, one.setup.get("world_size")) for _, one in sorted(sizes.items())]
        name = texts[-1] if prefix or len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
        facts.append(("hardware", f"{prefix}{name}" if kind.gpu else "none named"))
        if server.gpu_power_source is not None:
            facts.append(("power limit", f"{server.gpu_power_watts:g} W of each GPU: {server.gpu_power_source.title}"))
        source, usable = server.gpu_memory_source, server.gpu_memory_bytes
        if usable is not None:
            read = f": {source.title} ({source.date})" if source else ""
            facts.append(("usable memory", f"{format_gib(usable)} on {server.gpu}{read}"))
        elif kind.gpu:
            facts.append(("usable memory", f"{UNKNOWN} of {kind.gpu}"))
    return facts


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _ran(one: AnswerDocument, is_alone: bool) -> str:
    rank = one.memory.peak_rank if is_alone and one.memory else None
    which = f"rank {rank}, which needs the most" if rank else "rank 0"
    segments = ", expandable segments" if one.expandable_segments else ""
    return f"torch {one.torch or UNKNOWN}, {(one.kernels or UNKNOWN).upper()} kernels, {which}{segments}"


def headroom_facts(sizes: Iterable[tuple[int | None, str | None]]) -> list[Fact]:
    """Return the required headroom on each GPU where it is known, and the option that changes it; one per source."""
    found: dict[str | None, list[int]] = {}
    for size, source in sizes:
        if size is not None:
            found.setdefault(source, []).append(size)
    return [
        ("headroom", f"{bounds_text(Bounds(min(own), max(own)))} of each GPU kept free, {source or UNKNOWN};"
                     " --headroom SIZE changes it")
        for source, own in found.items()
    ]  # fmt: skip


def note_facts(answers: Iterable[AnswerDocument]) -> list[Fact]:
    """Return the notes of answers, each once."""
    return [("note", note) for note in dict.fromkeys(note for one in answers for note in one.notes or ())]


def assumed_facts(answers: Iterable[AnswerDocument]) -> list[Fact]:
    """Return what answers assume as transformers' Trainer does it, each once."""
    found = dict.fromkeys(each for one in answers for each in one.assumptions)
    return [("as the Trainer", "; ".join(found))] if found else []


def sentences(facts: Iterable[Fact]) -> tuple[str, ...]:
    """Return facts as the conditions of a picture."""
    return tuple(f"{name}: {value}" for name, value in facts)
