"""Try a built wheel in an empty environment: ``python -m tools.wheel dist/fsdp_bench-0.1.0-py3-none-any.whl``.

The environment is in a temporary folder and has the wheel and the dependencies that it declares, nothing else. The
commands run in a folder of their own, so that nothing is read from the source tree. ``make wheel`` builds and tries.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
COMMANDS = {
    "--version": "fsdp-bench",
    "servers": "p5.48xlarge",
    "models": "Llama-3.1-8B",
    "predict --model Llama-3.1-8B --server p5.48xlarge": "fits (predicted)",
    "predict --model Llama-3.1-8B --lora 16 --gpu RTX-4090 --seq 1024": "fits (predicted)",
    "predict --model Qwen2.5-7B --server p5.48xlarge --json": '"fits": true',
    "max-size --server p5.48xlarge --chart sizes.png": "largest model that fits (predicted)",
    "plan --model Llama-3.1-8B --tokens 1T --server p5.48xlarge --nodes 2 --code huggingface --export pytorch": "days",
    "compare '' '--batch 2' --params 1B --gpu H100-SXM": "less memory",
    "report predicted.json --html page.html": "page.html",
    "rehearse --help": "--max-gpu-memory",
    "doctor": "host memory",
}
"""Each command, and text that it has to print. They run in this order; none needs torch."""
DOCUMENT = "predicted.json"
"""The file with the output of ``--json`` above, which ``report`` reads."""


def main(wheel: Path) -> None:
    """Install the wheel and run the commands; exit with a message if one of them fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        python = str(folder / "venv" / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
        subprocess.run([*pip, str(wheel.resolve())], check=True)
        (folder / "work").mkdir()
        for command, expected in COMMANDS.items():
            _try(command, expected, folder)
    print(f"{wheel.name}: {len(COMMANDS)} commands answer in an empty environment")


def _try(command: str, expected: str, folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [folder / "venv" / "bin" / "fsdp-bench", *shlex.split(command)],
        cwd=folder / "work",
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode or expected not in done.stdout:
        sys.exit(f"fsdp-bench {command}: exit code {done.returncode}, without {expected!r}\n{done.stdout}{done.stderr}")
    if command.endswith("--json"):
        (folder / "work" / DOCUMENT).write_text(done.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
