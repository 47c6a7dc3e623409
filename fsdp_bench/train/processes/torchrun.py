"""``python -m fsdp_bench.train.processes.torchrun PARENT SCRATCH ARGUMENTS``: torchrun that ends when its parent does.

Its rendezvous, and that of the ranks, is a file in the scratch folder: a TCPStore would listen on every interface of
the machine, whatever address it is given, without a password.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed.run import main

from fsdp_bench.train.processes.child import PARENT_PID, die_with_parent
from fsdp_bench.train.processes.rendezvous import plain_path

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.environ[PARENT_PID] = str(os.getpid())  # its ranks end when it does; torchrun alone would let them run
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]
    main([*options, f"--rdzv-endpoint={plain_path(Path(sys.argv[2]))}/agent", *sys.argv[3:]])
