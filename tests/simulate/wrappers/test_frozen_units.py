"""Memory that FSDP1 holds for a unit of frozen parameters (register_multi_grad_hook)."""

from types import SimpleNamespace
from typing import Any

from fsdp_bench.simulate.autograd import Node, operator_node
from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.tape import Tape, Tensor
from fsdp_bench.simulate.wrappers.flat_param_handle import FlatParamHandle


def _made(tape: Tape) -> tuple[Tensor, Node]:
    node = operator_node(tape, lambda saved, gradients: (), [], [])
    return Tensor(tape.storage(64, "input"), 16, 4, node, 0), node


def _unit(tape: Tape, reshards: list[bool]) -> Any:
    return SimpleNamespace(
        is_trained=False,
        tape=tape,
        wrapper=SimpleNamespace(hook=lambda name: None),
        _post_backward_reshard=lambda: reshards.append(True),
        hooked_leaves=[],
    )


def test_gradients_of_inputs_are_held_until_all_are_known() -> None:
    tape, reshards = Tape(), list[bool]()
    unit = _unit(tape, reshards)
    (hidden, first), (encoded, second) = _made(tape), _made(tape)
    FlatParamHandle._register_post_backward_reshard_only_hook(unit, (hidden, None, encoded))

    def arrives(node: Node) -> int:
        """Let a gradient arrive and be used up; return how many storages are freed."""
        node.buffer[0] = tape.tensor(16, 4, "gradient")
        before = len(tape.events)
        for hook in node.pre_hooks:
            hook()
        node.buffer = []
        return sum(event.kind is Kind.FREE for event in tape.events[before:])

    assert arrives(first) == 0
    assert not reshards
    assert arrives(second) == 2
    assert reshards == [True]
