"""From which stream's pool things come: what peaks on the stand-in (tests/on_stand_in) do not show."""

from __future__ import annotations

from fsdp_bench.simulate.autograd import is_last_reference
from fsdp_bench.simulate.events import Kind, Stream
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.tape import Tape, Tensor
from fsdp_bench.spec.setup import Api, Precision, TrainSetup
from tests.shapes import shape


def test_tied_weights_are_added_up_in_a_tensor_of_their_own() -> None:
    """The head's gradient is a view of a product, to which nothing is added in place (can_accumulate_inplace)."""
    setup = TrainSetup(api=Api.FSDP1, world_size=8, sequence_length=128, precision=Precision.parse("bf16-mixed"))
    added: dict[bool, list[Stream]] = {}
    for is_tied in (True, False):
        steps = SimulatedSteps(shape(num_hidden_layers=4, tie_word_embeddings=is_tied), setup, CUDA)
        made = [event for event in steps.first_steps().events if event.kind is Kind.ALLOCATE]
        added[is_tied] = [event.stream for event in made if event.label == "aten::add"]
    assert [stream for stream in added[True] if stream is not Stream.COMPUTE] == [Stream.ALL_GATHER] * 2
    assert set(added[False]) == {Stream.COMPUTE}


def test_only_what_nobody_else_holds_is_added_to_in_place() -> None:
    """Counted as Engine._add does; a new Python may count differently."""

    def asked(buffer: list[Tensor]) -> bool:
        first = buffer[0]
        return is_last_reference(first)

    tape = Tape()
    alone = [tape.tensor(4, 4, "gradient")]
    assert asked(alone)
    also = alone[0]
    assert not asked(alone)
    del also
    assert asked(alone)
    detached = alone[0].detach()
    assert not asked(alone)
    assert not asked([detached])
