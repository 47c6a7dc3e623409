"""``python -m fsdp_bench.train.processes.torchrun_rank TRIAL.json SCRATCH``: one rank of a trial under torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fsdp_bench.train.processes.child import PARENT_PID, die_with_parent


def main() -> None:
    """Run the rank that torchrun names in RANK and LOCAL_RANK."""
    die_with_parent(int(os.environ[PARENT_PID]))  # before torch is imported, which takes seconds

    from fsdp_bench.spec.codec import from_json
    from fsdp_bench.spec.record import TrialSpec
    from fsdp_bench.train.processes.worker import run_rank

    spec = from_json(Path(sys.argv[1]).read_bytes(), TrialSpec)
    rank, local_rank, num_local = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    code = run_rank(spec, rank, local_rank, Path(sys.argv[2]), "torchrun", num_local)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no destructors: they would wait for peers that may be gone


if __name__ == "__main__":
    main()
