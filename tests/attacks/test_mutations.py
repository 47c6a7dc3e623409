"""Mutated input for every verb: sweep files, arguments, config.json, calibrations, catalogues and answers.

Every call runs in this process until work on torch or on results would begin. It must end with an exit code that is
documented, in one line where it is refused, with nothing on the terminal that a terminal obeys, in bounded time and
without a file left. Everything is drawn from the seed, the kind of input and the number of the call.
"""

import itertools
import json
import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple, NoReturn

import click
import msgspec
import pytest

from fsdp_bench.catalog.architectures import is_recorded
from fsdp_bench.catalog.loader import models
from fsdp_bench.cli.main import COMMANDS as NAMES
from fsdp_bench.cli.main import cli, main
from fsdp_bench.plan import recording
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.record import RunPlan
from fsdp_bench.spec.setup import TrainSetup
from tests.attacks import count_and_seed
from tests.attacks.hostile import GOOD, TEXTS, damaged, mutated_toml, typo, varied_toml
from tests.catalog.test_hf_config import GPT2, LLAMA, MISTRAL
from tests.catalog.test_user_file import GPU, MODEL, SERVER
from tests.conftest import run_command
from tests.profiles import draws, validating
from tests.rates.test_calibrated import profile
from tests.report.html.samples import plan_text

COUNT, SEED = count_and_seed(120, 3000)
HERE = Path(__file__).parents[2]
RESULTS = HERE / "results" / "xeon-2-cores" / "max-size-quick"
SURROGATE = "\udcff"
MOST_CHARACTERS = 500
"""The length limit of a message."""
LIMIT_SECONDS = 60.0
"""Processor time after which a call counts as a hang."""

SWEEP_FILE = f"""{(HERE / "sweeps" / "quick.toml").read_text()}
[[exclude]]
strategy = "NO_SHARD"
reason = "for no reason"
"""
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
"""Stands for the shipped frontiers, whose list predicts for seconds."""
SWEEPS = [text for path in sorted((HERE / "sweeps").glob("*.toml")) if "[frontier]" not in (text := path.read_text())]
CATALOG = GPU + SERVER + MODEL


def _calibration() -> str:
    made = profile(1e-6, 1e-4)
    (ranks, *_) = made.ranks
    few = {name: getattr(ranks, name)[:6] for name in ("matmul", "attention", "operator", "copy", "optimizer")}
    small = msgspec.structs.replace(made, ranks=(msgspec.structs.replace(ranks, **few),))
    return msgspec.toml.encode(to_builtins(small)).decode()


CALIBRATION = _calibration()


def _configs() -> list[dict[str, Any]]:
    """Return three published config.json; in ``make validate`` one of each recorded architecture of the catalogue."""
    found: dict[str, dict[str, Any]] = {"llama": LLAMA, "mistral": MISTRAL, "gpt2": GPT2}
    if validating():  # to read the recordings of all takes ten seconds
        found = {entry.family: entry.hf_config() for entry in models() if is_recorded(entry.family)} | found
    return [*found.values()]


def _documents() -> list[dict[str, Any]]:
    """Return answers of three commands."""
    words = (
        "predict --model gpt2 --server p5.48xlarge --batch 1,2",
        "max-size --gpu H100-SXM --strategy zero3 --no-time",
    )
    return [json.loads(plan_text()), *(json.loads(run_command(*each.split(), "--json").stdout) for each in words)]


class Kind(NamedTuple):
    """A kind of file: what is mutated in it, and the commands that read it."""

    percentage: int
    file: str
    sources: Sequence[Any]
    """Texts of TOML, or documents of JSON."""
    words: Sequence[Sequence[str]]
    """A command line is one of each, in this order."""
    keys: Sequence[str] = ()
    """Keys that are inserted into TOML."""


