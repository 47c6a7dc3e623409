"""Scripts that fail, make no step, or ask for what the world has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.on_stand_in.rehearsing import rehearse, rehearse_in_own_process, rehearse_script


def test_a_script_that_fails_by_itself_ends_with_1_and_its_line(tmp_path: Path) -> None:
    found = rehearse_script(tmp_path, 'import torch\nraise KeyError("no such thing")\n', code=1)
    assert (found.document["failure"]["type"], found.document["failure"]["user_line"]["line"]) == ("KeyError", 2)
    assert found.document["fits"] is None


def test_a_script_without_an_optimizer_step_is_unknown(tmp_path: Path) -> None:
    found = rehearse_script(tmp_path, "import torch\ntorch.zeros(1000, device='cuda')\n")
    assert (found.document["fits"], found.document["num_steps"]) == (None, 0)


INTERRUPTED = """
import os, signal, time, torch
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    if step == 2:
        os.kill(os.getppid(), signal.SIGTERM)  # handled as Ctrl-C, which tests in the background ignore
        time.sleep(600)
    optimizer.step()
"""


def test_an_interrupted_rehearsal_says_what_it_has_seen(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERRUPTED)
    found = rehearse_in_own_process("--gpu", "H100-SXM", "--", "script.py", folder=tmp_path, code=130)
    assert (found.document["outcome"], found.document["fits"]) == ("interrupted", None)
    assert found.document["num_steps"] == 2
    assert found.document["memory"]["steady_state"]["allocated_bytes"] > 4 * 4 * 1024**2  # AdamW: 16 B a parameter


def test_a_node_has_the_gpus_of_the_world_and_no_more(tmp_path: Path) -> None:
    found = rehearse_script(
        tmp_path,
        """
        import torch
        print("has", torch.cuda.device_count(), torch.cuda.get_device_name(7), torch.cuda.get_device_capability())
        torch.cuda.set_device(8)
        """,
        code=1,
    )
    assert "has 8 NVIDIA H100 80GB HBM3 (9, 0)" in found.output
    assert "invalid device ordinal" in found.document["failure"]["message"]


def test_ranks_of_a_node_use_their_own_gpu(tmp_path: Path) -> None:
    script = """
        import os, torch
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = torch.nn.Linear(1024, 1024, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.ones(1, 1024, device="cuda")).sum().backward()
            optimizer.step()
        """
    first, last = rehearse_script(tmp_path, script), rehearse_script(tmp_path, script, "--rank", "7")
    assert first.document["memory"]["peak_allocated_bytes"] == last.document["memory"]["peak_allocated_bytes"] > 0


def test_a_gpu_runs_what_was_compiled_for_its_generation(tmp_path: Path) -> None:
    """PyTorch is not compiled for 8.9: CUB has to find the kernels for 8.6, as on a real L4."""
    (tmp_path / "script.py").write_text("import torch; torch.nn.Embedding(9, 64).cuda()(torch.arange(9).cuda()).sort()")
    rehearse("--gpu", "L4", "--", "script.py", folder=tmp_path)


@pytest.mark.parametrize("given", ["", "0", "GPU-8d3b1f0c"])
def test_a_choice_among_this_machines_gpus_does_not_count(tmp_path: Path, given: str) -> None:
    script = "import torch; torch.cuda.set_device(5); torch.ones(1).cuda(); print('GPUs:', torch.cuda.device_count())"
    (tmp_path / "script.py").write_text(script)
    words = ("--gpu", "L4", "--world-size", "8", "--", "script.py")
    found = rehearse(*words, command="torchrun", folder=tmp_path, CUDA_VISIBLE_DEVICES=given)
    assert "GPUs: 8" in found.output
