"""Cross-entropies in one kernel: flash-attn's, unsloth's, and what torch.compile makes; their sums over tokens."""

from __future__ import annotations

from fsdp_bench.simulate.autograd import Gradients
from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.operators.core import Operators, Saved
from fsdp_bench.simulate.operators.kernel_workspaces import reduce_all_workspace
from fsdp_bench.simulate.operators.kernels import BOOL, FP32, INT64
from fsdp_bench.simulate.tape import Tensor


def sum_of_all(op: Operators, x: Tensor, itemsize: int, name: str = "aten::sum") -> Tensor:
    """aten::sum, or another reduction of all elements to one, of so many bytes; it adds up in at least fp32.

    Booleans become integers first (sum_out in aten/native/ReduceOps.cpp).
    """
    out = op.tape.tensor(1, itemsize, name)
    if x.itemsize == BOOL:
        x = op.to(x, itemsize)
    _workspace = op.scratch(reduce_all_workspace(x.numel, op.kernels, max(itemsize, FP32)), "Reduce.cuh")
    op.run(name, x, out)
    return out


def mean_of_counted(op: Operators, losses: Tensor, targets: Tensor) -> Tensor:
    """loss.sum() / (target != ignore_index).sum(): the gradient is one number, expanded without a copy."""
    total = sum_of_all(op, losses, FP32)
    is_counted = op.tape.tensor(targets.numel, BOOL, "aten::ne")
    op.run("aten::ne", targets, is_counted)
    count = sum_of_all(op, is_counted, INT64)
    mean = op.tape.tensor(1, FP32, "aten::div")
    del total, is_counted

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        _opened = saved.copy()
        return (op.temporary(1, FP32, "aten::div"),)

    return op.record(mean, [losses], [count], backward)


# -- CrossEntropyLoss of flash_attn/losses/cross_entropy.py (2.8), with its defaults -----------------------------------
#
# ``inplace_backward`` is False, also in llm-foundry: the gradient of the logits is a tensor of its own.

_FLASH_FORWARD, _FLASH_BACKWARD = "cross_entropy_fwd_kernel", "cross_entropy_bwd_kernel"


def flash_attn(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """flash_attn/ops/triton/cross_entropy.py, CrossEntropyLoss; then the mean over the targets that count.

    Saves the logits themselves, and the logarithm of each row's sum in fp32. Targets whose address is not a multiple of
    16 bytes are copied: those of one sequence, which are the tokens from the second one on.
    """
    tokens = targets.numel
    aligned = targets
    if targets.is_view:
        aligned = op.tape.tensor(tokens + 1, INT64, "aten::constant_pad_nd").view(tokens)
        op.run("aten::constant_pad_nd", targets, aligned)
    losses, row_sums, _z_losses = (op.tape.tensor(tokens, FP32, _FLASH_FORWARD) for _ in range(3))
    op.run(_FLASH_FORWARD, logits, aligned, losses, row_sums, _z_losses)
    numel, itemsize = logits.numel, logits.itemsize

    def backward(saved: Saved, gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        _d_z_losses = op.temporary(tokens, FP32, "aten::zeros")  # of an output that has no gradient
        d_logits = op.tape.tensor(numel, itemsize, _FLASH_BACKWARD, Category.LOGITS)
        op.run(_FLASH_BACKWARD, *opened, d_logits)
        return (d_logits,)

    op.record(losses, [logits], [logits, row_sums, aligned], backward)
    return mean_of_counted(op, losses, targets)


# -- fast_cross_entropy_loss of unsloth (kernels/cross_entropy_loss.py) on logits that were cast to fp32 ---------------
#
# unsloth's models cast them so until late 2024, and fms-acceleration's ``fast_loss`` replaces the CrossEntropyLoss that
# transformers calls with logits.float(). The fp32 logits are saved, and backward overwrites them with their gradient.

_UNSLOTH_FORWARD, _UNSLOTH_BACKWARD = "_cross_entropy_forward", "_cross_entropy_backward"


def unsloth_fp32(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """Fast_CrossEntropyLoss: saves the fp32 logits, and the logarithm of each row's sum; then the mean of what counts.

    Not modelled: a row of more than 65,536 logits is added up in parts, a few numbers a row.
    """
    whole = op.to(logits, FP32)
    losses, row_sums = (op.tape.tensor(targets.numel, FP32, _UNSLOTH_FORWARD) for _ in range(2))
    op.run(_UNSLOTH_FORWARD, whole, targets, losses, row_sums)
    numel = whole.numel

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        op.run(_UNSLOTH_BACKWARD, *opened, opened[0])
        return (Tensor(opened[0].storage, numel, FP32),)

    op.record(losses, [whole], [whole.detach(), row_sums, targets], backward)
    return mean_of_counted(op, losses, targets)


# -- The plain loss compiled by torch.compile: what inductor's code allocates and what its partitioner saves -----------
#
# Read from the allocator's history of torch 2.13 on the stand-in for NVIDIA's libraries (tests/on_stand_in/simulate).
# One kernel reads the logits for each row's maximum and sum (online softmax), and one writes their gradient in their
# own dtype. Not modelled: the partial results, a few numbers a row, with which several blocks share a row where there
# are fewer than two rows a multiprocessor (torch/_inductor/ir.py, Reduction.num_splits).

_FORWARD, _BACKWARD = "triton_red_fused__log_softmax", "triton_poi_fused__log_softmax_backward_data"
_MOST_VALUES, _VALUES = 8192, 4096
"""Reduction.num_splits: from how many values on a sum is split, and how many values each part then has."""


def compiled(op: Operators, logits: Tensor, targets: Tensor) -> Tensor:
    """Logits and targets to the mean loss; saves the logits, and each row's maximum and sum in fp32."""
    tape, tokens = op.tape, targets.numel
    maxima, sums = (tape.tensor(tokens, FP32, _FORWARD) for _ in range(2))
    op.run(_FORWARD, logits, maxima, sums)
    parts = -(-tokens // _VALUES) if tokens > _MOST_VALUES else 0
    _partial = [op.temporary(parts, size, "triton_red_fused_nll_loss_forward") for size in (FP32, 2) if parts]
    total_weight, out = (tape.tensor(1, FP32, "triton_red_fused_nll_loss_forward") for _ in range(2))
    op.run("triton_red_fused_nll_loss_forward", targets, maxima, sums)
    numel, itemsize = logits.numel, logits.itemsize

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        d_logits = tape.tensor(numel, itemsize, _BACKWARD, Category.LOGITS)
        op.run(_BACKWARD, *opened, d_logits)
        return (d_logits,)

    return op.record(out, [logits], [logits, targets, maxima, sums, total_weight], backward)