KINDS = {
    "sweep file": Kind(
        34,
        "s.toml",
        [*[SWEEP_FILE] * 3, *[FRONTIER_FILE] * 2, *SWEEPS],
        [
            ["sweep s.toml"],
            [*["--list"] * 9, *(f"--results {name}" for name in ("r", "r[/x]", "r#?", "r\n", "é"))],
            ["", "", "", "--emulate-world 8", "--only api=fsdp1", "--part 1/2", "--gpu-memory 20GiB"],
        ],
        (
            *TrainSetup.__struct_fields__,
            *RunPlan.__struct_fields__,
            *ModelShape.__struct_fields__,
            *("model", "params", "batch", "seq", "accumulate", "memory_limit", "launcher", "device", "dial"),
            *("smallest", "largest", "reason", "grid", "run"),
        ),
    ),
    "config": Kind(
        12,
        "config.json",
        _configs(),
        [
            ["predict --hf-config config.json --world-size 2"],
            ["", "--code huggingface"],
            ["", "--seq 512", "--lora 16", "--checkpointing full"],
            ["", "", "--json"],
        ],
    ),
    "calibration": Kind(
        7,
        "cal.toml",
        [CALIBRATION],
        [
            [*["predict --params 10M --seq 64 --world-size 2 --kernels cpu"] * 4, "report results"],
            ["--calibration cal.toml"],
        ],
        ("seconds", "m", "num_ranks", "launch_seconds", "schema_version", "device", "context_bytes", "group_size"),
    ),
    "catalogue": Kind(
        9,
        "catalog.toml",
        [CATALOG],
        [
            ["servers", "models tiny", "servers basement --json", "predict --model tiny --server basement"],
            ["--catalog catalog.toml"],
        ],
        ("name", "aliases", "memory_gib", "gpus_per_node", "usable_memory_bytes", "gpu", "hidden_size", "num_nics"),
    ),
    "document": Kind(
        90,
        "answer.json",
        _documents(),
        [["report answer.json --html answer.html"] * 2 + ["compare answer.json answer.json"]],
    ),
}

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
FILES = {"s.toml": SWEEP_FILE, "config.json": json.dumps(LLAMA), "cal.toml": CALIBRATION, "catalog.toml": CATALOG}


def mutated_file(rng: random.Random, kind: Kind) -> tuple[list[str], dict[str, str | bytes]]:
    """Return a good command line, and the mutated file that it reads."""
    source, part = rng.choice(kind.sources), rng.random()
    words = " ".join(chosen for group in kind.words if (chosen := rng.choice(group))).split(" ")
    if not isinstance(source, str):
        name = {"_name_or_path": rng.choice(TEXTS)} if "model_type" in source and rng.random() < 0.3 else {}
        return words, {kind.file: damaged(json.dumps({**source, **name}, indent=1).encode(), rng)}
    is_sweep = kind.file == "s.toml"
    text = varied_toml(rng, source) if is_sweep and part < 0.6 else source
    return words, {kind.file: mutated_toml(rng, text, kind.keys) if part > 0.5 or not is_sweep else text}


def mutated_arguments(rng: random.Random) -> tuple[list[str], dict[str, str | bytes]]:
    """Return a mutated command line, and good files."""
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
    return words, FILES


def _word(rng: random.Random) -> str:
    return rng.choice((*TEXTS, SURROGATE)) if rng.random() < 0.65 else rng.choice(GOOD[rng.choice([*GOOD])])


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
    choices = option.type.choices if isinstance(option.type, click.Choice) else GOOD.get(str(option.name), ())
    if choices and rng.random() < 0.6:
        return [name, str(rng.choice([*choices]))]
    return [name, _word(rng) if rng.random() < 0.7 else rng.choice(("1", "2", "x.png", "cal.toml", "catalog.toml"))]


class WorkBeginsError(BaseException):
    """Raised where work would begin: the call is allowed."""


def begin(*_arguments: object, **_options: object) -> NoReturn:
    raise WorkBeginsError


