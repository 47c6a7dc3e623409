"""The helper that all tests on ranks rest on."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.train.ranks import call_standing_ranks, run_ranks


def add_up(number: int) -> tuple[int, int]:
    total = torch.tensor(dist.get_rank() + number)
    dist.all_reduce(total)
    return int(total), os.getpid()


def fail_on_the_last_rank() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.barrier()


def hang(folder: Path) -> None:
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(60)


def test_ranks_that_hang_are_killed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] did not answer in time"):
        run_ranks(2, tmp_path, hang, tmp_path, seconds=5)
    for note in tmp_path.glob("pid-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(note.read_text()), 0)


def test_standing_ranks_answer_one_call_after_another_and_new_ones_come_after_a_failure() -> None:
    first, second = (call_standing_ranks(2, add_up, number) for number in (10, 20))
    assert [total for total, _ in first + second] == [21, 21, 41, 41]
    assert [pid for _, pid in first] == [pid for _, pid in second]
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*fail_on_the_last_rank.*KeyError: 'the cause'"):
        call_standing_ranks(2, fail_on_the_last_rank)
    third = call_standing_ranks(2, add_up, 10)
    assert not {pid for _, pid in third} & {pid for _, pid in first}
