"""Values that nobody means to write, and small random edits: what mutations.py puts into otherwise good input."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from fsdp_bench.spec.record import RunPlan
from fsdp_bench.spec.setup import FIELDS

LONG = "x" * 5100
DIGITS = "9" * 5000
ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m"

TEXTS = (
    *("", " ", "-", "--", "=", "=1+cmd|' /C calc'!A0", "@SUM(A1)", "[/red]x", "[link=file:///etc]x", ":smile:"),
    *(
        "$\\frac{1$",
        "a_$_b$",
        "a/b",
        "../../x",
        "a\nb",
        "a\tb",
        ESCAPES,
        "\u202eabc",
        "\u2028",
        "\x7f",
        "é中文😀",
        "\xa0",
    ),
    *("nan", "inf", "-1", "0", "1e400", "1.5", "7B", "0B", "1000000T", DIGITS, f"{DIGITS}GiB", f"{DIGITS}B", "24GiB"),
    *("0GiB", "-1GiB", "1e3GiB", "25% of card", f"{DIGITS}% of card", "gpus", "all", "none", "true", "a,b", ",", LONG),
    *("trials", "bf16/bf16", "bf16/bf16/fp8", "[" * 3000, "%s%n{}"),
)
"""As words of a command line, names and strings; a command line can also hold bytes that are not UTF-8."""

SURROGATE = "\udcff"

NUMBERS = (
    *("nan", "inf", "-inf", "-1", "0", "1", "2", "3", "-0.0", "0.5", "1e308", "1e400", "5e-324", "128", "4096"),
    *("4611686018427387904", "9223372036854775807", "9223372036854775808", "18446744073709551616", "1_000_000"),
    *(DIGITS, "0x" + "f" * 5000),
)
"""As TOML writes them."""

OTHERS = (
    "true", "false", "[]", "[[]]", "[{}]", "{}", "{a = 1}", "1979-05-27", "07:32:00", "[1, 'a']", "[1, 2, 3]",
    "['FULL_SHARD', 'NO_SHARD']", "[" * 2000 + "]" * 2000, "[nan]", "[" + "1, " * 3000 + "1]",
)  # fmt: skip

_FIELDS = {
    name: ("true", "false") if one.kind is bool else (*one.words, *(["none"] if one.is_optional else []))
    for name, one in FIELDS.items()
    if one.kind is bool or one.words
}
GOOD: dict[str, tuple[str, ...]] = {
    **_FIELDS,
    "strategy": ("FULL_SHARD", "zero2", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
    "precision": ("fp32", "bf16-mixed", "bf16-true", "fp16-mixed", "fp32/bf16/bf16", "bf16"),
    "reshard_after_forward": ("2", "4", "'none'"),
    "family": ("llama", "gpt2"),
    "params": ("10M", "50M", "124M", "1B", "25% of card"),
    "launcher": ("fork", "torchrun"),
    "device": ("cpu", "cuda", "auto"),
    "backend": ("gloo",),
    "attention": ("flash",),
    "dial": ("params", "num_hidden_layers", "micro_batch_size", "sequence_length"),
    "gpu_memory": ("16GiB", "20GiB"),
    "memory_limit": ("200MiB", "2GiB"),
    "min_num_params": ("10M", "1000000"),
    "world_size": ("1", "2", "3", "4", "8", "12", "16", "64"),
    **dict.fromkeys(("shard_size", "gpus_per_node", "nodes"), ("1", "2", "4", "8")),
    **dict.fromkeys(("micro_batch_size", "batch"), ("1", "2", "3", "16")),
    **dict.fromkeys(("sequence_length", "seq"), ("1", "16", "63", "512", "2048")),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate", "num_hidden_layers"), ("1", "2", "3")),
    "max_grad_norm": ("0.5", "1"),
    "vocab_size": ("2", "100", "50257"),
    "hidden_size": ("64", "96", "128"),
    "num_attention_heads": ("1", "2", "4"),
    "intermediate_size": ("1", "100"),
    **dict.fromkeys(("tie_word_embeddings", "emulate"), ("true", "false")),
    "steps": ("1", "5"),
    "warmup_steps": ("2", "3"),
    "communication_steps": ("0", "1"),
    "threads_per_rank": ("1", "2"),
    "seed": ("0", "7"),
}
"""Valid values, so that many calls get beyond parsing."""

GRID_KEYS = tuple(name for name in FIELDS if name in GOOD)
RUN_KEYS = ("launcher", "device", "memory_limit", *(name for name in RunPlan.__struct_fields__ if name in GOOD))


def good_toml(rng: random.Random, key: str) -> str:
    """Return a value, or a list of them, that a key may have."""

    def one() -> str:
        word = rng.choice(GOOD[key])
        return word if re.fullmatch(r"[0-9.]+|true|false", word) else f'"{word}"'

    return one() if rng.random() < 0.7 else f"[{one()}, {one()}]"


def varied_toml(rng: random.Random, text: str) -> str:
    """Return a sweep file with one to four settings that are allowed, each in the place where it belongs or not."""
    lines = text.split("\n")
    for _ in range(rng.randrange(1, 5)):
        key = rng.choice((*GRID_KEYS, *RUN_KEYS))
        own = [number for number, line in enumerate(lines) if line.startswith(f"{key} = ")]
        line = f"{key} = {good_toml(rng, key)}"
        table = "[run]" if key in RUN_KEYS else rng.choice(("[grid]", "[grid]", "[grid]", "[[include]]"))
        if own:
            lines[rng.choice(own)] = line
        elif table in lines:
            lines.insert(lines.index(table) + 1, line)
    return "\n".join(lines)


ALPHABET = "abcXYZ_019-.=[]{}\"'#,: \n\t\x1b\u202e中"


def typo(rng: random.Random, text: str) -> str:
    """Change, drop, double or add a character."""
    if not text:
        return rng.choice(ALPHABET)
    at = rng.randrange(len(text))
    other = rng.choice(ALPHABET)
    return rng.choice(
        (text[:at] + text[at + 1 :], text[:at] + other + text[at + 1 :], text[:at] + other + text[at:], text + text[at])
    )


def toml_text(text: str) -> str:
    """Write a string as TOML does."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def toml_value(rng: random.Random) -> str:
    """Return a value as TOML writes it."""
    return rng.choice(
        (
            lambda: good_toml(rng, rng.choice([*GOOD])),
            lambda: rng.choice(NUMBERS),
            lambda: toml_text(rng.choice(TEXTS)),
            lambda: rng.choice(OTHERS),
            lambda: f"[{toml_text(rng.choice(TEXTS))}, {rng.choice(NUMBERS)}]",
        )
    )()


