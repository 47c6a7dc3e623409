"""Values that nobody means to write, and small random edits of otherwise good input."""

import json
import random
import re
from collections.abc import Sequence

from fsdp_bench.spec.record import RunPlan
from fsdp_bench.spec.setup import FIELDS

DIGITS = "9" * 5000

TEXTS = (
    "", " ", "-", "--", "=", "=1+cmd|' /C calc'!A0", "@SUM(A1)", "[/red]x", "[link=file:///etc]x", ":smile:",
    "$\\frac{1$", "a_$_b$", "a/b", "../../x", "a\nb", "a\tb", "\x1b]0;title\x07\x1b[2J\x9b31m", "\u202eabc", "\u2028",
    "\x7f", "é中文😀", "\xa0", "nan", "inf", "-1", "0", "1e400", "1.5", "7B", "0B", "1000000T", DIGITS, f"{DIGITS}GiB",
    f"{DIGITS}B", "24GiB", "0GiB", "-1GiB", "1e3GiB", "25% of card", f"{DIGITS}% of card", "gpus", "all", "none",
    "true", "a,b", ",", "x" * 5100, "trials", "bf16/bf16", "bf16/bf16/fp8", "[" * 3000, "%s%n{}",
)  # fmt: skip
"""As words of a command line, names and strings; a command line can also hold bytes that are not UTF-8."""

NUMBERS = (
    "nan", "inf", "-inf", "-1", "0", "1", "2", "3", "-0.0", "0.5", "1e308", "1e400", "5e-324", "128", "4096",
    "4611686018427387904", "9223372036854775807", "9223372036854775808", "18446744073709551616", "1_000_000", DIGITS,
    "0x" + "f" * 5000,
)  # fmt: skip
"""As TOML writes them."""

OTHERS = (
    "true", "false", "[]", "[[]]", "[{}]", "{}", "{a = 1}", "1979-05-27", "07:32:00", "[1, 'a']", "[1, 2, 3]",
    "['FULL_SHARD', 'NO_SHARD']", "[" * 2000 + "]" * 2000, "[nan]", "[" + "1, " * 3000 + "1]",
)  # fmt: skip

_GOOD = """
strategy: FULL_SHARD, zero2, NO_SHARD, HYBRID_SHARD, _HYBRID_SHARD_ZERO2
precision: fp32, bf16-mixed, bf16-true, fp16-mixed, fp32/bf16/bf16, bf16
family: llama, gpt2
params: 10M, 50M, 124M, 1B, 25% of card
launcher: fork, torchrun
device: cpu, cuda, auto
backend: gloo
attention: flash
dial: params, num_hidden_layers, micro_batch_size, sequence_length
gpu_memory: 16GiB, 20GiB
memory_limit: 200MiB, 2GiB
min_num_params: 10M, 1000000
sequence_length, seq: 1, 16, 63, 512, 2048
vocab_size: 2, 100, 50257
hidden_size: 64, 96, 128
intermediate_size: 1, 100
emulate, tie_word_embeddings: true, false
warmup_steps: 2, 3
communication_steps: 0, 1
gpus_per_node, nodes, batch, accumulate, num_hidden_layers, num_attention_heads, steps, threads_per_rank: 1, 2, 4, 8
"""
_OF_KINDS = {bool: ("true", "false"), int: ("1", "2", "3", "4", "8", "16", "64"), float: ("0.5", "1")}
GOOD: dict[str, Sequence[str]] = {
    name: (*one.words, *_OF_KINDS.get(one.kind, ()), *(["none"] if one.is_optional else []))
    for name, one in FIELDS.items()
    if one.words or one.kind in _OF_KINDS
} | {
    name: values.split(", ")
    for names, _, values in (line.partition(": ") for line in _GOOD.strip().splitlines())
    for name in names.split(", ")
}
"""Valid values, so that many calls get beyond parsing."""

GRID_KEYS = tuple(name for name in FIELDS if name in GOOD)
RUN_KEYS = ("launcher", "device", "memory_limit", *(name for name in RunPlan.__struct_fields__ if name in GOOD))


def good_toml(rng: random.Random, key: str) -> str:
    """Return a value, or a list of two, that a key may have."""
    words = (word if re.fullmatch(r"[0-9.]+|true|false", word) else f'"{word}"' for word in rng.choices(GOOD[key], k=2))
    return next(words) if rng.random() < 0.7 else f"[{', '.join(words)}]"


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


def typo(rng: random.Random, text: str) -> str:
    """Change, drop, double or add a character."""
    other = rng.choice("abcXYZ_019-.=[]{}\"'#,: \n\t\x1b\u202e中")
    at = rng.randrange(len(text) or 1)
    doubled = text + text[at : at + 1]
    return rng.choice(
        (text[:at] + text[at + 1 :], text[:at] + other + text[at + 1 :], text[:at] + other + text[at:], doubled)
    )


