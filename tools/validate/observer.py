"""``python -m tools.validate.observer``: whether ``rehearse --time`` leaves a script's memory as it is.

Drawn scripts are rehearsed with and without ``--time``. How they end, and their peaks by step and phase, allocated and
reserved, must be equal to the byte.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tools.validate.drawn_script import draw

SCRIPT = Path(__file__).with_name("drawn_script.py")


BATCH = 6
"""The number of scripts after which results are printed."""


def rehearsed(torchrun: str, seed: int, numbers: Sequence[int], *options: str) -> list[dict[str, Any]]:
    """Return how each script ended, and its peaks as rank 0."""
    command = [sys.executable, "-m", "fsdp_bench", "rehearse", "--json", *options, "--steps", "4"]
    command += ["--server", "p5.48xlarge", "--each", f"number={','.join(map(str, numbers))}"]
    command += ["--", torchrun, str(SCRIPT), str(seed), "{number}"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    document = json.loads(ran.stdout)
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
            what = draw(str(seed), str(number))
            print(number, "differs" if differs else "equal", what, one["outcome"], *differs, flush=True)
    print(f"{num_equal} of {scripts} equal; {num_failed} failed")
    sys.exit(num_equal < scripts)


if __name__ == "__main__":
    main()
