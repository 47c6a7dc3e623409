"""The work of one optimizer step of the script: operators, compiled kernels, collectives, copies, and who waits.

The stand-in notes every launch with its stream (trace.py); this says which operator launched it. So a view that
launches nothing is no work, and a kernel that no known operator launched is reported under its own name. A step begins
where an optimizer's step has ended and ends where the next one does. The last whole one is reported.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from ..replace import collectives, host_memory
from ..replace.integers import tensors_in
from .arguments import Tensors, described, described_skipped, is_large_on_host
from .hooks import observe_fsdp, observe_recomputation, observe_triton
from .side_effects import read_large_integers_without, uncollected
from .trace import Note, Trace, in_order

_NO_OVERRIDE = torch._C._disabled_torch_dispatch_impl
_WITHOUT_DATA = "torch._subclasses."
"""Module of tensors with which torch traces: FakeTensor, FunctionalTensor. Nothing is launched for them."""


@dataclass
class _NotedStep:
    number: int = 0
    notes: list[str] = field(default_factory=list)
    """What Note takes, each as JSON: text, which does not count for Python's garbage collector."""
    entries: bytes = b""
    tensors: Tensors = field(default_factory=Tensors)
    allows_tf32: bool = False
    num_collectives: int = 0
    collective_of: dict[int, int] = field(default_factory=dict)
    """The collective that wrote or sent a tensor last, by the tensor's address."""


