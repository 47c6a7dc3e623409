"""Dry runs on real tensors in CPU memory, in which nothing of torch but the collectives is replaced."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunAnswer, DryRunSpec
from fsdp_bench.train.dry_run.fake_tracker import FakeTracker
from fsdp_bench.train.dry_run.fake_world import FakeWorld, joined
from fsdp_bench.train.dry_run.main import dry_run
from fsdp_bench.train.measuring.fake_group import collectives_restored, replace_collectives
from fsdp_bench.train.measuring.storage_tracker import StorageTracker
from fsdp_bench.train.processes.child import answered


class RealTracker(FakeTracker):  # type: ignore[no-untyped-call]  # TorchDispatchMode.__init_subclass__
    """Tracks real CPU tensors as FakeTracker tracks fake ones, except those in ``before``."""

    def __init__(self, device: torch.device, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(device)
        self._before = [tensor.untyped_storage() for tensor in before]

    def counts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has CPU memory. Fake tensors, on which DTensor propagates shardings, have none."""
        if isinstance(tensor, FakeTensor) or not StorageTracker.counts(self, tensor):
            return False
        address = tensor.untyped_storage()._cdata
        return all(storage._cdata != address for storage in self._before)


@contextmanager
def real_world(setup: TrainSetup, rank: int = 0) -> Iterator[FakeWorld]:
    """Make this process one rank of the setup's world inside the context, with real tensors on the CPU.

    Collectives end at once. An all-gather fills its output with copies of this rank's own shard.
    """
    device = torch.device("cpu")
    with collectives_restored(), joined(setup, rank, device) as mesh:
        replace_collectives()
        with RealTracker(device, _rank_tensors(mesh)) as tracker:
            yield FakeWorld(device, mesh, tracker)


def _rank_tensors(mesh: DeviceMesh | None) -> list[torch.Tensor]:
    """Return the tensors of ranks in a mesh. Slicing a mesh runs operators on them."""
    names = ("_mesh", "_rank_map", "mesh")
    found = [getattr(mesh, name, None) for name in names]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def real_dry_run(spec: DryRunSpec) -> DryRunAnswer:
    """Run a small benchmark model with real tensors, in this process; the spec's kernels are those of a CPU."""
    assert spec.kernels == "cpu"
    assert spec.model is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return answered(DryRunAnswer, lambda: DryRunAnswer(result=dry_run(spec, real_world(spec.setup, spec.rank))))
