"""A loss that the model does not compute itself: train/models/model_code.py on the tape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fsdp_bench.simulate.losses.liger import liger_fused_linear
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import INT64
from fsdp_bench.simulate.recorded.instructions import Frame, TensorPlan, tensor_of
from fsdp_bench.simulate.tape import Tensor
from fsdp_bench.spec.recording.own_loss import LOSS

if TYPE_CHECKING:
    from fsdp_bench.simulate.recorded.model import RecordedTransformer


def next_tokens(op: Operators, batch: int, length: int) -> Tensor:
    """Return the targets: labels that are padded by one and shifted, a copy unless there is one sequence."""
    padded = op.tape.tensor(batch * (length + 1), INT64, "aten::constant_pad_nd")
    op.run("aten::constant_pad_nd", padded, padded)
    if batch == 1:
        return padded.view(length)
    targets = op.tape.tensor(batch * length, INT64, "aten::clone")
    op.run("aten::clone", targets, targets)
    return targets


class RunHeadWithLoss(msgspec.Struct, frozen=True):
    """A loss that includes the head."""

    hidden_states: TensorPlan
    weight: str
    batch: int
    length: int

    def run(self, frame: Frame, model: RecordedTransformer) -> None:
        """Run it inside of the model's forward."""
        op = model.op
        hidden_states = tensor_of(frame, model, self.hidden_states)
        weight = model.by_parameter[self.weight].seen
        out = liger_fused_linear(op, hidden_states, weight, next_tokens(op, self.batch, self.length))
        assert out.storage is not None
        assert out.node is not None
        frame.storages[LOSS] = out.storage
        frame.nodes[LOSS] = out.node
