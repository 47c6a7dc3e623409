"""Return values and arguments of a user's function in a dry run: every form that --help promises."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest
import torch

from fsdp_bench.spec.errors import MachineError, SpecError
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, UserModule
from fsdp_bench.sweep.dry_run import dry_runs, result_of
from fsdp_bench.train.models.user_module import loss_of

USERS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)
    def forward(self, x):
        return self.layer(x)

class Model(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.blocks, self.answer = nn.ModuleList(Block() for _ in range(2)), answer
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.answer(x)

def scalar():
    return Model(lambda x: x.square().mean()), torch.zeros(8, 64)

def in_tuple():
    return Model(lambda x: (x.square().mean(), x)), (torch.zeros(8, 64),)

def in_dict():
    return Model(lambda x: {"loss": x.square().mean(), "logits": x}), {"x": torch.zeros(8, 64)}

def tensor():
    return Model(lambda x: x), torch.zeros(8, 64)

def per_sample():
    return Model(lambda x: {"loss": x.square().mean(1)}), torch.zeros(8, 64)

def nothing():
    return Model(lambda x: None), torch.zeros(8, 64)

def sized(micro_batch_size, sequence_length=5):
    return Model(lambda x: x.square().mean()), torch.zeros(micro_batch_size, sequence_length, 64)
"""


def spec(folder: Path, function: str, **arguments: int) -> DryRunSpec:
    user = UserModule(function=f"users:{function}", block="users:Block", folder=str(folder), arguments=arguments)
    return DryRunSpec(module=user, setup=TrainSetup(world_size=4, micro_batch_size=3))


def test_a_model_may_answer_with_any_of_the_promised_forms(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(USERS)
    forms = ("scalar", "in_tuple", "in_dict", "tensor", "per_sample")
    wrong = [spec(tmp_path, "nothing"), spec(tmp_path, "scalar", sequence_length=99)]
    asked = [*(spec(tmp_path, form) for form in forms), spec(tmp_path, "sized", sequence_length=7), *wrong]
    answers = dict(dry_runs(asked))
    for index, form in enumerate(forms):
        result = result_of(answers[index])
        assert result.num_parameters == 2 * 64 * 64
        assert sum(result.breakdown_bytes.values()) == result.peak_allocated_bytes
        has_logits = result.breakdown_bytes["logits"] > 0
        assert has_logits == (form == "in_dict"), form
        assert result.arguments == {}
    # --seq was asked for; the batch has no default of its own, so the setup's is passed.
    assert result_of(answers[5]).arguments == {"micro_batch_size": 3, "sequence_length": 7}
    with pytest.raises(MachineError, match=r"returned NoneType, which has no loss.*model\(\*\*batch\) for a dict"):
        result_of(answers[6])
    with pytest.raises(MachineError, match=r"seq: users:scalar\(\) makes its own batch; .* sequence_length"):
        result_of(answers[7])


def test_the_loss_is_found_by_name_before_other_tensors() -> None:
    hidden, loss = torch.ones(2, 3), torch.tensor(7.0)
    answer = namedtuple("answer", "hidden loss")
    assert loss_of(answer(hidden, loss)) == 7
    assert loss_of({"hidden": hidden, "loss": loss}) == 7
    assert loss_of((loss, hidden)) == 7
    assert loss_of(loss) == 7
    assert loss_of([torch.ones(2, dtype=torch.int64), 2 * hidden]) == 2
    assert loss_of({"loss": torch.tensor([1.0, 3.0])}) == 2
    with pytest.raises(SpecError):
        loss_of({"tokens": torch.ones(2, dtype=torch.int64)})
