"""``python -m fsdp_bench.train.calibrating.calibrator PARENT OUT``: one rank that measures this machine.

PARENT is the process ID of its parent. RANK, WORLD_SIZE, LOCAL_RANK, DEVICE, THREADS and RENDEZVOUS come from the
environment. Rank 0 prints a line of JSON before each part, and writes the measurements to OUT.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_bench.spec.codec import to_json, write_atomically
from fsdp_bench.spec.profile import CALIBRATION_MODEL, CALIBRATION_SEQUENCE_LENGTH, RankMeasurements
from fsdp_bench.spec.setup import Api, OptimizerKind, TrainSetup
from fsdp_bench.train.calibrating.collective_times import collective_times
from fsdp_bench.train.calibrating.operator_times import (
    ATTENTION_HEADS,
    HEAD_DIMS,
    LENGTHS,
    attention_times,
    copy_times,
    matmul_times,
    operator_times,
    optimizer_times,
)
from fsdp_bench.train.measuring.fake_group import replace_group_by_fake
from fsdp_bench.train.measuring.meters import Unmetered
from fsdp_bench.train.measuring.nvml import Nvml
from fsdp_bench.train.measuring.stopwatch import Stopwatch
from fsdp_bench.train.models.attention_kernel import attention_kernel
from fsdp_bench.train.models.loss import loss_function
from fsdp_bench.train.models.optimizer import build_optimizer
from fsdp_bench.train.models.transformer import BLOCKS, build, initialize
from fsdp_bench.train.processes.parent import die_with_parent
from fsdp_bench.train.processes.rendezvous import meet
from fsdp_bench.train.step import Training, train_step
from fsdp_bench.train.wrapping.wrap import fsdp

ROUND_SECONDS = {"cpu": 0.008, "cuda": 0.005}
"""The duration of one round of repetitions. Everything is timed in four rounds."""

PARTS: dict[str, Callable[[Stopwatch], Iterator[Any]]] = {
    "matmul": matmul_times,
    "attention": attention_times,
    "operator": operator_times,
    "copy": copy_times,
    "optimizer": optimizer_times,
    "collective": collective_times,
}


def measure(device: torch.device, say: Callable[[str], None]) -> RankMeasurements:
    """Measure everything. All ranks measure the same at the same time."""
    context_bytes = _context_bytes(device)  # before the stopwatch's first barrier, whose NCCL communicator would count
    watch = Stopwatch(device, ROUND_SECONDS[device.type])
    found = {}
    for name, part in PARTS.items():
        say(name)
        found[name] = tuple(part(watch))
    say("hooks")
    versions = {"torch": str(torch.__version__), "python": platform.python_version(), "backend": dist.get_backend()}
    if device.type == "cuda":
        versions["cuda"], versions["nccl"] = str(torch.version.cuda), ".".join(map(str, torch.cuda.nccl.version()))
        heads, length, head_dim = ATTENTION_HEADS, max(LENGTHS["cuda"]), max(HEAD_DIMS)
        versions["attention"] = attention_kernel(heads, heads, length, head_dim, torch.bfloat16, device)
    return RankMeasurements(
        num_ranks=dist.get_world_size(),
        threads_per_rank=torch.get_num_threads(),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        versions=versions,
        model_step_seconds=time_model_steps(watch),
        context_bytes=context_bytes,
        **found,
    )


def _context_bytes(device: torch.device) -> int | None:
    """Return the memory of the CUDA context after a step has loaded its kernels. None without NVML."""
    if device.type != "cuda":
        return None
    _bare_step(device)()
    torch.cuda.synchronize(device)
    used = Nvml(device).process_bytes()
    return None if used is None else used - torch.cuda.memory_reserved(device)


def _bare_step(device: torch.device) -> Callable[[], object]:
    """Return a function that runs a step of CALIBRATION_MODEL, unwrapped."""
    bare = build(CALIBRATION_MODEL).to_empty(device=device)
    for name, parameter in bare.named_parameters():
        initialize(parameter, name, 0)
    setup = TrainSetup(optimizer=OptimizerKind.SGD, sequence_length=CALIBRATION_SEQUENCE_LENGTH, micro_batch_size=1)
    return _stepper(bare, setup, device)


def time_model_steps(watch: Stopwatch) -> dict[str, float]:
    """Time a step of CALIBRATION_MODEL: unwrapped, and under each api with collectives that end at once.

    The differences are the time that the host spends in FSDP's hooks.
    """
    world, device = max(dist.get_world_size(), 2), watch.device
    seconds = {"none": watch.seconds(_bare_step(device))}
    replace_group_by_fake(dist.get_rank(), world)
    alone = Stopwatch(device, watch.round_seconds)
    for api in (Api.FSDP1, Api.FSDP2):
        wrapped_setup = TrainSetup(
            api=api,
            world_size=world,
            optimizer=OptimizerKind.SGD,
            sequence_length=CALIBRATION_SEQUENCE_LENGTH,
            micro_batch_size=1,
        )
        model = fsdp(
            build(CALIBRATION_MODEL),
            setup=wrapped_setup,
            TransformerBlock=BLOCKS[CALIBRATION_MODEL.family],
            device=device,
            initialize=lambda parameter, name: initialize(parameter, name, 0),
        )
        seconds[api.value] = alone.seconds(_stepper(model, wrapped_setup, device))
    return seconds


def _stepper(model: nn.Module, setup: TrainSetup, device: torch.device) -> Callable[[], object]:
    training = Training(
        model=model,
        optimizer=build_optimizer(model.parameters(), setup.optimizer, 1e-3),
        loss_function=loss_function(setup.loss),
        setup=setup,
        device=device,
        meter=Unmetered(),
    )
    tokens = torch.zeros(1, CALIBRATION_SEQUENCE_LENGTH + 1, dtype=torch.long)
    return lambda: train_step(training, [tokens])


def main() -> None:
    """Join the process group, measure, write the measurements."""
    die_with_parent(int(sys.argv[1]))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = os.environ["DEVICE"] == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # predictions are of FlashAttention, as trials with "flash" are
    torch.set_num_threads(int(os.environ["THREADS"]))
    torch.manual_seed(rank)
    store = meet(Path(os.environ["RENDEZVOUS"]), "calibration", world)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world)

    def say(part: str) -> None:
        if rank == 0:
            print(json.dumps({"part": part, "of": len(PARTS) + 1}), flush=True)

    measured = measure(device, say)
    if rank == 0:
        write_atomically(Path(sys.argv[2]), to_json(measured))
    sys.stdout.flush()
    os._exit(0)  # no destructors: a fake process group has taken the place of the real one


if __name__ == "__main__":
    main()
