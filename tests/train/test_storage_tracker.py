"""Live tensor bytes: every expected number is counted by hand, four bytes an fp32 element."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_bench.spec.record import Outcome
from fsdp_bench.train.storage_tracker import BudgetExceeded, StorageTracker
from fsdp_bench.train.worker import classify


def test_a_storage_counts_from_its_creation_to_its_last_reference() -> None:
    with StorageTracker() as tracker:
        first = torch.empty(100)
        assert tracker.live_bytes == 400
        view = first.view(10, 10)[2:]
        assert tracker.live_bytes == 400
        del first
        assert tracker.live_bytes == 400  # the view keeps the storage
        second = torch.ones(50)
        assert tracker.live_bytes == 600
        del view
        assert tracker.live_bytes == 200
        del second
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 600


def test_resizing_a_storage_counts_although_it_is_no_operator() -> None:
    with StorageTracker() as tracker:
        tensor = torch.empty(100)
        tensor.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        tensor.untyped_storage().resize_(800)
        assert tracker.live_bytes == 800
    resized = torch.empty(1).untyped_storage()
    resized.resize_(8)  # the original is back
    assert resized.nbytes() == 8


def test_an_operator_that_resizes_its_output_counts() -> None:
    with StorageTracker() as tracker:
        tensor = torch.empty(0)
        tensor.resize_(25)
        assert tracker.live_bytes == 100


def test_what_existed_before_is_not_counted_and_fake_tensors_never_are() -> None:
    before = torch.empty(100)
    with StorageTracker() as tracker:
        view = before[1:]
        assert tracker.live_bytes in (0, 400)  # a view of an old storage makes it known, whole
        known = tracker.live_bytes
        with FakeTensorMode():
            fake = torch.empty(10**9)
        meta = torch.empty(10**9, device="meta")
        assert tracker.live_bytes == known
        del view, fake, meta


def test_a_linear_layers_step_has_the_peak_that_arithmetic_says() -> None:
    """y = x W; loss = sum(y): by hand, with W 20 x 30, x 10 x 20.

    Backward: W 2400, x 800, y's gradient is an expanded scalar; at the product for W's gradient (2400) are live
    W, x, the loss (4), its gradient (4) and that product.
    """
    with StorageTracker() as tracker:
        weight = torch.zeros(20, 30, requires_grad=True)
        data = torch.zeros(10, 20)
        assert tracker.live_bytes == 2400 + 800
        out = data @ weight
        assert tracker.live_bytes == 3200 + 1200
        loss = out.sum()
        del out
        assert tracker.live_bytes == 3200 + 4  # the sum saves no values of its input
        tracker.reset_peak()
        loss.backward()
        assert weight.grad is not None
        assert tracker.live_bytes == 3204 + 2400
        assert 3204 + 2400 <= tracker.peak_bytes <= 3204 + 2400 + 4 + 1200


def test_a_budget_ends_with_an_error_that_a_worker_reads_as_out_of_memory() -> None:
    with StorageTracker(3 * 2**19):
        kept = torch.empty(2**18)
        with pytest.raises(BudgetExceeded, match=r"1.0 MiB.* of the budget of 1.5 MiB"):
            torch.empty(2**18)
        del kept
    outcome, failure = classify(BudgetExceeded("full"), "backward")
    assert outcome is Outcome.OOM_HOST
    assert (failure.limit, failure.phase) == ("budget", "backward")


def test_a_budget_holds_in_backward() -> None:
    with StorageTracker(10_000) as tracker:
        weight = torch.zeros(40, 40, requires_grad=True)
        out = torch.zeros(1, 40) @ weight
        assert tracker.live_bytes < 10_000
        with pytest.raises(BudgetExceeded):
            out.sum().backward()


@pytest.mark.parametrize(
    ("error", "outcome", "limit"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), Outcome.OOM_GPU, "device"),
        (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), Outcome.OOM_GPU, "device"),
        (MemoryError(), Outcome.OOM_HOST, "host"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Outcome.OOM_HOST, "host"),
        (RuntimeError("Connection closed by peer"), Outcome.CRASHED, None),
        (KeyboardInterrupt(), Outcome.CRASHED, None),
    ],
)
def test_errors_are_told_apart_by_which_memory_ran_out(
    error: BaseException, outcome: Outcome, limit: str | None
) -> None:
    got, failure = classify(error, "forward")
    assert (got, failure.limit) == (outcome, limit)
    assert "\n" not in failure.message
