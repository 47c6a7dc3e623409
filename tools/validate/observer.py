"""``python -m tools.validate.observer``: whether ``rehearse --time`` leaves a script's memory as it is.

Drawn scripts are rehearsed with and without ``--time``. How they end, and their peaks by step and phase, allocated and
reserved, must be equal to the byte.
"""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

SCRIPT = Path(__file__).parent.parent / "drawn_script.py"
BATCH = 6
"""The number of scripts after which results are printed."""


def draw(seed: int, number: int) -> dict[str, Any]:
    """Draw what is trained: five of seven are compiled, half have more blocks than Dynamo compiles one function anew.

    ``compile`` is ``no``, ``blocks``, ``whole`` (torch.compile of the wrapped model), ``method`` (Module.compile), or
    ``loss``, a function that runs the model. ``lengths`` are sequence lengths of the steps in turn. With ``breaks``
    every second block of own code has a graph break. Dynamo takes FSDP1 with ``use_orig_params`` alone.
    """
    source = random.Random(f"{seed} {number}")
    compiled = source.choice(("no", "no", "blocks", "whole", "whole", "method", "loss"))
    return {
        "code": source.choice(("own", "own", "transformers")),
        "wrapper": source.choice(("fsdp1", "fsdp2", "ddp")),
        "compile": compiled,
        "checkpointing": source.choice(("none", "non-reentrant", "reentrant")),
        "layers": source.choice((source.randint(1, 6), source.randint(9, 12))),
        "width": 64 * source.choice((2, 4, 6, 12)),
        "lengths": source.choice(([512], [512], [768], [512, 640, 768])),
        "breaks": source.random() < 0.3,
        "dropout": source.choice((0.0, 0.0, 0.1)),
        "accumulation": source.choice((1, 1, 2)),
        "use_orig_params": compiled != "no" or source.random() < 0.5,
    }


def rehearsed(torchrun: str, seed: int, numbers: Sequence[int], *options: str) -> list[dict[str, Any]]:
    """Return how each script ended, and its peaks as rank 0."""
    command = [sys.executable, "-m", "fsdp_bench", "rehearse", "--json", *options, "--steps", "4"]
    drawn = ",".join(json.dumps(draw(seed, number)).replace(",", ";") for number in numbers)
    command += ["--server", "p5.48xlarge", "--each", f"drawn={drawn}", "--", torchrun, str(SCRIPT), "{drawn}"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    document = json.loads(ran.stdout)
    if len(numbers) == 1 and "outcome" in document:
        return [_peaks(None, document)]
    if "rehearsals" not in document:
        raise click.ClickException(ran.stdout)
    return [_peaks(one["reason"], *one["ranks"]) for one in document["rehearsals"]]


def _peaks(reason: str | None, rank: dict[str, Any] | None = None, *_others: Any) -> dict[str, Any]:
    found = rank or {"outcome": reason}
    failure = (found.get("failure") or {}).get("message")
    return {"outcome": found["outcome"], "failure": failure, "spans": found.get("spans"), "memory": found.get("memory")}


@click.command("observer", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--scripts", default=60, show_default=True, type=click.IntRange(1), help="Scripts drawn at random.")
@click.option("--seed", default=1, show_default=True, type=int, help="Seed of the random draw.")
@click.argument("torchrun", type=click.Path(exists=True))
def main(scripts: int, seed: int, torchrun: str) -> None:
    """Rehearse drawn scripts with TORCHRUN, whose torch is tried, with and without --time; exit 1 if any differs."""
    num_equal = num_failed = 0
    for numbers in (range(scripts + 1)[first : first + BATCH] for first in range(1, scripts + 1, BATCH)):
        plain, noted = (rehearsed(torchrun, seed, numbers, *options) for options in ((), ("--time",)))
        for number, one, other in zip(numbers, plain, noted, strict=True):
            differs = [f"{name}: {one[name]} or with it {other[name]}" for name in one if one[name] != other[name]]
            num_equal, num_failed = num_equal + (not differs), num_failed + (one["outcome"] != "stopped")
            print(number, "differs" if differs else "equal", draw(seed, number), one["outcome"], *differs, flush=True)
    print(f"{num_equal} of {scripts} equal; {num_failed} failed")
    sys.exit(num_equal < scripts)


if __name__ == "__main__":
    main()
