"""The command ``fsdp-bench``. An interrupt ends it in one line from here on, before the rest is imported."""

from typing import NoReturn

from fsdp_bench.cli.common import interrupts


def main() -> NoReturn:
    """Run the command line and exit."""
    interrupts.exit_at_once()
    from fsdp_bench.cli.main import main as run

    try:
        run()
    finally:
        interrupts.ignore()  # what is left is the interpreter's own end


if __name__ == "__main__":
    main()
