"""The interface of the wrappers FSDP1, fully_shard and DistributedDataParallel."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from fsdp_bench.simulate.autograd import Engine
from fsdp_bench.simulate.models.transformer import Module
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import Sizes
from fsdp_bench.simulate.optimizers.dispatch import InBackward
from fsdp_bench.simulate.optimizers.shards import Shard
from fsdp_bench.simulate.tape import Storage, Tensor
from fsdp_bench.spec.setup import Offload, TrainSetup


class _PartOfABlock(Protocol):
    block: int


P = TypeVar("P", bound=_PartOfABlock)


class Wrapper(ABC):
    """A sharded or replicated model; it is put around the model's modules when it is made."""

    def __init__(self, op: Operators, engine: Engine, setup: TrainSetup) -> None:
        self.op, self.tape, self.engine, self.setup = op, op.tape, engine, setup
        self.sizes = Sizes.of(setup.precision)
        self.on_host = not op.kernels.is_cuda
        self.copies_messages = op.kernels.gloo
        self.group_size = setup.shard_group_size
        self.offload = setup.offload is Offload.PARAMS

    _callback_is_queued = False

    reduces_gradients = True
    """Whether this micro-batch's gradients are reduced (no_sync, set_requires_gradient_sync)."""

    in_backward: InBackward | None = None
    """The optimizers that are called in backward; None where one is called after it."""

    @abstractmethod
    def load(self) -> list[Storage]:
        """Materialise and shard the model; return what stays on the device."""

    @abstractmethod
    def shards(self, model: Module) -> list[Shard]:
        """Return what the optimizer updates, in the order of model.parameters()."""

    @abstractmethod
    def zero_grad(self) -> None:
        """optimizer.zero_grad(set_to_none=True)."""

    def by_block(self, parts: Iterable[P]) -> Iterator[P]:
        """Yield units or weights, marking the block of each in the log."""
        for part in parts:
            self.tape.mark_block(part.block)
            yield part
        self.tape.mark_block(-1)

    def hook(self, name: str) -> None:
        """Let the host run a hook: Python, between the operators that it issues."""
        self.tape.host_work(f"{self.setup.api.value} {name}")

    def cast_forward_inputs(self, inputs: tuple[Any, ...], itemsize: int) -> tuple[Any, ...]:
        """_pre_forward with cast_forward_inputs: activations to the dtype of a unit."""
        return tuple(self.op.to(x, itemsize) if isinstance(x, Tensor) and x.itemsize != itemsize else x for x in inputs)

    def queue_final_callback(self) -> None:
        """_register_post_backward_final_callback, _register_root_post_backward_final_callback."""
        if not self._callback_is_queued:
            self._callback_is_queued = True
            self.engine.callbacks.append(self._run_final_callback)

    def _run_final_callback(self) -> None:
        self.final_callback()
        self._callback_is_queued = False

    def final_callback(self) -> None:  # noqa: B027
        """Do what is left when backward has computed all gradients."""

    def lazy_init(self) -> None:  # noqa: B027
        """Do what is done once, before the first forward's first operator; later calls do nothing."""

    def forget_gradients(self) -> None:  # noqa: B027
        """Let go of what zero_grad leaves, before a forward casts its inputs."""

    @property
    def first_step_differs(self) -> bool:
        """Whether the first step has other events than later ones, beside lazy_init and the optimizer's states."""
        return False

    def after_a_step(self) -> None:  # noqa: B027
        """Restore the state that a step leaves behind, without having run one."""

    def after_a_first_step(self) -> None:  # noqa: B027
        """Add what later steps leave and a first step does not: with forward_prefetch, an event of FSDP1's limiter."""

    def when_nothing_loaded_is_left(self, call: Callable[[], object]) -> None:
        """Call once nothing is left that loading made and the first forward frees."""
        call()

    def host_tensors(self) -> list[tuple[int, int]]:
        """Return bytes and block of each tensor that CPU offload pins in host memory; its gradient is like it."""
        return []
