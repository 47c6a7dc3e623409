"""The loss of a setup: on logits, or together with the head."""

from __future__ import annotations

from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.losses.cross_entropy import chunked, plain
from fsdp_bench.simulate.losses.fused import compiled, flash_attn, unsloth_fp32
from fsdp_bench.simulate.losses.liger import liger
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.tape import Tensor
from fsdp_bench.spec.setup import Loss


def loss(op: Operators, kind: Loss, logits: Tensor, targets: Tensor) -> Tensor:
    """Logits and targets to the mean loss, a scalar; of a kind that includes the head, the loss is given."""
    if kind.includes_head:
        return logits
    op.tape.category = Category.LOGITS
    if kind is Loss.COMPILED and not op.kernels.is_cuda:
        kind = Loss.PLAIN  # the compiled code of a CPU is another, and is not predicted
    out = _ON_LOGITS[kind](op, logits, targets)
    op.tape.category = Category.ACTIVATIONS
    return out


_ON_LOGITS = {
    Loss.PLAIN: plain,
    Loss.CHUNKED: chunked,
    Loss.COMPILED: compiled,
    Loss.FLASH_ATTN: flash_attn,
    Loss.LIGER: liger,
    Loss.UNSLOTH_FP32: unsloth_fp32,
}
