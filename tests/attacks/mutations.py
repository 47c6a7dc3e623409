"""Mutated input for every verb: sweep files, arguments, config.json, calibrations, catalogues and results.

Every call runs in this process until work on torch or on results would begin. It must end with an exit code that is
documented, in one line where it is refused, with nothing on the terminal that a terminal obeys, in bounded time and
without a file left. Everything is drawn from the seed, the kind of input and the number of the call.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import click
import msgspec

from fsdp_bench.catalog.architectures import is_recorded
from fsdp_bench.catalog.loader import models
from fsdp_bench.cli.main import COMMANDS as NAMES
from fsdp_bench.cli.main import TRACEBACK, cli, main
from fsdp_bench.plan import recording
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.record import RunPlan
from fsdp_bench.spec.recording.recorded import RecordedCode
from fsdp_bench.spec.setup import TrainSetup
from tests.attacks.hostile import GOOD, SURROGATE, TEXTS, mutated_json, mutated_toml, typo, varied_toml
from tests.catalog.test_hf_config import GPT2, LLAMA, MISTRAL
from tests.catalog.test_user_file import GPU, MODEL, SERVER
from tests.conftest import TINY_MODEL
from tests.rates.test_calibrated import profile

HERE = Path(__file__).parents[2]
SWEEPS = [path for path in sorted((HERE / "sweeps").glob("*.toml")) if "[frontier]" not in path.read_text()]
"""Without those whose list predicts for seconds; FRONTIER_FILE stands for them."""
RESULTS = HERE / "results" / "xeon-2-cores" / "max-size-quick"

CODES = (0, 2, 3, 130)
"""Exit codes of calls that do no work; 1 is a crash."""
MOST_CHARACTERS = 500
"""The length limit of a message."""
LIMIT_SECONDS = 60.0
"""Processor time after which a call counts as a hang."""


class WorkBeginsError(BaseException):
    """Raised where work would begin: the call is allowed."""


class HangsError(BaseException):
    """The time limit of a call."""


@dataclass
class Call:
    """One command line, and the files that it names, which lie in the folder that it runs in."""

    words: list[str]
    files: dict[str, str] = field(default_factory=dict)


def begin(*_arguments: object, **_options: object) -> NoReturn:
    """Stand where work begins."""
    raise WorkBeginsError


WORK = (
    "fsdp_bench.sweep.dry_run.dry_runs",
    "fsdp_bench.sweep.calibration.calibrate",
    "fsdp_bench.sweep.results.store.Store.open",
    "fsdp_bench.cli.doctor.diagnose",
)


SWEEP_FILE = f"""
[run]
name = "mine"
device = "cpu"
steps = 1
warmup_steps = 2
timeout_seconds = 60.0
memory_limit = "2GiB"
communication_steps = 0
steps_without_communication = 0
[grid]
model = "tiny"
strategy = ["FULL_SHARD", "NO_SHARD"]
world_size = [1, 2]
sequence_length = 16
learning_rate = 0.0001
max_grad_norm = 1.0
seed = 0
[[include]]
strategy = "HYBRID_SHARD"
world_size = 4
shard_size = 2
[[exclude]]
strategy = "NO_SHARD"
reason = "for no reason"
{TINY_MODEL}"""

FRONTIER_FILE = """
[run]
device = "cpu"
memory_limit = "200MiB"
[frontier]
dial = "params"
smallest = "10M"
largest = "40M"
[grid]
strategy = ["FULL_SHARD", "NO_SHARD"]
world_size = 2
sequence_length = 64
"""

KEYS = (
    *TrainSetup.__struct_fields__,
    *RunPlan.__struct_fields__,
    *ModelShape.__struct_fields__,
    *("model", "params", "batch", "seq", "accumulate", "memory_limit", "launcher", "device", "dial", "smallest"),
    *("largest", "reason", "grid", "run"),
)


def sweep_file(rng: random.Random) -> Call:
    """Return a sweep of a mutated file."""
    texts = [SWEEP_FILE, FRONTIER_FILE, *(path.read_text() for path in SWEEPS)]
    text = texts[min(int(rng.expovariate(0.5)), len(texts) - 1)]
    kind = rng.random()
    if kind < 0.6:
        text = varied_toml(rng, text)
    if kind > 0.5:
        text = mutated_toml(rng, text, KEYS)
    more = rng.choice(
        ([], [], [], ["--emulate-world", "8"], ["--only", "api=fsdp1"], ["--part", "1/2"], ["--gpu-memory", "20GiB"])
    )
    listed = ["--list"] if rng.random() < 0.7 else ["--results", rng.choice(("r", "r[/x]", "r#?", "r\n", "é"))]
    return Call(["sweep", "s.toml", *listed, *more], {"s.toml": text})


COMMANDS = (
    "predict --model gpt2 --world-size 2",
    "predict --model Llama-2-7b --server p4d.24xlarge --strategy FULL_SHARD,NO_SHARD --api all",
    "predict --params 124M --gpu RTX-4090 --seq 512 --batch 2 --json",
    "predict --params 1B --nodes 2 --gpus-per-node 8 --strategy HYBRID_SHARD --shard-size 8 --checkpointing full",
    "predict --hf-config config.json --server g5.48xlarge --precision bf16-mixed --gpu-memory 20GiB",
    "predict --params 124M --wrap size --min-num-params 10M --max-grad-norm 1.0 --accumulate 2 --no-sync",
    "predict --params 124M --kernels cpu --calibration cal.toml --seq 64",
    "max-size --gpu RTX-4090 --strategy FULL_SHARD --checkpointing full --world-size 2 --no-time",
    "max-size --server g5.48xlarge --strategy FULL_SHARD --checkpointing full --gpu-memory 20GiB --no-time --json",
    "max-size --gpu RTX-4090 --params 124M --dial micro_batch_size --strategy NO_SHARD --checkpointing full --no-time",
    "dry-run --params 124M --world-size 8 --json",
    "dry-run --module here:build --transformer-block here:Block --seq 128",
    "sweep s.toml --list",
    "sweep s.toml --results r --machine m --only strategy=FULL_SHARD --part 1/2 --retry crashed",
    "sweep s.toml --list --emulate-world 8",
    "report results",
    "report results --json",
    "report results --communication",
    "report results --calibration cal.toml",
    "chart nothing --out here",
    "validate --against results --calibration cal.toml --json",
    "calibrate --ranks 1,2 --out c.toml",
    "servers p4d.24xlarge --json",
    "servers --catalog catalog.toml",
    "models gpt2 --catalog catalog.toml",
    "models --json",
    "doctor",
)


def _configs() -> dict[str, list[dict[str, Any]]]:
    """Return every config.json of the catalogue whose architecture is recorded, by model_type, and three published."""
    found: dict[str, list[dict[str, Any]]] = {"llama": [LLAMA], "mistral": [MISTRAL], "gpt2": [GPT2]}
    for entry in models():
        if is_recorded(entry.family):
            found.setdefault(entry.family, []).append(entry.hf_config())
    return found


CONFIGS = _configs()


def arguments(rng: random.Random) -> Call:
    """Return a mutated command line on good files."""
    words = rng.choice(COMMANDS).split(" ")
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(1, len(words) + 1)
        kind = rng.random()
        if kind < 0.25:
            words[at : at + 1] = [_word(rng)]
        elif kind < 0.7:
            words += _option(rng, words[0])
        elif kind < 0.8:
            words[at : at + 1] = []
        elif kind < 0.9 and at < len(words):
            words[at] = typo(rng, words[at])
        elif at < len(words):
            words[at:at] = [words[at], words[rng.randrange(1, len(words))]]
    if rng.random() < 0.05:
        words[0] = _word(rng)
    files = {"s.toml": SWEEP_FILE, "config.json": json.dumps(LLAMA), "cal.toml": CALIBRATION, "catalog.toml": CATALOG}
    return Call(words, files)


def _word(rng: random.Random) -> str:
    if rng.random() < 0.35:
        return rng.choice(GOOD[rng.choice([*GOOD])])
    return SURROGATE if rng.random() < 0.02 else rng.choice(TEXTS)


def _option(rng: random.Random, verb: str) -> list[str]:
    """Return an option of a verb with a value: one that is allowed where there is a choice, or anything."""
    command = cli.get_command(click.Context(cli), verb) if verb in NAMES else None
    options = [option for option in command.params if isinstance(option, click.Option)] if command else []
    if not options:
        return [f"--{_word(rng)}"]
    option = rng.choice(options)
    name = rng.choice([*option.opts, *option.secondary_opts])
    if option.is_flag or option.count:
        return [name]
    if isinstance(option.type, click.Choice) and rng.random() < 0.5:
        return [name, str(rng.choice(list(option.type.choices)))]
    good = GOOD.get(str(option.name))
    if good is not None and rng.random() < 0.7:
        return [name, rng.choice(good)]
    return [name, _word(rng) if rng.random() < 0.7 else rng.choice(("1", "2", "x.png", "cal.toml", "catalog.toml"))]


def config(rng: random.Random) -> Call:
    """Return a prediction for a mutated config.json of Hugging Face, of any recorded architecture."""
    name, model_type = rng.choice(TEXTS), rng.choice([*CONFIGS])
    published = rng.choice(CONFIGS[model_type])
    text = mutated_json(rng, {**published, **({"_name_or_path": name} if rng.random() < 0.3 else {})})
    json_too = ["--json"] if rng.random() < 0.3 else []
    more = rng.choice(([], ["--seq", "512"], ["--lora", "16"], ["--checkpointing", "full"]))
    code = ["--code", "huggingface"] if rng.random() < 0.6 else []
    words = ["predict", "--hf-config", "config.json", "--world-size", "2", *code, *more, *json_too]
    return Call(words, {"config.json": text})


def calibration(rng: random.Random) -> Call:
    """Return a prediction with a mutated calibration."""
    keys = ("seconds", "m", "num_ranks", "launch_seconds", "schema_version", "device", "context_bytes", "group_size")
    text = mutated_toml(rng, CALIBRATION, keys)
    words = ["predict", "--params", "10M", "--seq", "64", "--world-size", "2", "--kernels", "cpu"]
    if rng.random() < 0.2:
        words = ["report", "results"]
    return Call([*words, "--calibration", "cal.toml"], {"cal.toml": text})


def catalogue(rng: random.Random) -> Call:
    """Return a look into, and a prediction with, a mutated catalogue."""
    keys = ("name", "aliases", "memory_gib", "gpus_per_node", "usable_memory_bytes", "gpu", "hidden_size", "num_nics")
    text = mutated_toml(rng, CATALOG, keys)
    words = rng.choice(
        (
            ["servers"],
            ["models", "tiny"],
            ["servers", "basement", "--json"],
            ["predict", "--model", "tiny", "--server", "basement"],
        )
    )
    return Call([*words, "--catalog", "catalog.toml"], {"catalog.toml": text})


def results(rng: random.Random) -> Call:
    """Return a reading of results of which the machine's or the frontier's description is mutated."""
    name = rng.choice(("machine.json", "frontier.json", "trials/0.json"))
    source = min((RESULTS / "trials").iterdir()) if name == "trials/0.json" else RESULTS / name
    document = json.loads(source.read_text())
    if name == "frontier.json":
        document["cells"] = document["cells"][:3]
    text = mutated_json(rng, document)
    words = rng.choice((["report", "results"], ["report", "results", "--json"], ["validate", "--against", "results"]))
    if name == "frontier.json" or rng.random() < 0.1:
        words = ["chart", "results", "--out", "pictures"]
    return Call(words, {f"results/m/quick/{name}": text})


KINDS: dict[str, tuple[Callable[[random.Random], Call], int]] = {
    "sweep file": (sweep_file, 34),
    "arguments": (arguments, 34),
    "config": (config, 12),
    "calibration": (calibration, 7),
    "catalogue": (catalogue, 9),
    "results": (results, 4),
}
"""The kinds of input to mutate, with their percentages."""


def _calibration_text() -> str:
    made = profile(1e-6, 1e-4)
    (ranks, *_) = made.ranks
    few = {name: getattr(ranks, name)[:6] for name in ("matmul", "attention", "operator", "copy", "optimizer")}
    small = msgspec.structs.replace(made, ranks=(msgspec.structs.replace(ranks, **few),))
    return msgspec.toml.encode(to_builtins(small)).decode()


CALIBRATION = _calibration_text()
CATALOG = GPU + SERVER + MODEL


@contextlib.contextmanager
def workplace(most_recordings: int) -> Iterator[Path]:
    """Make the folder that calls run in, deep enough for paths that climb; and stand where work begins.

    A model's code is recorded, which takes seconds even where it cannot be, for the first ``most_recordings`` calls
    that ask for it. In the others that is where work begins.
    """
    with tempfile.TemporaryDirectory(prefix="mutations-") as root, contextlib.ExitStack() as stack:
        for name in NAMES:
            importlib.import_module(f"fsdp_bench.cli.{name.replace('-', '_')}")  # or a verb would keep a stand-in
        for name in WORK:
            _stand_in(name, begin, stack)
        recordings = itertools.count()

        def record(*arguments: Any) -> RecordedCode:
            return recording_of(*arguments) if next(recordings) < most_recordings else begin()

        recording_of = recording.record
        _stand_in("fsdp_bench.plan.recording.record", record, stack)
        stack.enter_context(mock.patch.dict(os.environ, {TRACEBACK: "1", "COLUMNS": "80"}))
        place = Path(root, "a", "b", "c")
        place.mkdir(parents=True)
        yield place


def _stand_in(name: str, other: Callable[..., object], stack: contextlib.ExitStack) -> None:
    """Put another function in place of one in every module that imported it, or of a class's method."""
    owner, _, function = name.rpartition(".")
    if owner.rpartition(".")[2].istitle():
        stack.enter_context(mock.patch(name, other))
        return
    work = getattr(importlib.import_module(owner), function)
    for module in [found for key, found in sys.modules.items() if key.startswith("fsdp_bench")]:
        for attribute in [key for key, value in vars(module).items() if value is work]:
            stack.enter_context(mock.patch.object(module, attribute, other))


