"""Files that Hugging Face's libraries write in a rehearsal: the script reads them back, the disk is as it was."""

from pathlib import Path

import pytest

from tests.on_stand_in.rehearsing import rehearse_in_own_process
from tests.rehearse.inside.test_user_files import Protection, contents, functions_of_python, notes_of, protection, user

__all__ = ["protection", "user"]  # fixtures


def test_safetensors_and_distributed_checkpoints_are_loaded_again(user: Path, protection: Protection) -> None:
    notes = notes_of(
        """
        import os, torch
        import torch.distributed.checkpoint as dcp
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file
        state = {"weight": torch.ones(1000, 1000, dtype=torch.bfloat16), "bias": torch.ones(3)}
        save_file(state, "checkpoint-400/model.safetensors", metadata={"format": "pt"})
        save_file({"x": torch.arange(3)}, filename="small.safetensors")
        dcp.save(state, checkpoint_id="distributed")
        dcp.load(state, checkpoint_id="distributed")
        assert state["bias"].tolist() == [1, 1, 1] and os.path.isdir("distributed")
        with safe_open("checkpoint-400/model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert file.get_tensor("weight").shape == (1000, 1000)
        assert load_file("small.safetensors")["x"].tolist() == [0, 1, 2]
        import numpy, safetensors.numpy
        safetensors.numpy.save_file({"x": numpy.arange(3)}, "checkpoint-500/model.safetensors")
        assert safetensors.numpy.load_file("checkpoint-500/model.safetensors")["x"].tolist() == [0, 1, 2]
        """,
        user,
        protection,
    )
    assert "safetensors wrote 1 file without the bytes of large tensors." in notes
    assert "torch.distributed.checkpoint was skipped 1 times" in notes


TRAINER = """
import os, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=2048
)  # 2,360,576 parameters: files above 1 MiB


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"input_ids": torch.arange(16), "labels": torch.arange(16)}


arguments = TrainingArguments(
    "out", per_device_train_batch_size=1, max_steps=3, save_steps=1, save_total_limit=1, report_to=[], bf16=True
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens())
trainer.train()
saved = sorted(name for name in os.listdir("out") if name.startswith("checkpoint"))
assert saved == ["checkpoint-3"], saved
LlamaForCausalLM.from_pretrained("out/checkpoint-3")
"""


def _write_old_checkpoints(folder: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-2"):
        (folder / "out" / name).mkdir(parents=True)
        (folder / "out" / name / "model.safetensors").write_bytes(bytes(range(256)))


@pytest.mark.slow
def test_trainer_removes_old_checkpoints_for_the_script_alone_without_overlays_too(user: Path) -> None:
    """Without a GPU: a rehearsal as root has overlays on the stand-in."""
    _write_old_checkpoints(user)
    script = TRAINER.replace("bf16=True", "use_cpu=True")
    notes = notes_of(script, user, functions_of_python, steps=4)
    assert "which the disk does not show" in notes


def test_trainer_removes_its_users_old_checkpoints_for_the_script_alone(tmp_path: Path) -> None:
    """``save_total_limit`` keeps the newest; a user's of an earlier run are older, and real."""
    _write_old_checkpoints(tmp_path)
    (tmp_path / "train.py").write_text(TRAINER)
    before = contents(tmp_path)
    found = rehearse_in_own_process("--gpu", "H100-SXM", "--steps", "all", "--", "train.py", folder=tmp_path)
    assert contents(tmp_path) == before
    notes = " ".join(found.document["notes"])
    assert "safetensors wrote" in notes
    assert "which the disk does not show" in notes
