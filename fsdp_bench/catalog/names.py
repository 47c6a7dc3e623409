"""Finds an entry of the catalogue by what people call it, and says which entry was meant where there is none.

A suggestion never has other numbers than the name that was written: Llama-3.1-9B is not a slip for Llama-3.1-8B, nor
A40 for A10.
"""

import re
from collections.abc import Iterable
from typing import TypeVar

from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.catalog.user_file import NamedEntry, names_of, own_names
from fsdp_bench.spec.errors import SpecError, nearest, shown
from fsdp_bench.spec.hardware import Gpu, Server

T = TypeVar("T", bound=NamedEntry)

_LISTED = "`fsdp-bench {}` lists what is there"

OTHER_GPUS = f"{_LISTED.format('servers')}, and --catalog FILE adds a GPU"
"""The advice for a GPU that is not in the catalogue."""

_OTHER_MODELS = (
    f"{_LISTED.format('models')}, --hf-config FILE takes a config.json, and `fsdp-bench record` records your own code"
)

_TUNING = {"base", "pt", "instruct", "it", "chat", "sft", "dpo", "think", "thinking", "hf"}
"""Words of a published model's name that say how its weights were trained or stored, not what it is built of."""

_MAKERS = {"nvidia", "tesla", "geforce", "amd", "gpu"}
_MEMORY = re.compile(r"(?<![0-9])([0-9]+)[ _-]?gi?b?\b")
_FORM_FACTOR = re.compile(r"\b(sxm|hbm)[0-9]\b")


def find_server(name: str, entries: tuple[Server, ...]) -> Server:
    """Return the server of this name or alias, however it is spelt. Raises SpecError, naming the nearest."""
    if (found := _named(name, entries)) is not None:
        return found
    known = [each for entry in entries for each in names_of(entry)]
    close = _suggested("server", name, name, entries) or nearest(name, known) or f"; {_LISTED.format('servers')}"
    raise SpecError(f"server: {shown(name)} is not in the catalogue{close}")


def find_model(name: str, entries: tuple[ModelEntry, ...]) -> ModelEntry:
    """Return the model with this name or alias, or the one of which it names other weights: Llama-3.1-8B-Instruct.

    Raises SpecError if there is none, naming a misspelt one, and what else names a model.
    """
    if (found := _named(name, entries) or _named(_without_tuning(name), entries)) is not None:
        return found
    copy_of = _without_tuning(name.rpartition("/")[2])
    close = _suggested("model", name, copy_of, entries) or misspelt(copy_of, entries)
    raise SpecError(f"model: {shown(name)} is not in the catalogue{close}; {_OTHER_MODELS}")


def is_other_weights(name: str, entry: ModelEntry) -> bool:
    """Whether a name that found an entry is that of other weights with the same architecture."""
    return _squashed(name) not in map(_squashed, own_names(entry))


def find_gpu(name: str, entries: tuple[Gpu, ...]) -> Gpu:
    """Return the GPU of exactly this name, or the only one that has its words. Raises SpecError, naming others."""
    folded = " ".join(name.lower().split())
    exact = [entry for entry in entries if folded and folded in _spellings(entry)]
    parts = _name_parts(folded) - _MAKERS
    # of several with exactly this name the last is a user's own
    meant = exact[-1:] or [entry for entry in entries if parts and parts <= _all_name_parts(entry)]
    if len(meant) > 1:
        *others, last = (entry.name for entry in meant)
        raise SpecError(f"gpu: {shown(name)} could be {', '.join(others)} or {last}; name one")
    if meant:
        return meant[0]
    parts = _name_parts(name)
    if alike := [entry.name for entry in entries if parts & _chip(entry)]:
        close = nearest(name, alike, cutoff=0.8) or f"; of that kind there are {', '.join(alike)}"
        raise SpecError(f"gpu: {shown(name)} is not in the catalogue{close}")
    raise SpecError(f"gpu: {shown(name)} is not in the catalogue{misspelt(name, entries)}; {OTHER_GPUS}")


