"""Records the forward pass of a bare model on fake tensors: who allocates, what Python drops when, what autograd saves.

It runs once under saved-tensor hooks that keep shapes instead of tensors. So a storage dies exactly when Python lets go
of it, and what autograd holds is kept apart: what replays the recording has an autograd of its own.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_bench.train.models.quantized import outer_operator
from fsdp_bench.train.recording.formulas import Size
from fsdp_bench.train.recording.operators import is_view, work_of

Code = list[Any]
"""Instructions as lists, as spec/recording/steps.py has them; storages and nodes are numbers or [kind, name]."""


class Recorder(TorchDispatchMode):
    """Logs what operators do to storages on one device."""

    def __init__(self, device: torch.device, logits_width: int | None, is_offloaded: bool = False) -> None:
        super().__init__()
        self.device = device.type
        self.logits_width = logits_width
        self.is_offloaded = is_offloaded
        """Whether what blocks save comes back from host memory, and so contiguous (save_on_cpu)."""
        self.blocks_around = 0
        """The number of blocks whose forward is running: one inside of a block, else none."""
        self.on = False
        self.log: Code = []
        self.known: dict[int, Any] = {}
        """Storages by address: the number of one that an operator made, or [kind, name]."""
        self._watches: dict[int, Any] = {}
        self.next_storage = 0
        self._first_node = self._next_node = 0
        self._tracks_nodes = False
        self._num_packed = 0
        self.unpacked: list[int] = []
        """The numbers of the saved tensors that the running node has opened."""
        self.opened_by: dict[int, int] = {}
        """The node that opened each saved tensor, by its number. An in-place operator saves a clone of its input, whose
        own node is newer than the operator's."""
        self.substitutes: list[torch.Tensor] = []
        """Tensors that stand for what was saved, until the node has run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.on:
            return func(*args, **(kwargs or {}))
        self.nodes_until_now()
        result = func(*args, **(kwargs or {}))
        if not is_view(func):
            self._log_operator(func, (args, kwargs or {}), result)
        return result

    def _log_operator(self, func: Any, given: Any, result: Any) -> None:
        made = list(self._new_storages(result))
        work = work_of(func, given[0], result) if any(map(self._counts, tree_leaves((given, result)))) else None
        outer = f" in {outer_operator()}" if outer_operator() else ""
        if work is not None or made:
            name, *what = work or (func.name().partition(".")[0], Size.product(0), 1, [])
            self.log.append(["o", name + outer, *what, made])

    def _new_storages(self, result: Any) -> Iterator[list[Any]]:
        for leaf in tree_leaves(result):
            if not self._counts(leaf):
                continue
            key = leaf.untyped_storage()._cdata
            if key in self.known:
                continue
            number, storage = self.next_storage, leaf.untyped_storage()
            self.next_storage += 1
            self.known[key] = number
            self._watches[key] = weakref.ref(storage, partial(self._forget, key, number))
            is_logits = self.logits_width is not None and leaf.dim() > 1 and leaf.shape[-1] == self.logits_width
            yield [number, Size.of_storage(leaf), "l" if is_logits else ""]

    def _counts(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and getattr(value, "fake_device", value.device).type == self.device

    def _forget(self, key: int, number: int, _dead: Any) -> None:
        self.known.pop(key, None)
        self._watches.pop(key, None)
        self.log.append(["d", number])

    def name(self, tensor: torch.Tensor, reference: Any) -> None:
        """Say what a tensor's storage is."""
        self.known[tensor.untyped_storage()._cdata] = reference

    def reference(self, tensor: torch.Tensor) -> Any:
        """Return what a tensor's storage is."""
        if not self._counts(tensor):
            return ["?", 0]
        return self.known.get(tensor.untyped_storage()._cdata, ["?", 0])

    # -- the graph -----------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record what runs inside of the context, and the nodes that it makes."""
        self._first_node, self._next_node = torch._C._autograd._get_sequence_nr(), 0
        self._tracks_nodes = self.on = True
        with self, torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
            self.nodes_until_now()
        self._tracks_nodes = self.on = False

    def nodes_until_now(self) -> None:
        """Log the nodes that were made since the last call."""
        if self._tracks_nodes:
            while self._next_node < torch._C._autograd._get_sequence_nr() - self._first_node:
                self.log.append(["n", self._next_node])
                self._next_node += 1

    def number_of(self, node: Any) -> int:
        """Return a node's number, by the order in which they were made."""
        return int(node._sequence_nr()) - self._first_node

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self.on:
            self.nodes_until_now()
            saved = [self.reference(tensor), Size.product(*tensor.shape), tensor.element_size(), None]
            is_strided = bool(self.blocks_around) and not tensor.is_contiguous()
            self.log.append(["s", self._next_node - 1, saved, is_strided, self._num_packed])
        self._num_packed += 1
        comes_back = self.is_offloaded and self.blocks_around
        stride = torch.empty(tensor.shape, device="meta").stride() if comes_back else tensor.stride()
        return tensor.shape, stride, tensor.dtype, tensor.device, self._num_packed - 1

    def _unpack(self, packed: Any) -> torch.Tensor:
        shape, stride, dtype, device, number = packed
        self.unpacked.append(number)
        was_on, self.on = self.on, False
        with torch.no_grad():
            made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        self.on = was_on
        self.substitutes.append(made)
        self.name(made, ["s", len(self.substitutes) - 1])
        return made


