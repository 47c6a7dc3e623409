"""Makes this process one rank of N, without other ranks and with tensors without data: the environment of a dry run.

The process group is torch's ``fake`` one: collectives return at once and move nothing. Tensors are FakeTensors: they
have a storage with a size, and operators infer shapes. FSDP's own code runs unchanged, so that what it allocates and
frees, and when, is real. Not covered: workspaces inside kernels, the process group's buffers, the caching allocator.

There are two devices. ``cpu`` behaves like a gloo rank on a CPU. The fake accelerator (fake_gpu.py) behaves like a GPU:
it has streams, device memory separate from host memory, and the allocations of CUDA kernels.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import KernelSet
from fsdp_bench.train.dry_run.fake_gpu import fake_gpu
from fsdp_bench.train.dry_run.fake_tracker import FakeTracker, RealTracker
from fsdp_bench.train.dry_run.fused_kernels import fused_kernels
from fsdp_bench.train.dry_run.workarounds import applied
from fsdp_bench.train.measuring.fake_group import add_finished_hook, fake_collectives, futures_of_all_reduces
from fsdp_bench.train.wrapping.units import Initializer
from fsdp_bench.train.wrapping.wrap import BlockClasses, fsdp, hybrid_mesh


@dataclass(frozen=True)
class FakeWorld:
    """One rank of a world, made by fake_world(), or by real_world() for tensors with data."""

    device: torch.device
    mesh: DeviceMesh | None
    tracker: FakeTracker

    def build_device(self, setup: TrainSetup) -> torch.device:
        """Return the device to build a model on: for FSDP the host, because FSDP moves each unit to the device."""
        return self.device if setup.is_ddp else torch.device("cpu")

    def wrap(
        self,
        model: nn.Module,
        setup: TrainSetup,
        blocks: BlockClasses | None,
        initialize: Initializer | None = None,
    ) -> nn.Module:
        """Wrap a model as a trial does: with fsdp() of train/wrapping/wrap.py."""
        wrapped = fsdp(
            model,
            setup=setup,
            TransformerBlock=blocks,
            device=self.device,
            device_mesh=self.mesh,
            initialize=initialize,
        )
        add_finished_hook(wrapped, setup)
        return wrapped


class _AcceleratorMode(FakeTensorMode):
    """A FakeTensorMode that creates ``torch.tensor(0.0, device=...)`` on the host: the device has no kernels."""

    @property
    def avoid_device_init(self) -> bool:
        """Return True, as for CUDA on a machine without a GPU."""
        return True


@contextmanager
def fake_world(setup: TrainSetup, kernels: KernelSet, rank: int = 0, before_sm80: bool = False) -> Iterator[FakeWorld]:
    """Make this process one rank of the setup's world inside the context; ``before_sm80``: on a V100 or T4.

    Raises:
        MachineError: if this version of torch is not supported (workarounds.py).
    """
    mode = _fake_mode(kernels)
    with ExitStack() as stack:
        stack.enter_context(applied(accelerator=kernels == "cuda"))
        stack.enter_context(futures_of_all_reduces())
        device = _device(kernels)
        dist.init_process_group("fake", rank=rank, world_size=setup.world_size, store=FakeStore())
        stack.callback(_end_world)
        mesh = _mesh(setup, device)  # before the mode: a mesh computes with rank numbers, so its tensors must be real
        _enter_mode(stack, mode, kernels, before_sm80)
        tracker = stack.enter_context(FakeTracker(device))
        yield FakeWorld(device, mesh, tracker)


@contextmanager
def fake_device(kernels: KernelSet, before_sm80: bool = False) -> Iterator[torch.device]:
    """Give this process a device without data, and no world; ``before_sm80``: a V100 or T4.

    Raises:
        MachineError: if this version of torch is not supported (workarounds.py).
    """
    mode = _fake_mode(kernels)
    with ExitStack() as stack:
        stack.enter_context(applied(accelerator=kernels == "cuda"))
        device = _device(kernels)
        _enter_mode(stack, mode, kernels, before_sm80)
        yield device


def _fake_mode(kernels: KernelSet) -> FakeTensorMode:
    """Make the mode; before anything is replaced, for it imports torch._dynamo, which compares symbols with its own."""
    kind = _AcceleratorMode if kernels == "cuda" else FakeTensorMode
    return kind(allow_non_fake_inputs=True)


def _enter_mode(stack: ExitStack, mode: FakeTensorMode, kernels: KernelSet, before_sm80: bool) -> None:
    stack.enter_context(mode)
    if kernels == "cuda":
        stack.enter_context(fused_kernels(before_sm80))
        # Else a thread for the device runs backward, and checkpointing's recomputation ends the process there.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))


@contextmanager
def real_world(setup: TrainSetup, rank: int = 0) -> Iterator[FakeWorld]:
    """Make this process one rank of the setup's world inside the context, with real tensors on the CPU.

    Collectives end at once. An all-gather fills its output with copies of this rank's own shard.
    """
    with ExitStack() as stack:
        stack.enter_context(fake_collectives())
        dist.init_process_group("fake", rank=rank, world_size=setup.world_size, store=FakeStore())
        stack.callback(_end_world)
        device = torch.device("cpu")
        mesh = _mesh(setup, device)
        tracker = stack.enter_context(RealTracker(device, _rank_tensors(mesh)))
        yield FakeWorld(device, mesh, tracker)


def _device(kernels: KernelSet) -> torch.device:
    return fake_gpu() if kernels == "cuda" else torch.device("cpu")


def _mesh(setup: TrainSetup, device: torch.device) -> DeviceMesh | None:
    if setup.strategy.is_hybrid:
        return hybrid_mesh(setup, device)
    if setup.uses_fully_shard:
        return init_device_mesh(device.type, (setup.world_size,))
    return None


def _rank_tensors(mesh: DeviceMesh | None) -> list[torch.Tensor]:
    """Return the tensors of ranks in a mesh. Slicing a mesh runs operators on them."""
    names = ("_mesh", "_rank_map", "mesh")
    found = [getattr(mesh, name, None) for name in names]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _end_world() -> None:
    dist.destroy_process_group()
    gc.collect()  # wrapped models are cycles
