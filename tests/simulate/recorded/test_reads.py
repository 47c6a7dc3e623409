"""Where a forward of other code than the benchmark's reads from the GPU, and the host waits."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.lookup import model
from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.recorded.bind import reads
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.recording.steps import Operator
from fsdp_bench.spec.setup import TrainSetup

MASKS = {"Llama-3.2-1B": 1, "Gemma-2-9B": 2, "bert-base-uncased": 0}
"""transformers makes a mask for each kind of attention; find_packed_sequence_indices reads for each of a decoder's."""


@pytest.mark.parametrize(("name", "num_masks"), MASKS.items())
def test_the_host_waits_in_forward_once_for_each_mask_and_never_between_blocks(name: str, num_masks: int) -> None:
    setup = TrainSetup(api="fsdp2", world_size=8, sequence_length=512)
    forward, before_blocks, phase, block = 0, 0, "", -1
    for event in SimulatedSteps(model(name, code="huggingface"), setup, CUDA).step().events:
        if event.kind is Kind.MARK:
            phase, block = event.label, event.number
        elif event.kind is Kind.SYNCHRONIZE and phase == "forward":
            forward += 1
            before_blocks += block == -1
    assert forward == before_blocks == num_masks


@pytest.mark.parametrize(
    ("names", "num_reads"),
    [
        (["aten::sub", "prim::device", "aten::ne", "prim::device", "aten::cumsum"], 1),  # masking_utils.py
        (["aten::ne", "aten::_to_copy", "aten::cumsum", "aten::mul"], 0),  # modeling_roberta.py: .ne(padding).int()
        (["aten::ones", "aten::cumsum", "aten::mul", "aten::sub"], 0),  # modeling_opt.py: of the attention mask
    ],
)
def test_position_ids_that_are_added_up_from_a_mask_are_not_read(names: list[str], num_reads: int) -> None:
    code = [Operator(name=index, num_bytes=0, itemsize=8, dims=(), makes=()) for index in range(len(names))]
    assert len(reads(code, names)) == num_reads