def perform(kind: str, index: int, seed: int, place: Path) -> str | None:
    """Make one call; return which promise it broke, or None."""
    call = KINDS[kind][0](random.Random(f"{seed} {kind} {index}"))
    _fill(place, call)
    before = _files(place)
    ended = run_call(call.words, place)
    left = _files(place) - before
    what = broken_promise(call.words, *ended) or _left(left, ended[0], call.words)
    for path in left:
        path.unlink()
    words = " ".join(word[:60] for word in call.words).encode("unicode_escape").decode()
    return f"{kind} {index}: {what[:3000]}\n    {words}" if what else None


def _fill(place: Path, call: Call) -> None:
    shutil.rmtree(place)
    place.mkdir()
    sweep = place / "results" / "m" / "quick"
    if any("results" in word for word in call.words):
        (sweep / "trials").mkdir(parents=True)
        shutil.copy(RESULTS / "machine.json", sweep)
        for path in sorted((RESULTS / "trials").iterdir())[:2]:
            shutil.copy(path, sweep / "trials")
    for name, text in call.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(text.encode("utf-8", "surrogatepass"))


def _files(place: Path) -> set[Path]:
    return {path for path in place.parents[2].rglob("*") if path.is_file()}


def _left(left: set[Path], code: int, words: Sequence[str]) -> str | None:
    """Say which files should not be there: all of a call that was refused, and what is no picture or page."""
    asked = {Path(word).name for option, word in pairwise(words) if option in ("--csv", "--html")}
    unwanted = [
        path.name
        for path in left
        if code not in (0, 3) or (path.suffix not in (".png", ".svg", ".md") and path.name not in asked)
    ]
    return f"left {', '.join(unwanted)}" if unwanted else None