def misspelt(name: str, entries: Iterable[NamedEntry]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the entry from which a name differs by slips in its words, or nothing."""
    written = _words(name)
    for entry in entries:
        for known in map(_words, own_names(entry)):
            if len(known) == len(written) and all(map(_is_slip, written, known)):
                return f" (did you mean {entry.name!r}?)"
    return ""


def _named(name: str, entries: tuple[T, ...]) -> T | None:
    """Return the entry with this name or alias; of several the last: a user's alias wins over a built-in one."""
    folded = name.strip().lower()
    for entry in reversed(entries):
        if folded in names_of(entry):
            return entry
    spelt = [entry for entry in entries if any(_is_spelt_alike(folded, known) for known in names_of(entry))]
    return spelt[0] if folded and len(spelt) == 1 else None


def _suggested(kind: str, written: str, meant: str, entries: Iterable[NamedEntry]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the only entry with all words, or nothing. Raises SpecError for several."""
    words = _words(meant)
    found = [entry.name for entry in entries if words and any(_has(_words(known), words) for known in own_names(entry))]
    if len(found) > 1:
        raise SpecError(f"{kind}: {shown(written)} is not in the catalogue alone; one of {', '.join(found)}")
    return f" (did you mean {found[0]!r}?)" if found else ""


def _is_spelt_alike(name: str, known: str) -> bool:
    """Whether two names differ in nothing but separators: ``llama 3.1 8b``, but not ``llama-3-18b``."""
    numbers, others = ([word for word in _words(each) if not word.isalpha()] for each in (name, known))
    return _squashed(name) == _squashed(known) and numbers == others


def _has(words: list[str], part: list[str]) -> bool:
    return any(words[begin : begin + len(part)] == part for begin in range(len(words) - len(part) + 1))


def _words(name: str) -> list[str]:
    """Split a name into its words and its numbers: ``Qwen2.5-7B`` is qwen, 2.5, 7 and b."""
    return re.findall(r"[0-9]+(?:\.[0-9]+)?|[^\W0-9_]+", name.lower())


def _is_slip(written: str, meant: str) -> bool:
    """Whether two words are the same but for one letter that is missing, added or another, or two that are swapped."""
    if written == meant:
        return True
    if not (written.isalpha() and meant.isalpha()) or min(len(written), len(meant)) < 3:
        return False
    while written and meant and written[0] == meant[0]:
        written, meant = written[1:], meant[1:]
    while written and meant and written[-1] == meant[-1]:
        written, meant = written[:-1], meant[:-1]
    return max(len(written), len(meant)) == 1 or (len(written) == 2 and written == meant[::-1])


def _without_tuning(name: str) -> str:
    """Return a model's name without the words that say how its weights were trained."""
    owner, slash, own = name.strip().rpartition("/")
    return owner + slash + "-".join(word for word in re.split(r"[-_ ]+", own) if word.lower() not in _TUNING)


def _squashed(name: str) -> str:
    """Return a name without blanks, hyphens and other separators."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _spellings(entry: Gpu) -> set[str]:
    return {*names_of(entry), *map(_squashed, names_of(entry)), *map(str.lower, entry.product_names)}


def _name_parts(name: str) -> set[str]:
    """Split a GPU's name into words: ``A100-SXM4 80 GB`` is a100, sxm and 80gb."""
    text = _FORM_FACTOR.sub(r"\1", _MEMORY.sub(r" \1gb ", name.lower()))
    return set(re.findall(r"[a-z0-9]+", text))


def _all_name_parts(entry: Gpu) -> set[str]:
    """Return the words of all names of a GPU, in the catalogue and in the driver, and its memory size."""
    own = f"{entry.name} {entry.memory_gib:g}GB"
    products = [name for name in entry.product_names if not _MEMORY.search(name.lower())]  # GH200's 480GB is the CPU's
    return set().union(*map(_name_parts, (own, *products)))


def _chip(entry: Gpu) -> set[str]:
    """Return the words that name the chip: letters before digits, ``h100`` and not ``80gb``."""
    return {part for part in _name_parts(entry.name) if re.fullmatch(r"[a-z]+[0-9]+[a-z]*", part)}
