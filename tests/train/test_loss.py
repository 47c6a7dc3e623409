"""Three ways to one loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fsdp_bench.spec.setup import Loss
from fsdp_bench.train.loss import loss_function


@pytest.mark.parametrize(
    "kind", [Loss.PLAIN, Loss.CHUNKED, pytest.param(Loss.COMPILED, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("tokens", [16, 21])  # 21: chunks of unequal length
def test_value_and_gradient_are_those_of_float64(kind: Loss, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, tokens, 33, generator=generator, requires_grad=True)
    targets = torch.randint(33, (1, tokens), generator=generator)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), targets.flatten())
    expected.backward()
    loss = loss_function(kind)(logits, targets)
    loss.backward()
    torch.testing.assert_close(loss.double(), expected)
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad)


def test_the_chunked_loss_works_for_fewer_tokens_than_chunks() -> None:
    logits = torch.randn(1, 3, 5)
    targets = torch.tensor([[0, 1, 4]])
    torch.testing.assert_close(
        loss_function(Loss.CHUNKED)(logits, targets), F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    )


def test_bf16_logits_are_lost_in_fp32() -> None:
    logits = torch.randn(2, 8, 33, dtype=torch.bfloat16)
    targets = torch.randint(33, (2, 8))
    for kind in (Loss.PLAIN, Loss.CHUNKED):
        assert loss_function(kind)(logits, targets).dtype is torch.float32
