"""torch.distributed for one rank of a world whose other ranks do not run.

The script's own ``init_process_group("nccl")`` runs. Only what it would connect to is replaced: the rendezvous, its
key-value store, and the backends NCCL and Gloo, whose place torch's FakeProcessGroup takes. So torch.distributed
reports the backend and the world that the script asked for. torch 2.15 has three backends for NCCL: ``nccl`` and
``nccl2`` make a ProcessGroupNCCL2, ``nccl-lazy`` a ProcessGroupNCCLLazy, ``nccl-legacy`` a ProcessGroupNCCL.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

from ..at_import import change_at_import
from .collectives import replace_collectives

_NCCL_BACKENDS = ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
"""Classes of torch's backends for NCCL, of which a version of torch may have some."""


class _SingleRankStore(c10d.Store):
    """A key-value store in which the other ranks do what this one does, and never set a key of their own."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return a key that this rank set. Raises RuntimeError for another's, for which a real store would wait."""
        self._check([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Count for all ranks: each of them adds the same."""
        found = int(self._values.get(key, b"0")) + amount * self._world_size
        self._values[key] = str(found).encode()
        return found

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        expected = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._values.get(key, expected) == expected:
            self.set(key, desired)
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._check(keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def _check(self, keys: list[str]) -> None:
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise RuntimeError(
                f"rank {self._rank} waits for the key {missing[0]!r} of torch.distributed's store, which another rank"
                f" would set; fsdp-bench rehearse runs one rank of {self._world_size}"
            )


class _Replacement(type):
    """Makes a backend instead of ProcessGroupNCCL or ProcessGroupGloo; all else is as in these."""

    real: Any
    make: Callable[..., Any]

    def __call__(cls, _store: Any, rank: int, size: int, *_options: Any, **_named: Any) -> Any:
        return cls.make(rank, size)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (FakeProcessGroup, cls.real))

    def __getattr__(cls, name: str) -> Any:
        return getattr(type.__getattribute__(cls, "real"), name)


def _fake_backend(rank: int, size: int) -> Any:
    return getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)(rank, size)


def _split(group: Any, _store: Any, ranks: list[int], _options: Any) -> Any:
    """Return the backend of a new group: torch 2.15 splits NCCL's communicator, with options that are NCCL's own."""
    return _fake_backend(ranks.index(group.rank()), len(ranks))


def _gloo_of_one(_rank: int, _size: int) -> Any:
    """Return a real Gloo backend of one rank: DistributedDataParallel's logger reads its number of threads."""
    real = c10d.ProcessGroupGloo.real
    options = real._Options()
    options._devices = [real.create_device(hostname="127.0.0.1")]
    return real(dist.HashStore(), 0, 1, options)


def join_alone(rank: int, world_size: int) -> None:
    """Let this process be one rank of a world of which no other rank runs."""
    replace_collectives()
    _complete_fake_backend()
    for name, make in (*((name, _fake_backend) for name in _NCCL_BACKENDS), ("ProcessGroupGloo", _gloo_of_one)):
        if hasattr(c10d, name):
            setattr(c10d, name, _Replacement(name, (), {"real": getattr(c10d, name), "make": staticmethod(make)}))
    store = _SingleRankStore(rank, world_size)
    dist.TCPStore = lambda *_arguments, **_keywords: _SingleRankStore(rank, world_size)
    _keep_objects_of_other_ranks(rank)
    for module in (dist, c10d, dist.device_mesh):
        if hasattr(module, "split_group"):
            module.split_group = _split_group
    # It asks all ranks for the bounds of their shards; its own code leaves that out under torch's fake backend.
    change_at_import(
        {"megatron_fsdp.uneven_dtensor": lambda module: setattr(module, "validate_uneven_dtensor", lambda _: None)}
    )
    c10d.rendezvous = _rendezvous(store, rank, world_size)
    dist.rendezvous = c10d.rendezvous
    _kept.append(store)


_NCCL_METHODS = {
    "_set_sequence_number_for_group": None,  # numbers match collectives of different ranks
    "_get_sequence_number_for_group": 0,
    "_set_default_timeout": None,  # nothing is waited for, so that nothing takes too long
    "_add_ephemeral_timeout": None,
    "_group_start": None,  # NCCL starts the collectives of a group together
    "_group_end": None,
    "_set_enable_nan_check": None,  # values are not those of training
    "perform_nocolor_split": None,  # this rank is in none of the new groups
    "comm_split_count": 0,
    "_is_initialized": True,
    "eager_connect_single_device": None,  # communicators' memory is predicted, not allocated
    "abort": None,
    "shutdown": None,
    "_shutdown": None,  # torch 2.6's name of it
    "register_mem_pool": None,  # NCCL then reads the pool's memory where it is; it allocates none
    "deregister_mem_pool": None,
}
"""Methods of NCCL's backend that FakeProcessGroup may lack, with what they answer. Others raise AttributeError."""


def _complete_fake_backend() -> None:
    """Give FakeProcessGroup what torch calls of NCCL's backend."""
    for name, answer in _NCCL_METHODS.items():
        if not hasattr(FakeProcessGroup, name) or name.endswith("_for_group"):
            setattr(FakeProcessGroup, name, lambda *_arguments, answer=answer, **_keywords: answer)
    FakeProcessGroup.split = _split


def _split_group(parent_pg: Any = None, split_ranks: Any = None, *_options: Any, **named: Any) -> Any:
    """Return this rank's new group: DeviceMesh splits NCCL's communicator where init_process_group was given a device.

    ``split_ranks`` are ranks within the parent group.
    """
    parents = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
    groups = [
        dist.new_group([parents[rank] for rank in ranks], group_desc=named.get("group_desc")) for ranks in split_ranks
    ]
    return next((one for one in groups if one is not dist.GroupMember.NON_GROUP_MEMBER), None)


def _keep_objects_of_other_ranks(rank: int) -> None:
    """Leave lists of objects as they are where another rank would send them."""
    for name in ("broadcast_object_list", "scatter_object_list"):
        original = getattr(c10d, name)
        signature = inspect.signature(original)

        def instead(
            *arguments: Any, original: Any = original, signature: inspect.Signature = signature, **keywords: Any
        ) -> Any:
            given = signature.bind(*arguments, **keywords).arguments
            source = given.get("src")
            if source is None and given.get("group_src") is not None:
                source = c10d.get_global_rank(given.get("group") or c10d._get_default_group(), given["group_src"])
            return original(*arguments, **keywords) if (source or 0) == rank else None

        setattr(c10d, name, functools.wraps(original)(instead))
        setattr(dist, name, getattr(c10d, name))


_kept: list[Any] = []
"""Python objects that C++ refers to."""


def _rendezvous(store: _SingleRankStore, rank: int, world_size: int) -> Callable[..., Any]:
    """Return what finds the other ranks: instead of meeting them, it says which rank this is."""

    def rendezvous(_url: str, asked_rank: int = -1, asked_size: int = -1, **_options: Any) -> Any:
        found = (store, rank if asked_rank < 0 else asked_rank, world_size if asked_size < 1 else asked_size)
        yield found
        raise RuntimeError("fsdp-bench rehearse: the other ranks never change, so nothing can rejoin")

    return rendezvous


class _Ended:
    """The result of spawn with ``join=False``: processes that have ended."""

    processes: Sequence[Any] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


def run_one_process(local_rank: int) -> None:
    """Replace torch.multiprocessing.spawn by a call of the function, as this rank of the node."""

    def spawn(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> _Ended | None:
        if local_rank >= nprocs:
            raise ValueError(
                f"torch.multiprocessing.spawn starts {nprocs} processes, and rank {local_rank} is none of them"
            )
        fn(local_rank, *args)
        return None if join else _Ended()

    torch.multiprocessing.spawn = spawn


def run_launched_program(run: Callable[[Sequence[str]], None], said: Callable[[int], None]) -> None:
    """Let launchers that are themselves Python programs run their program here, as this rank, instead of starting it.

    ``tune run``, ``fabric run`` and accelerate's notebook_launcher hand theirs to torch.distributed.run, which calls
    ``launch_agent``; ``deepspeed`` starts a process for each node. ``run`` takes the words after the interpreter;
    ``said`` the number of processes that the launcher would start.
    """

    def change_torch(module: Any) -> None:
        def launch_agent(config: Any, entrypoint: Any, args: list[Any], **_others: Any) -> dict[int, Any]:
            said(config.max_nodes * config.nproc_per_node)
            if callable(entrypoint):
                return {0: entrypoint(*args)}
            run(args[1:] if args[:1] == ["-u"] else args)
            return {}

        module.launch_agent = launch_agent

    def change_deepspeed(module: Any) -> None:
        def main(args: list[str] | None = None) -> None:
            asked = module.parse_args(args)
            if asked.num_gpus > 0:
                said(asked.num_gpus * max(asked.num_nodes, 1))
            rank = [] if asked.no_local_rank else [f"--local_rank={os.environ.get('LOCAL_RANK', '0')}"]
            run([*(["-m"] if asked.module else []), asked.user_script, *rank, *asked.user_args])

        module.main = main

    change_at_import({"torch.distributed.launcher.api": change_torch, "deepspeed.launcher.runner": change_deepspeed})
