"""Live tensor bytes: every expected number is counted by hand, four bytes an fp32 element."""

import gc
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_bench.spec.model import Family
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.train.measuring.storage_tracker import BudgetExceeded, StorageTracker
from fsdp_bench.train.models.transformer import batches
from fsdp_bench.train.processes.rank import classify
from fsdp_bench.train.step import train_step
from fsdp_bench.train.wrapping.wrappers import release
from tests.train.ranks import run_ranks
from tests.train.training import LLAMA, STEPS, TWO, setup_of, train_alone, training_of


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


def test_resizing_a_storage_counts_whether_or_not_it_is_an_operator() -> None:
    with StorageTracker() as tracker:
        tensor = torch.empty(100)
        tensor.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        tensor.untyped_storage().resize_(800)
        assert tracker.live_bytes == 800
        output = torch.empty(0)
        output.resize_(25)
        assert tracker.live_bytes == 800 + 100
    resized = torch.empty(1).untyped_storage()
    resized.resize_(8)  # the original is back
    assert resized.nbytes() == 8


def test_what_existed_before_is_not_counted_and_fake_tensors_never_are() -> None:
    before = torch.empty(100)
    with StorageTracker() as tracker:
        assert tracker.live_bytes == 0
        view = before[1:]
        assert tracker.live_bytes == 400  # but an operator that returns a view of an old storage makes it known
        with FakeTensorMode():
            fake = torch.empty(10**9)
        meta = torch.empty(10**9, device="meta")
        assert tracker.live_bytes == 400
        del view, fake, meta


def test_an_mlps_step_has_the_peaks_that_arithmetic_says_in_every_phase() -> None:
    """8 -> 32 -> 4 without biases, 16 rows, SGD with momentum; the second step, when the momentum exists.

    Kept: weights 4 x (8 x 32 + 32 x 4) = 1536, as much momentum, inputs 4 x 16 x 8 = 512. One activation of the
    hidden layer is 4 x 16 x 32 = 2048.
    """
    hidden, kept = 2048, 1536 + 1536 + 512
    with StorageTracker() as tracker:
        up, down = nn.Linear(8, 32, bias=False), nn.Linear(32, 4, bias=False)
        optimizer = torch.optim.SGD([up.weight, down.weight], lr=0.1, momentum=0.9, foreach=False)
        inputs = torch.zeros(16, 8)
        for _ in range(2):
            tracker.reset_peak()
            loss = down(torch.relu(up(inputs))).square().sum()
            forward = tracker.peak_bytes
            tracker.reset_peak()
            loss.backward()
            del loss
            backward = tracker.peak_bytes
            tracker.reset_peak()
            optimizer.step()
            optimizer_peak = tracker.peak_bytes
            optimizer.zero_grad()
        assert forward == kept + 2 * hidden  # before and after the relu
        # In the relu's backward: its saved output, the gradient that comes and the one that goes; down's gradient
        # (512); the loss and its gradient (4 each).
        assert backward == kept + 3 * hidden + 512 + 8
        assert optimizer_peak == kept + 1536  # the gradients
        assert tracker.live_bytes == kept


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
        *(
            (error, Outcome.OOM_GPU, "device")
            for error in (
                torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
                RuntimeError("CUDA error: out of memory"),
                RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
                RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
                RuntimeError("NCCL error: Cuda failure 2 'out of memory'"),
            )
        ),
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


def live_after_steps(cases: dict[str, TrainSetup]) -> dict[str, tuple[int, int, float]]:
    """Return what is live after each case's last step, and when the trial is over; and that step's loss."""
    found = {}
    for name, setup in cases.items():
        with StorageTracker() as tracker:
            training = training_of(Family.LLAMA, setup)
            for tokens in batches(setup, LLAMA.vocab_size, STEPS, dist.get_rank(), 2):
                loss = float(train_step(training, tokens))
            del tokens
            time.sleep(0.2)  # gloo's threads hold the last collective's tensors for a moment
            live_bytes = tracker.live_bytes
            release(training.model)
            del training
            gc.collect()
            found[name] = (live_bytes, tracker.live_bytes, loss)
    return found


WHOLE, HALF = 4 * LLAMA.num_parameters, 2 * LLAMA.num_parameters
HALF_PADDED = HALF + 2 * 2 * LLAMA.hidden_size
MESH = 2 * 4
"""The ranks' two int32 numbers of fully_shard's mesh, which stay with the process group, in host memory."""
CASES = {f"{api.value} {strategy.value}": setup_of(2, api=api, strategy=strategy) for api, strategy in TWO}


def test_what_fsdp_frees_by_resizing_is_seen_and_a_trial_leaves_nothing_in_its_process(tmp_path: Path) -> None:
    """Between steps, under SGD, a rank keeps its parameters: half of them where they are sharded on two.

    FSDP1 keeps the gradients of its flat parameters too, although zero_grad took them from the original ones, until
    the next forward (_runtime_utils._root_pre_forward, _reset_flat_param_grad_info_if_needed). FSDP2 pads 67 rows of
    embedding and head to 68. DDP keeps its buckets, in which gradients are reduced. After its trial FSDP1's NO_SHARD
    would keep everything: its views and the graph that accumulates into them hold each other.
    """
    expected = {
        "fsdp1 FULL_SHARD": HALF + HALF,
        "fsdp1 SHARD_GRAD_OP": HALF + HALF,
        "fsdp1 NO_SHARD": WHOLE + WHOLE,
        "fsdp2 FULL_SHARD": HALF_PADDED + MESH,
        "fsdp2 SHARD_GRAD_OP": HALF_PADDED + MESH,
        "fsdp2 NO_SHARD": WHOLE + WHOLE,
    }
    ranks = run_ranks(2, tmp_path, live_after_steps, CASES)
    for rank in ranks:
        assert {name: live for name, (live, _, _) in rank.items()} == expected
        assert [left for _, left, _ in rank.values()] == [0, 0, 0, MESH, 0, 0]
    # Following storages does not change what is trained.
    (*_, last_loss), _ = train_alone(Family.LLAMA, setup_of(2))
    for name in CASES:
        assert (ranks[0][name][2] + ranks[1][name][2]) / 2 == pytest.approx(last_loss, abs=1e-5)
