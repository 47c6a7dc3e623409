"""``python -m fsdp_bench.train.torchrun PARENT ARGUMENTS``: torchrun that ends when its parent does."""

from __future__ import annotations

import os
import sys

from torch.distributed.run import main

from fsdp_bench.train.parent import AGENT, die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.environ[AGENT] = str(os.getpid())  # its workers end when it does, which torchrun alone does not see to
    main(sys.argv[2:])