def until_work_begins(words: list[str]) -> int:
    """Run a command line; return 0 where work would begin."""

    def hangs(*_: object) -> NoReturn:
        pytest.fail(f"not done after {LIMIT_SECONDS:.0f} s of processor time")

    signal.signal(signal.SIGPROF, hangs)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
    try:
        main(words)
    except WorkBeginsError:
        return 0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make the folder that calls run in, deep enough for paths that climb; and stand where work begins.

    A model's code is recorded, which takes seconds even where it cannot be, by the first 30 calls of ``make validate``
    that ask for it. In the others that is where work begins.
    """
    work = [
        "cli.dry_run.dry_runs",
        "sweep.calibration.calibrate",
        "sweep.results.store.Store.open",
        "cli.doctor.diagnose",
    ]
    recordings, record = itertools.count(), recording.record

    def record_few(*arguments: Any) -> Any:
        return record(*arguments) if next(recordings) < draws(0, 30) else begin()

    with pytest.MonkeyPatch.context() as patch:
        for name in work:
            patch.setattr(f"fsdp_bench.{name}", begin)
        for module in ("cli.record", "validate.predictable", "plan.recording"):  # those that import it first
            patch.setattr(f"fsdp_bench.{module}.record", record_few)
        yield tmp_path_factory.mktemp("mutations") / "a" / "b" / "c"


def _files(place: Path) -> set[Path]:
    return {path for path in place.parents[2].rglob("*") if path.is_file()}


def perform(words: list[str], files: dict[str, str | bytes], place: Path) -> int:
    """Make one call in a folder of its files, and hold it to its promises; return its exit code."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if any("results" in word for word in words):
        trials = place / "results" / "m" / "quick" / "trials"
        trials.mkdir(parents=True)
        for path in (RESULTS / "machine.json", *sorted((RESULTS / "trials").iterdir())[:2]):
            shutil.copy(path, trials if path.parent.name == "trials" else trials.parent)
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    before = _files(place)
    done = run_command(*words, cwd=place, program=until_work_begins)
    check(words, done)
    asked = {Path(word).name for option, word in pairwise(words) if option in ("--csv", "--html")}
    for path in _files(place) - before:
        assert path.suffix != ".html" or path.read_text().count("<script") == 1
        is_wanted = path.suffix in (".png", ".svg", ".md") or path.name in asked
        assert is_wanted, f"left {path.name}"
        assert done.returncode in (0, 3), f"left {path.name}"
        path.unlink()
    return done.returncode


def check(words: Sequence[str], done: CompletedProcess[str]) -> None:
    """Fail where a call broke a promise."""
    code, output, errors = done.returncode, done.stdout, done.stderr
    assert "Traceback" not in errors + output, errors[-2500:]
    assert code in (0, 2, 3, 130), f"exit code {code}: {errors[:300]}"  # 1 is a crash
    obeyed = {character for character in output + errors if not character.isprintable()} - {"\n"}
    assert not obeyed, f"prints {sorted(obeyed)!r}"
    assert "Warning" not in errors
    if code != 2:
        if "--json" in words and output and not {"--help", "-h"}.intersection(words):
            json.loads(output)
        return
    # What was assumed may be noted before a refusal.
    message = "".join(line for line in errors.splitlines(keepends=True) if not line.startswith("note: "))
    if "--json" in words:
        assert (bool(output), output.isascii(), message) == (True, True, ""), f"no JSON document: {output} {errors}"
        message = json.loads(output)["error"]
    else:
        assert (message[:12], message.count("\n")) == ("fsdp-bench: ", 1), f"not one line: {errors!r}"
    assert 0 < len(message) <= MOST_CHARACTERS, f"a message of {len(message)} characters"


@pytest.mark.parametrize("kind", ["arguments", *KINDS])
@pytest.mark.timeout(COUNT * 6)
def test_mutated_input_ends_in_one_line_and_a_documented_exit_code(kind: str, place: Path) -> None:
    percentage, codes = KINDS[kind].percentage if kind in KINDS else 34, set[int]()
    for index in range(max(COUNT * percentage // 100, 5)):
        rng = random.Random(f"{SEED} {kind} {index}")
        words, files = mutated_file(rng, KINDS[kind]) if kind in KINDS else mutated_arguments(rng)
        print(f"seed {SEED}, {kind} {index}:", " ".join(word[:60] for word in words).encode("unicode_escape").decode())
        codes.add(perform(words, files, place))
    assert kind != "document" or codes == {0, 2}  # the damage is real


@pytest.mark.parametrize(
    ("words", "code", "output", "errors", "found"),
    [
        ("predict", 1, "", "Traceback (most recent call last):\n", "Traceback"),
        ("predict", 1, "", "fsdp-bench: it crashed\n", "exit code 1"),
        ("predict", 0, "a\x1b[2Jb", "", "prints"),
        ("predict", 2, "", "fsdp-bench: two\nlines\n", "not one line"),
        ("predict", 2, "", f"fsdp-bench: {'x' * 4988}\n", "5001 characters"),
        ("predict --json", 2, "", "fsdp-bench: no such thing\n", "no JSON document"),
    ],
)
def test_a_broken_promise_is_found(words: str, code: int, output: str, errors: str, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        check(words.split(), CompletedProcess([], code, output, errors))


@pytest.mark.parametrize("words", ["predict --params 10M --seq 64", "doctor"])
def test_unmutated_commands_are_accepted(words: str, place: Path) -> None:
    perform(words.split(), {}, place)