class IssuedWork:
    """Notes each step after the first; keeps the last one that was whole."""

    def __init__(self) -> None:
        self._trace = Trace()
        self._current = _NotedStep()
        self._whole: _NotedStep | None = None
        self._mode: _Operators | None = None
        self._is_noting = False
        """Whether the first step has ended."""
        self._phase = "forward"
        self._recomputing = 0
        self._waits_after_backward = False
        """Whether DistributedDataParallel's wait for its collectives will be noted."""
        self.why_none: str | None = None
        """Why no step was noted, where that is known."""

    def install(self) -> None:
        """Observe what is not an operator: collectives, Triton, hooks of FSDP, recomputation, waits for collectives.

        Operators are observed once the first step has ended; in older versions of torch (2.8 is one) from here on,
        because there code has to be compiled under the mode that observes them.
        """
        if not self._trace.exists:
            return
        collectives.on_call = self._collective
        collectives.on_wait = self._collectives_wait
        host_memory.on_skip = self._skipped
        observe_triton(self._triton)
        observe_fsdp(lambda name: self._note({"kind": "hook", "name": name}))
        observe_recomputation(self._recompute)
        if not COMPILES_UNDER_MODES:
            self._enter()
            assert self._mode is not None
            build_guards_under(self._mode)

    # -- steps ---------------------------------------------------------------------------------------------------

    def end_step(self, number: int) -> None:
        """An optimizer's step has ended: keep what was noted since the one before, and begin anew."""
        if not self._trace.exists or self.why_none is not None:
            return
        if self._is_noting:
            self._current.number, self._current.entries = number, self._trace.stop()
            self._current.allows_tf32 = torch.get_float32_matmul_precision() != "highest"
            self._whole = self._current
        elif self._mode is None:
            self._enter()
        if self._mode is not None:
            self._current = _NotedStep()
            self._trace.begin()
            self._is_noting = True

    def _enter(self) -> None:
        if torch._C._len_torch_dispatch_stack():
            self.why_none = "the script makes its optimizer's steps within a TorchDispatchMode of its own"
            return
        give_higher_order_operators(_Operators)
        self._mode = _Operators(self)
        read_large_integers_without(self._mode)
        self._trace.hide_mode()
        self._mode.__enter__()

    def begin_phase(self, phase: str) -> None:
        """Note that a phase begins: forward, backward or optimizer."""
        if phase != self._phase:
            self._phase = phase
            self._note({"kind": "phase", "name": phase})

    # -- notes ---------------------------------------------------------------------------------------------------

    def operator(self, func: Any, arguments: Any, keywords: Any) -> Any:
        """Run an operator, and note it if it launched anything."""
        if not self._is_noting:
            return func(*arguments, **keywords)
        begin = self._trace.count()
        found = func(*arguments, **keywords)
        self._note_operator(begin, func, arguments, keywords, found)
        return found

    @uncollected
    def _note_operator(self, begin: int, func: Any, arguments: Any, keywords: Any, found: Any) -> None:
        on_gpu = self._trace.count() > begin
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._collectives_wait(arguments)
        if getattr(func, "namespace", "") == "c10d":  # replace/collectives.py says what those are
            return
        if on_gpu or self._is_work_of_host(func, arguments):
            self._keep(begin, self._described(func, arguments, keywords, found, on_gpu))

    def _described(self, func: Any, arguments: Any, keywords: Any, found: Any, on_gpu: bool) -> dict[str, Any]:
        """Return an operator's note. One that cannot be described is a kernel of unknown time: the script goes on."""
        try:
            document = described(func, arguments, keywords, found, self._current.tensors)
        except Exception:  # shapes of nested tensors, say
            return {"kind": "kernel", "name": str(func), "stream": -1}
        return (
            {
                "kind": "operator",
                **document,
                "is_recomputed": self._is_recomputed,
                "is_pointwise": torch.Tag.pointwise in getattr(func, "tags", ()),
            }
            if on_gpu
            else {"kind": "host", **document}
        )

    @property
    def _is_recomputed(self) -> bool:
        """Whether checkpointing runs a forward again. Gradients are computed without recording a graph."""
        return bool(self._recomputing) or (self._phase == "backward" and torch.is_grad_enabled())

    @staticmethod
    def _is_work_of_host(func: Any, arguments: Sequence[Any]) -> bool:
        """Whether an operator that launched nothing computes on large tensors in host memory."""
        if getattr(func, "is_view", False):
            return False
        return any(map(is_large_on_host, tensors_in(arguments)))

    @uncollected
    def _skipped(self, name: str, arguments: Sequence[Any], found: Any) -> None:
        """Note what a rehearsal skips on the host because nobody needs the values (replace/host_memory.py)."""
        if self._is_noting:
            note = described_skipped(name, arguments, found, self._current.tensors)
            self._note({"kind": "host", **note})

    def _note(self, note: dict[str, Any]) -> None:
        if self._is_noting:
            self._keep(self._trace.count(), note)

    def _keep(self, begin: int, document: dict[str, Any], is_alone: bool = False) -> None:
        """Keep a note of what has begun at an entry of the trace and ends now."""
        self._current.notes.append(json.dumps((begin, self._trace.count(), document, is_alone)))

    def _recompute(self, change: int) -> None:
        self._recomputing += change

    def _triton(self, name: str, launch: Callable[[], Any], reads: Sequence[Any], facts: dict[str, Any]) -> Any:
        """Run a kernel of Triton and note it; ``reads`` are its arguments."""
        if not self._is_noting:
            return launch()
        begin = self._trace.count()
        found = launch()
        self._note_triton(begin, name, reads, facts)
        return found

    @uncollected
    def _note_triton(self, begin: int, name: str, reads: Sequence[Any], facts: dict[str, Any]) -> None:
        tensors = [self._current.tensors.number(one) if isinstance(one, torch.Tensor) else None for one in reads]
        self._keep(begin, {"kind": "triton", "name": name, "arguments": tensors, **facts})

    def _collective(self, call: collectives.ScriptCollective, run: Callable[[], Any]) -> Any:
        """Run a collective and note it. Its launches, by which the stand-in fills its output, are no work."""
        if not self._is_noting:
            return run()
        begin = self._trace.count()
        found = run()
        self._note_collective(begin, call)
        if call.is_asynchronous and self._phase == "backward":
            self._wait_after_backward()
        return found

    @uncollected
    def _note_collective(self, begin: int, call: collectives.ScriptCollective) -> None:
        message = tensors_in(call.message)
        on_gpu = any(one.device.type == "cuda" for one in message)
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
        note = {
            "kind": "collective",
            "name": call.name,
            "group": call.group,
            "ranks": call.ranks,
            "num_bytes": sum(one.numel() * one.element_size() for one in message),
            "is_asynchronous": call.is_asynchronous,
            "stream": -1 if stream is None else self._trace.stream_index(stream),
            "number": self._current.num_collectives,
            "peer": call.peer,
            "batch": call.batch,
        }
        for one in tensors_in(call.outputs):
            self._current.collective_of[one.data_ptr()] = self._current.num_collectives
        self._current.num_collectives += 1
        self._keep(begin, note, is_alone=True)

    def _wait_after_backward(self) -> None:
        """Note a wait once all gradients are computed.

        There DistributedDataParallel's reducer waits, in C++: it queues a callback of autograd's when it has started
        its last collective (Reducer::mark_bucket_ready). Callbacks run in the order in which they were queued.
        """
        if self._waits_after_backward:
            return

        def waited() -> None:
            self._waits_after_backward = False
            self._collectives_wait()

        with contextlib.suppress(RuntimeError):  # a backward pass that is no longer the engine's
            torch.autograd.Variable._execution_engine.queue_callback(waited)
            self._waits_after_backward = True

    @uncollected
    def _collectives_wait(self, outputs: Any = None) -> None:
        """The current stream waits for the collectives with these outputs, or else for all that were started."""
        if not self._is_noting or not torch.cuda.is_initialized():
            return
        stream = self._trace.stream_index(torch.cuda.current_stream().cuda_stream)
        numbers = {self._current.collective_of.get(one.data_ptr()) for one in tensors_in(outputs)}
        for number in numbers or {None}:
            self._note({"kind": "collectives_wait", "stream": stream, "number": number})

    def document(self) -> dict[str, Any] | None:
        """Return the last whole step as JSON takes it; None if there was none after the first."""
        if self._is_noting:
            self._trace.stop()
        step = self._whole
        if step is None:
            return None
        return {
            "number": step.number,
            "allows_tf32": step.allows_tf32,
            "tensors": step.tensors.document(),
            "events": in_order([Note(*json.loads(one)) for one in step.notes], self._trace.entries(step.entries)),
        }


