"""One optimizer a parameter, called in backward as soon as its gradient is reduced.

fully_shard calls the hooks of Tensor.register_post_accumulate_grad_hook where it reduces (foreach_reduce in
_fsdp_collectives.py), FullyShardedDataParallel the optimizers in ``_in_backward_optimizers``
(_post_backward_use_sharded_grad_views in _runtime_utils.py): both on the stream that reduced, from whose pool states
and temporaries come.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_bench.simulate.events import Stream
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.optimizer import Shard, counts
from fsdp_bench.simulate.optimizers.dispatch import issue_one, multiplies_matrices, states, step
from fsdp_bench.simulate.tape import Storage
from fsdp_bench.spec.setup import OptimizerKind


class InBackward:
    """The optimizers of all parameters."""

    def __init__(self, op: Operators, kind: OptimizerKind) -> None:
        self._op = op
        self._kind = kind
        self._states: list[Storage] = []
        self._stepped: set[int] | None = set()
        """Keys of the optimizers that have their states; None: all have."""

    def warm_up(self, shards: list[Shard], stream: Stream) -> None:
        """Restore what a first step on such a stream leaves."""
        self._states, self._stepped = states(self._op, self._kind, shards), None
        if multiplies_matrices(self._kind, shards):
            self._op.make_workspace(True, stream)

    def step(self, shards: Iterable[tuple[int, Shard]], stream: Stream) -> None:
        """Step the optimizer of each shard, one after another; each has a key."""
        tape = self._op.tape
        before, tape.stream = tape.stream, stream
        for key, shard in shards:
            if not counts(shard):
                continue
            if self._stepped is not None and key not in self._stepped:
                self._stepped.add(key)
                self._states += states(self._op, self._kind, [shard])
            issue_one(tape, self._kind, [shard])
            step(self._op, self._kind, [shard])
        tape.stream = before