Names = dict[nn.Parameter, str]


def described(recorder: Recorder, value: Any, names: Names) -> list[Any]:
    """Return each tensor in a value: its storage, its sizes, and the edge of the graph that its gradient takes."""

    def edge(tensor: torch.Tensor) -> Any:
        if tensor.grad_fn is not None:
            return [recorder.number_of(tensor.grad_fn), tensor.output_nr]
        name = names.get(tensor) if isinstance(tensor, nn.Parameter) and tensor.requires_grad else None
        return None if name is None else ["p", name]

    return [
        [recorder.reference(leaf), Size.product(*leaf.shape), leaf.element_size(), edge(leaf)]
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]


@contextmanager
def calls_logged(recorder: Recorder, model: nn.Module, names: Names, block: type[nn.Module]) -> Iterator[None]:
    """Log every call of every module, with its inputs and outputs; of a block also how many are positional."""
    with ExitStack() as stack:
        for name, module in model.named_modules():

            def enter(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
                recorder.nodes_until_now()
                is_block = isinstance(module, block)
                recorder.blocks_around += is_block
                positional = sum(isinstance(arg, torch.Tensor) for arg in args) if is_block else -1
                recorder.log.append(["enter", name, described(recorder, (args, kwargs), names), positional])

            def leave(module: Any, _args: Any, _kwargs: Any, output: Any, name: str = name) -> None:
                recorder.nodes_until_now()
                recorder.blocks_around -= isinstance(module, block)
                recorder.log.append(["leave", name, described(recorder, output, names)])

            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        yield


def nested(log: Code, nodes: dict[int, Any], opened_by: dict[int, int]) -> Code:
    """Return the log with each module's part as a call, without nodes to which no gradient will come."""
    top: Code = ["c", "", [], [], [], -1]
    stack = [top]
    for event in log:
        kind = event[0]
        if kind == "enter":
            call: Code = ["c", event[1], event[2], [], [], event[3]]
            stack[-1][3].append(call)
            stack.append(call)
        elif kind == "leave":
            stack.pop()[4] = event[2]
        elif kind == "s":
            node = opened_by.get(event[4], event[1])
            if node in nodes:
                stack[-1][3].append(["s", node, event[2], event[3]])
        elif kind != "n" or event[1] in nodes:
            stack[-1][3].append(event)
    return top