def json_value(rng: random.Random) -> Any:
    """Return a value as Python reads it from JSON."""
    nested: list[Any] = []
    for _ in range(rng.choice((1, 3, 500))):
        nested = [nested]
    if rng.random() < 0.4:
        return rng.choice((1, 2, 4, 8, 64, 1024, 2.0, "gpt2", "llama", "silu", True, False, None))
    numbers = (-1, 0, 1, 2, 3, 128, 0.5, 1e308, float("nan"), float("inf"), 2**62, 2**63, 2**64, 10**4000)
    return rng.choice((*numbers, *TEXTS, None, True, False, nested, {}, {"a": 1}, [1, "a"]))


def _nudged(rng: random.Random, value: str) -> str:
    """Return a number as TOML writes it, changed by a little or a lot."""
    factor = rng.choice((0, 0.5, 0.9, 1.1, 2, 3, 10, 1000))
    try:
        return str(int(int(value) * factor)) if "." not in value and "e" not in value else repr(float(value) * factor)
    except (ValueError, OverflowError):
        return "1"


def mutated_toml(rng: random.Random, text: str, keys: tuple[str, ...]) -> str:
    """Return a TOML text with one to four edits: of values mostly, of keys, lines and characters."""
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        valued = [number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
        kind = rng.random()
        nudged = [number for number in valued if re.search(r"= [0-9.e+-]+$", lines[number])]
        if kind < 0.2 and nudged:
            at = rng.choice(nudged)
            key, _, value = lines[at].partition(" = ")
            lines[at] = f"{key} = {_nudged(rng, value)}"
        elif kind < 0.45 and valued:
            at = rng.choice(valued)
            lines[at] = f"{lines[at].partition(' = ')[0]} = {toml_value(rng)}"
        elif kind < 0.65:
            lines.insert(at, f"{rng.choice(keys)} = {toml_value(rng)}")
        elif kind < 0.75 and valued:
            at = rng.choice(valued)
            key, _, value = lines[at].partition(" = ")
            lines[at] = f"{typo(rng, key)} = {value}"
        elif kind < 0.83:
            lines[at] = typo(rng, lines[at])
        elif kind < 0.9:
            lines[at : at + 1] = rng.choice(
                ([], [lines[at]] * 2, ["[[include]]", lines[at]], [f"[{rng.choice(keys)}]"])
            )
        elif kind < 0.96:
            lines[at] = f"[[{rng.choice(('grid', 'run', 'include', 'exclude', 'models', 'gpu', 'model', 'x'))}]]"
        else:
            lines = lines[:at] or [""]
    return "\n".join(lines)


def mutated_json(rng: random.Random, document: Any) -> str:
    """Return a document as JSON with one to three of its values replaced, dropped or wrapped."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = [*_places(document)]
        if places:
            holder, key = rng.choice(places)
            kind = rng.random()
            if kind < 0.7:
                holder[key] = json_value(rng)
            elif kind < 0.85:
                del holder[key]
            else:
                holder[key] = [holder[key]]
    text = _dumped(document)
    return typo(rng, text) if rng.random() < 0.1 else text


def _dumped(document: Any) -> str:
    try:
        return json.dumps(document)
    except ValueError:  # an integer of too many digits
        return '{"model_type": ' + DIGITS + "}"


def _places(document: Any) -> Any:
    """Yield every container with each of its keys."""
    if isinstance(document, dict):
        keys: list[Any] = list(document)
    elif isinstance(document, list):
        keys = list(range(len(document)))
    else:
        return
    for key in keys:
        yield document, key
        yield from _places(document[key])
