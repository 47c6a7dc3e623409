"""``python -m fsdp_bench.train.calibrating.calibrator PARENT OUT [host]``: one rank that measures this machine.

PARENT is the process ID of its parent. RANK, WORLD_SIZE, LOCAL_RANK, DEVICE, THREADS and RENDEZVOUS come from the
environment. Rank 0 prints a line of JSON before each part, and writes the measurements to OUT.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from fsdp_bench.spec.calibration_profile import (
    CALIBRATION_MODEL,
    CALIBRATION_SEQUENCE_LENGTH,
    HOST_MODEL,
    HOST_SEQUENCE_LENGTH,
    CollectiveTime,
    RankMeasurements,
)
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.files import write_atomically
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import Api, OptimizerKind, TrainSetup
from fsdp_bench.train.calibrating.operator_times import (
    ATTENTION_HEADS,
    HEAD_DIMS,
    LENGTHS,
    Stopwatch,
    attention_times,
    copy_times,
    matmul_times,
    operator_times,
    optimizer_times,
)
from fsdp_bench.train.measuring.fake_group import replace_group_by_fake
from fsdp_bench.train.measuring.meters import MemoryMeter, Nvml
from fsdp_bench.train.models.loss import loss_function
from fsdp_bench.train.models.transformer import BLOCKS, attention_kernel, build, initialize
from fsdp_bench.train.processes.backends import versions
from fsdp_bench.train.processes.child import die_with_parent
from fsdp_bench.train.processes.rank import meet
from fsdp_bench.train.step import prepared, train_step
from fsdp_bench.train.wrapping.wrap import fsdp

MESSAGES = {"cpu": (2**10, 2**16, 2**20, 2**23, 2**25), "cuda": (2**10, 2**16, 2**20, 2**23, 2**26, 2**29)}
"""Message sizes in bytes."""
SIDE = {"cpu": 512, "cuda": 2048}
"""The side of a matrix product that runs between two collectives: some milliseconds on a CPU."""
ROUNDS, ROUNDS_LONGER = 10, 4
"""The number of rounds, and how many times longer each is than for an operator. More are needed because the time is a
difference. The median counts, as for the steps of a trial."""


_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 has a new name for it; 2.11 has only the old one."""


def collective_times(watch: Stopwatch) -> Iterator[CollectiveTime]:
    """Time each kind in groups of every size that divides the world, with consecutive and with distant ranks."""
    world, device = dist.get_world_size(), watch.device
    longer = Stopwatch(device, ROUNDS_LONGER * watch.round_seconds, ROUNDS, statistics.median)
    side = torch.ones(SIDE[device.type], SIDE[device.type], device=device)
    for size in (size for size in range(2, world + 1) if world % size == 0):
        for neighbours in (True, False) if size < world else (True,):
            group = _own_group(size, neighbours)
            alone = longer.seconds(partial(torch.mm, side, side))
            for num_bytes in MESSAGES[device.type]:
                for kind, call in _collectives(num_bytes, size, group, device):
                    added = longer.seconds(partial(_behind_an_operator, side, call), together=True) - alone
                    seconds = added if added > 0 else longer.seconds(call, together=True)
                    yield CollectiveTime(
                        kind=kind, group_size=size, neighbours=neighbours, message_bytes=num_bytes, seconds=seconds
                    )


def _behind_an_operator(side: torch.Tensor, collective: Callable[[], object]) -> None:
    """Run a collective after an operator, as in training: ranks start it at different times."""
    torch.mm(side, side)
    collective()


def _own_group(size: int, neighbours: bool) -> dist.ProcessGroup:
    """Make all groups of a size; return the group of this rank."""
    count = dist.get_world_size() // size
    rows = [
        [index * size + place if neighbours else place * count + index for place in range(size)]
        for index in range(count)
    ]
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(rows)[0]
    return group


