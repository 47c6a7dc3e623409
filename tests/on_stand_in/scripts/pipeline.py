"""Two pipeline stages of equal blocks with FSDP inside, by torch.distributed.pipelining: GPipe or 1F1B."""

import os
import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

STAGES, WIDTH, TOKENS = 2, 8192, 4096

schedule_of = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[sys.argv[1]]
micro_batches = int(sys.argv[2])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (STAGES, int(os.environ["WORLD_SIZE"]) // STAGES), mesh_dim_names=("pp", "dp"))
stage = mesh["pp"].get_local_rank()
blocks = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
blocks.to("cuda", torch.bfloat16)
fully_shard(blocks, mesh=mesh["dp"], reshard_after_forward=False)
pipeline = PipelineStage(blocks, stage, STAGES, torch.device("cuda"), group=mesh["pp"].get_group())
schedule = schedule_of(pipeline, micro_batches, lambda y, target: (y - target).sum())
optimizer = torch.optim.SGD(blocks.parameters(), 1e-3)
for _ in range(4):
    x = torch.ones(micro_batches, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    schedule.step(*([x] if stage == 0 else []), **({"target": x.detach()} if stage == STAGES - 1 else {}))
    optimizer.step()
    optimizer.zero_grad()
