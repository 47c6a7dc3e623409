"""A benchmark model under fsdp1 or fully_shard, as a sweep's trials train it: ``benchmark_model.py SPEC.json``.

The specification has the fields of ``ModelShape`` and ``TrainSetup``.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

from fsdp_bench.spec.codec import from_builtins
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.train.measuring.meters import MemoryMeter
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.models.loss import head_loss, loss_function
from fsdp_bench.train.models.transformer import BLOCKS, build, initialize
from fsdp_bench.train.step import prepared, train_step
from fsdp_bench.train.wrapping.wrap import fsdp

with open(sys.argv[1]) as file:
    given = json.load(file)
shape, setup = from_builtins(given["model"], ModelShape), from_builtins(given["setup"], TrainSetup)
dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = fsdp(
    build(shape, DTYPES[setup.precision.store], head_loss(setup.loss)),
    setup=setup,
    TransformerBlock=BLOCKS[shape.family],
    device=device,
    initialize=lambda parameter, name: initialize(parameter, name, setup.seed),
)
training = prepared(model, loss_function(setup.loss), setup, device, MemoryMeter())
for _ in range(8):
    tokens = [
        torch.randint(0, shape.vocab_size, (setup.micro_batch_size, setup.sequence_length + 1))
        for _ in range(setup.gradient_accumulation_steps)
    ]
    train_step(training, tokens)
    torch.cuda.synchronize()