def run_call(words: list[str], place: Path) -> tuple[int, str, str]:
    """Run a command line in this process; return its exit code, output and errors. 0 where work would begin."""
    output, errors = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGPROF, _hangs)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
    try:
        with chdir(place), redirect_stdout(output), redirect_stderr(errors), warnings.catch_warnings():
            warnings.simplefilter("default")
            main(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else -1
    except WorkBeginsError:
        code = 0
    except HangsError:
        code = -2
    except BaseException as error:
        return -3, output.getvalue(), f"{errors.getvalue()}\nTraceback: {error!r}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code, output.getvalue(), errors.getvalue()


def _hangs(*_: object) -> None:
    raise HangsError


def broken_promise(words: list[str], code: int, output: str, errors: str) -> str | None:
    """Return which promise a call broke, or None."""
    if code == -2:
        return f"hangs: not done after {LIMIT_SECONDS:.0f} s of processor time"
    if "Traceback" in errors or "Traceback" in output:
        return f"traceback: {errors[-2500:]}"
    if code not in CODES:
        return f"exit code {code}: {errors[:300]}"
    obeyed = {character for character in output + errors if not character.isprintable()} - {"\n"}
    if obeyed:
        return f"prints {sorted(obeyed)!r}"
    if "Warning" in errors:
        return f"warning: {errors[:300]}"
    if code == 2:
        return _refused(words, output, errors)
    if "--json" in words and output and "--help" not in words and "-h" not in words:
        json.loads(output)
    return None


def _refused(words: list[str], output: str, errors: str) -> str | None:
    """Say how the message of a refusal is not one line; what was assumed may be noted before it."""
    errors = "".join(line for line in errors.splitlines(keepends=True) if not line.startswith("note: "))
    if "--json" in words:
        message = json.loads(output).get("error", "") if output else ""
        if errors or not message or not output.isascii():
            return f"no JSON document of the error: {output[:300]} {errors[:300]}"
    else:
        message = errors.removesuffix("\n")
        if not message.startswith("fsdp-bench: ") or "\n" in message:
            return f"not one line: {errors[:600]!r}"
    return f"a message of {len(message)} characters" if len(message) > MOST_CHARACTERS else None