def toml_value(rng: random.Random) -> str:
    """Return a value as TOML writes it."""
    text, number = json.dumps(rng.choice(TEXTS)).replace("\x7f", "\\u007f"), rng.choice(NUMBERS)
    good = good_toml(rng, rng.choice([*GOOD]))
    return rng.choice((good, number, text, rng.choice(OTHERS), f"[{text}, {number}]"))


def nudged(rng: random.Random, value: str) -> str:
    """Return a number as TOML writes it, changed by a little or a lot; 1 for what is no number."""
    factor = rng.choice((0, 0.5, 0.9, 1.1, 2, 3, 10, 1000))
    try:
        return str(int(int(value) * factor)) if value.isdecimal() else repr(float(value) * factor)
    except (ValueError, OverflowError):
        return "1"


def mutated_toml(rng: random.Random, text: str, keys: Sequence[str]) -> str:
    """Return a TOML text with one to four edits: of values mostly, of keys, lines and characters."""
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, kind = rng.randrange(len(lines)), rng.random()
        valued = [number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
        if kind < 0.55 and valued:
            at = rng.choice(valued)
            key, _, value = lines[at].partition(" = ")
            edits = (key, nudged(rng, value)), (key, toml_value(rng)), (key, toml_value(rng)), (typo(rng, key), value)
            lines[at] = " = ".join(rng.choice(edits))
        elif kind < 0.75:
            lines.insert(at, f"{rng.choice(keys)} = {toml_value(rng)}")
        elif kind < 0.83:
            lines[at] = typo(rng, lines[at])
        elif kind < 0.96:
            table = f"[[{rng.choice(('grid', 'run', 'include', 'exclude', 'models', 'gpu', 'model', 'x'))}]]"
            line = lines[at]
            lines[at : at + 1] = rng.choice(
                ([], [line, line], ["[[include]]", line], [f"[{rng.choice(keys)}]"], [table])
            )
        else:
            lines = lines[:at] or [""]
    return "\n".join(lines)


_NINES = [b"9" * digits for digits in (10, 15, 18, 19, 25, 310, 4299, 4301, 20_000)]
_NINES += [b"-" + nines for nines in _NINES] + [nines + b".0" for nines in _NINES[3:6]]
_OPENED = [opened * depth for opened in (b"[", b'{"a":') for depth in (1, 50, 900, 1100, 100_000)]
_NESTED = [*_OPENED, *(one + b"0" + (b"]" if one[:1] == b"[" else b"}") * one.count(one[:1]) for one in _OPENED)]
_BYTES = [bytes([number]) for number in range(256)]
_NUMBER = rb"(?<=[:\s\[])-?\d+(?:\.\d+)?(?:e-?\d+)?(?=[,\s\]}])"
_VALUE = rb'(?<=: )(?:"[^"]*"|-?\d[^,\s]*|null|true|false)'
_TEXT = rb'(?<=: ")[^"]+(?=")'
_DAMAGES: list[tuple[bytes, int, list[bytes]]] = [
    (rb"(?s).", 8, _BYTES),
    (rb"\d", 4, _BYTES[48:58]),  # it stays JSON: a number that is another one
    (rb"(?m)^.*\n", 1, [b""]),
    (rb"(?s).{64}", 1, [bytes(64)]),  # a page that never reached the disk
    (_NUMBER, 1, b'NaN Infinity -Infinity "nan" "inf" "-inf" 1e999 -1e999 null'.split()),
    (_NUMBER, 1, [*b"0 -1 0.0 -0.0 1e308 -1e308 5e-324 1".split(), *_NINES]),
    (_VALUE, 1, [*b'null true "" "x" [] {} 0 1.5 [[]]'.split(), b'{"a": 1}']),
    (_VALUE, 1, _NESTED),
    (_TEXT, 1, [*rb"nan \ud800 \u0000 \n\n %s{}$_\\ ../x".split(), b"\xff\xfe", "é漢".encode(), b"x" * 5000]),
    (rb"(?s)\A.*\Z", 1, [b"", b"null", b"[]", b"{}", b"0", b'"x"', b"{" * 100_000, b"[" * 100_000, b"\xff" * 100]),
    (rb"\A", 1, [b"\xef\xbb\xbf"]),
    (rb"\Z", 1, [b"x"]),
]
"""What is replaced, in up to how many places, and by what."""


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return a file that is truncated, or in which something is replaced."""
    if draw.random() < 0.1:
        return data[: draw.randrange(len(data))]
    pattern, most, words = draw.choice(_DAMAGES)
    for _ in range(draw.randint(1, most)):
        found = draw.choice(list(re.finditer(pattern, data)))
        data = data[: found.start()] + draw.choice(words) + data[found.end() :]
    return data