def _collectives(
    num_bytes: int, size: int, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each kind and a call of it. Calls allocate their output, as FSDP does: new pages cost time on a CPU."""
    whole = torch.ones(max(num_bytes // 4 // size, 1) * size, device=device)
    part = torch.ones(whole.numel() // size, device=device)
    yield "all_gather", lambda: _ALL_GATHER(torch.empty_like(whole), part, group=group)
    yield "reduce_scatter", lambda: _REDUCE_SCATTER(torch.empty_like(part), whole, group=group)
    yield "all_reduce", lambda: dist.all_reduce(whole, group=group)


ROUND_SECONDS = {"cpu": 0.008, "cuda": 0.005}
"""The duration of one round of repetitions. Everything is timed in four rounds."""

HOST_WATCH = Stopwatch(torch.device("cpu"), 0.02, 20, min, time.thread_time)
"""This thread's time on a core counts for the host alone, in the fastest of many short rounds, whatever else runs."""

PARTS: dict[str, Callable[[Stopwatch], Iterator[Any]]] = {
    "matmul": matmul_times,
    "attention": attention_times,
    "operator": operator_times,
    "copy": copy_times,
    "optimizer": optimizer_times,
    "collective": collective_times,
}


def measure(device: torch.device, say: Callable[[str], None], only_host: bool = False) -> RankMeasurements:
    """Measure everything, or what the host takes alone. All ranks measure the same at the same time."""
    context_bytes = _context_bytes(device)  # before the stopwatch's first barrier, whose NCCL communicator would count
    watch = HOST_WATCH if only_host else Stopwatch(device, ROUND_SECONDS[device.type])
    found = {}
    for name, part in () if only_host else PARTS.items():
        say(name)
        found[name] = tuple(part(watch))
    say("hooks")
    found_versions = versions(device.type)
    if device.type == "cuda":
        heads, length, head_dim = ATTENTION_HEADS, max(LENGTHS["cuda"]), max(HEAD_DIMS)
        found_versions["attention"] = attention_kernel(heads, heads, length, head_dim, torch.bfloat16, device)
    sample = (HOST_MODEL, HOST_SEQUENCE_LENGTH) if only_host else (CALIBRATION_MODEL, CALIBRATION_SEQUENCE_LENGTH)
    return RankMeasurements(
        num_ranks=dist.get_world_size(),
        threads_per_rank=torch.get_num_threads(),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        versions=found_versions,
        model_step_seconds=time_model_steps(watch, *sample),
        context_bytes=context_bytes,
        **found,
    )


def _context_bytes(device: torch.device) -> int | None:
    """Return the memory of the CUDA context after a step has loaded its kernels. None without NVML."""
    if device.type != "cuda":
        return None
    _bare_step(device, CALIBRATION_MODEL, CALIBRATION_SEQUENCE_LENGTH)()
    torch.cuda.synchronize(device)
    used = Nvml(device).process_bytes()
    return None if used is None else used - torch.cuda.memory_reserved(device)


_SETUP = TrainSetup(optimizer=OptimizerKind.SGD, sequence_length=CALIBRATION_SEQUENCE_LENGTH, micro_batch_size=1)


def _bare_step(device: torch.device, model: ModelShape, length: int) -> Callable[[], object]:
    """Return a function that runs a step of a model, unwrapped."""
    bare = build(model).to_empty(device=device)
    for name, parameter in bare.named_parameters():
        initialize(parameter, name, 0)
    return _stepper(bare, replace(_SETUP, sequence_length=length), device)


def time_model_steps(watch: Stopwatch, shape: ModelShape, length: int) -> dict[str, float]:
    """Time a step of a model: unwrapped, and under each api with collectives that end at once.

    The differences are the time that the host spends in FSDP's hooks.
    """
    world, device = max(dist.get_world_size(), 2), watch.device
    seconds = {"none": watch.seconds(_bare_step(device, shape, length))}
    replace_group_by_fake(dist.get_rank(), world)
    for api in (Api.FSDP1, Api.FSDP2):
        setup = replace(_SETUP, api=api, world_size=world, sequence_length=length)
        model = fsdp(
            build(shape),
            setup=setup,
            TransformerBlock=BLOCKS[shape.family],
            device=device,
            initialize=partial(initialize, seed=0),
        )
        seconds[api.value] = watch.seconds(_stepper(model, setup, device))
    return seconds


def _stepper(model: nn.Module, setup: TrainSetup, device: torch.device) -> Callable[[], object]:
    training = prepared(model, loss_function(setup.loss), setup, device, MemoryMeter())
    tokens = torch.zeros(1, setup.sequence_length + 1, dtype=torch.long)
    return lambda: train_step(training, [tokens])


def main() -> None:
    """Join the process group, measure, write the measurements."""
    die_with_parent(int(sys.argv[1]))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = os.environ["DEVICE"] == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in trials with "flash"
    torch.set_num_threads(int(os.environ["THREADS"]))
    torch.manual_seed(rank)
    store = meet(Path(os.environ["RENDEZVOUS"]), "calibration", world)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world)

    def say(part: str) -> None:
        if rank == 0:
            print(json.dumps({"part": part, "of": len(PARTS) + 1}), flush=True)

    measured = measure(device, say, only_host=len(sys.argv) > 3)
    if rank == 0:
        write_atomically(Path(sys.argv[2]), to_json(measured))
    sys.stdout.flush()
    os._exit(0)  # no destructors: a fake process group has taken the place of the real one


if __name__ == "__main__":
    main()
