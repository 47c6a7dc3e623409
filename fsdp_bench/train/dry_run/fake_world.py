"""Makes this process one rank of N, without other ranks and with tensors without data: the environment of a dry run.

The process group is torch's ``fake`` one: collectives return at once and move nothing. Tensors are FakeTensors: they
have a storage with a size, and operators infer shapes. FSDP's own code runs unchanged, so that what it allocates and
frees, and when, is real. Not covered: workspaces inside kernels, the process group's buffers, the caching allocator.

There are two devices. ``cpu`` behaves like a gloo rank on a CPU. The fake accelerator (fake_gpu.py) behaves like a GPU:
it has streams, device memory separate from host memory, and the allocations of CUDA kernels.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import KernelSet
from fsdp_bench.train.dry_run.fake_gpu import fake_gpu
from fsdp_bench.train.dry_run.fake_tracker import FakeTracker
from fsdp_bench.train.dry_run.fused_kernels import fused_kernels
from fsdp_bench.train.dry_run.workarounds import applied
from fsdp_bench.train.measuring.fake_group import futures_of_all_reduces
from fsdp_bench.train.wrapping.wrap import hybrid_mesh


@dataclass(frozen=True)
class FakeWorld:
    """One rank of a world, made by fake_world()."""

    device: torch.device
    mesh: DeviceMesh | None
    tracker: FakeTracker

    def build_device(self, setup: TrainSetup) -> torch.device:
        """Return the device to build a model on: for FSDP the host, because FSDP moves each unit to the device."""
        return self.device if setup.is_ddp else torch.device("cpu")


class _AcceleratorMode(FakeTensorMode):
    """A FakeTensorMode that creates ``torch.tensor(0.0, device=...)`` on the host: the device has no kernels."""

    @property
    def avoid_device_init(self) -> bool:
        """Return True, as for CUDA on a machine without a GPU."""
        return True


@contextmanager
def fake_world(setup: TrainSetup, kernels: KernelSet, rank: int = 0, before_sm80: bool = False) -> Iterator[FakeWorld]:
    """Make this process one rank of the setup's world inside the context; ``before_sm80``: on a V100 or T4.

    Raises MachineError if this version of torch is not supported (workarounds.py).
    """
    with (
        fake_device(kernels, before_sm80) as device,
        futures_of_all_reduces(),
        joined(setup, rank, device) as mesh,
        FakeTracker(device) as tracker,
    ):
        yield FakeWorld(device, mesh, tracker)


@contextmanager
def fake_device(kernels: KernelSet, before_sm80: bool = False) -> Iterator[torch.device]:
    """Give this process a device without data, and no world; ``before_sm80``: a V100 or T4.

    Raises MachineError if this version of torch is not supported (workarounds.py).
    """
    is_accelerator = kernels == "cuda"
    # Before anything is replaced, for it imports torch._dynamo, which compares symbols with its own.
    mode = (_AcceleratorMode if is_accelerator else FakeTensorMode)(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(applied(is_accelerator))
        device = fake_gpu() if is_accelerator else torch.device("cpu")
        stack.enter_context(mode)
        if is_accelerator:
            stack.enter_context(fused_kernels(before_sm80))
            # Else a thread for the device runs backward, and checkpointing's recomputation ends the process there.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield device


@contextmanager
def joined(setup: TrainSetup, rank: int, device: torch.device) -> Iterator[DeviceMesh | None]:
    """Join the fake process group inside the context; return the mesh, which FSDP2 and hybrid strategies need."""
    with _disable_current_modes():  # a mesh computes with rank numbers, so its tensors must be real
        dist.init_process_group("fake", rank=rank, world_size=setup.world_size, store=FakeStore())
        mesh = hybrid_mesh(setup, device)
        if mesh is None and setup.uses_fully_shard:
            mesh = init_device_mesh(device.type, (setup.world_size,))
    try:
        yield mesh
    finally:
        dist.destroy_process_group()
        gc.collect()  # wrapped models are cycles