class _Operators(TorchDispatchMode):
    """Sees every operator, in autograd's threads too: a backward pass inherits the modes of who started it."""

    supports_higher_order_operators = True

    def __init__(self, work: IssuedWork) -> None:
        super().__init__()
        self._work = work

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work as it does without this mode."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say the same to versions of torch that do not ask ``ignore_compile_internals``."""
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__module__.startswith(_WITHOUT_DATA) for kind in types):
            return func(*args, **(kwargs or {}))
        if any(getattr(kind, "__torch_dispatch__", _NO_OVERRIDE) is not _NO_OVERRIDE for kind in types):
            return NotImplemented  # DTensor and the like: what they run on their local tensors comes here again
        return self._work.operator(func, args, kwargs or {})


COMPILES_UNDER_MODES = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether code that was compiled without a mode runs under one that says ``ignore_compile_internals``."""


def give_higher_order_operators(mode_type: type[TorchDispatchMode]) -> None:
    """Give flex_attention and the like to a mode, as newer versions do if it ``supports_higher_order_operators``."""
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    original = HigherOrderOperator.dispatch

    @functools.wraps(original)
    def dispatch(self: Any, key: Any, *arguments: Any, **keywords: Any) -> Any:
        rules = self.python_key_table if hasattr(self, "python_key_table") else self.python_key_mode_table
        rules.setdefault(mode_type, functools.partial(_given_to_mode, self))
        return original(self, key, *arguments, **keywords)

    HigherOrderOperator.dispatch = dispatch


def _given_to_mode(operator: Any, mode: TorchDispatchMode, *arguments: Any, **keywords: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), arguments, keywords)


def build_guards_under(mode: TorchDispatchMode) -> None:
    """Let compiled code be taken under a mode.

    Dynamo compiles with all modes off (CatchErrorsWrapper in torch/_dynamo/convert_frame.py), and its guards compare
    the dispatch keys of tensors, to which a mode adds its own: no later call would be like the one that was compiled.
    """
    from torch._dynamo.guards import CheckFunctionManager

    original = CheckFunctionManager.__init__

    @functools.wraps(original)
    def build(self: Any, *arguments: Any, **keywords: Any) -> None:
        with mode:
            original(self, *arguments, **keywords)

    CheckFunctionManager.__init__ = build
