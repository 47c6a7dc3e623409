"""``python -m tools.validate.observer``: whether ``rehearse --time`` leaves a script's memory as it is.

Drawn scripts are rehearsed with and without ``--time``. Their peaks by step and phase, allocated and reserved, must be
equal to the byte, and so must the outcome.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

SCRIPT = Path(__file__).with_name("drawn_script.py")


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """What drawn_script.py trains."""

    code: str
    wrapper: str
    compile: str
    """``no``, ``blocks``, ``whole`` (torch.compile of the wrapped model), ``method`` (of the model) or ``loss``."""
    checkpointing: str
    layers: int
    width: int
    lengths: list[int]
    """Sequence lengths of the steps, in turn."""
    breaks: bool
    """Whether every second block of own code has a graph break."""
    dropout: float
    accumulation: int
    clips: bool
    fused: bool
    use_orig_params: bool


def draw_scripts(seed: int) -> Iterator[Drawn]:
    """Yield scripts without end: two of three are compiled, one of two has more blocks than Dynamo recompiles."""
    source = random.Random(seed)
    while True:
        compiled = source.choice(("no", "no", "blocks", "whole", "whole", "method", "loss"))
        yield Drawn(
            code=source.choice(("own", "own", "transformers")),
            wrapper=source.choice(("fsdp1", "fsdp2", "ddp")),
            compile=compiled,
            checkpointing=source.choice(("none", "non-reentrant", "reentrant")),
            layers=source.choice((source.randint(1, 6), source.randint(9, 12))),
            width=64 * source.choice((2, 4, 6, 12)),
            lengths=source.choice(([512], [512], [768], [512, 640, 768])),
            breaks=source.random() < 0.3,
            dropout=source.choice((0.0, 0.0, 0.1)),
            accumulation=source.choice((1, 1, 2)),
            clips=source.random() < 0.5,
            fused=source.random() < 0.5,
            # Dynamo takes FSDP1 with original parameters alone.
            use_orig_params=compiled != "no" or source.random() < 0.5,
        )


def rehearsed(drawn: Drawn, torchrun: Path, *options: str) -> dict[str, Any]:
    """Return outcome, failure, peaks and spans of a rehearsal of rank 0."""
    command = [sys.executable, "-m", "fsdp_bench", "rehearse", "--json", *options]
    command += ["--steps", "4", "--server", "p5.48xlarge", "--", str(torchrun), str(SCRIPT)]
    with tempfile.TemporaryDirectory() as folder:
        words = msgspec.json.encode(drawn).decode()
        ran = subprocess.run([*command, words], capture_output=True, text=True, check=False, cwd=folder)
    if not ran.stdout.startswith("{"):
        raise click.ClickException(ran.stderr.strip())
    document = json.loads(ran.stdout)
    failure = document.get("failure") or {}
    kept = {name: document.get(name) for name in ("outcome", "memory", "spans", "why_no_time", "error")}
    return kept | {"failure": failure.get("message"), "unknown": (document.get("time") or {}).get("unknown")}


def difference(plain: dict[str, Any], noted: dict[str, Any]) -> str:
    """Return what differs first; nothing where all is equal."""
    for one, other in zip(plain["spans"] or (), noted["spans"] or (), strict=False):
        if one != other:
            return f"without --time {one}, with it {other}"
    names = [name for name in ("outcome", "error", "failure", "spans", "memory") if plain[name] != noted[name]]
    return ", ".join(f"{name}: {plain[name]} without --time, {noted[name]} with it" for name in names)


@click.command("observer", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--scripts", default=60, show_default=True, type=click.IntRange(1), help="Scripts drawn at random.")
@click.option("--seed", default=1, show_default=True, type=int, help="Seed of the random draw.")
@click.option(
    "--torchrun",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="torchrun of the Python whose torch, a CUDA build, is tried.",
)
def main(scripts: int, seed: int, torchrun: Path) -> None:
    """Rehearse drawn scripts with and without --time; exit with 1 if the memory of any differs."""
    num_equal = 0
    for number, drawn in zip(range(1, scripts + 1), draw_scripts(seed), strict=False):
        plain, noted = rehearsed(drawn, torchrun), rehearsed(drawn, torchrun, "--time")
        differs = difference(plain, noted)
        num_equal += not differs
        what = msgspec.json.encode(drawn).decode()
        ended = ": ".join(filter(None, (plain["outcome"], plain["failure"])))[:200]
        print(f"{number} {'DIFFERS' if differs else 'equal'} {what} {ended} {differs}".strip(), flush=True)
    print(f"{num_equal} of {scripts} equal")
    sys.exit(num_equal < scripts)


if __name__ == "__main__":
    main()
