"""What is observed of a script: steps, by PyTorch's own hooks, and operators and launched work in one order."""

import signal
from pathlib import Path

import pytest

from fsdp_bench.rehearse.inside.observe.trace import (
    HOST_WAITS_DEVICE,
    HOST_WAITS_EVENT,
    LAUNCH,
    STREAM_WAIT,
    Entry,
    Note,
    in_order,
)
from fsdp_bench.rehearse.inside.observe.user_lines import user_files
from tests.rehearse.inside.rehearsing import run_inside

LOOP = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    try:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("made", step)
    except Exception:
        print("caught")
"""


ENDED_IN_ITS_THIRD_STEP = """
import os, time, torch
from fsdp_bench_rehearsal.main import END_SIGNAL
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    try:
        model(torch.ones(1, 4)).sum().backward()
        if step == 2:
            os.kill(os.getpid(), END_SIGNAL)
            time.sleep(600)
        optimizer.step()
    except BaseException:
        print("caught")
"""
OPTIMIZERS_IN_BACKWARD = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
of = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
for p in of:
    p.register_post_accumulate_grad_hook(lambda p: [of[p].step(), of[p].zero_grad()] and None)
for step in range(5):
    model(torch.ones(1, 4)).sum().backward()
    print("made", step)
"""
TWO_IN_TURN = """
import torch
first, second = (torch.nn.Linear(4, 4) for _ in range(2))
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
for step in range(5):
    for model, optimizer in zip((first, second), optimizers):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
"""
WITHOUT_BACKWARD = """
import torch
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(5):
    (weight.grad,) = torch.autograd.grad((weight * 2).sum(), [weight])
    optimizer.step()
"""
MICRO_BATCHES = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for micro_batch in range(12):
    model(torch.ones(1, 4)).sum().backward()
    if micro_batch % 4 == 3:
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("script", "asked", "outcome", "steps", "made"),
    [
        (LOOP, 3, "stopped", 3, 2),  # the third step ends it
        (LOOP, None, "ended", 10, 10),
        (ENDED_IN_ITS_THIRD_STEP, None, "interrupted", 2, 0),
        (OPTIMIZERS_IN_BACKWARD, 4, "stopped", 4, 3),
        (TWO_IN_TURN, None, "ended", 5, 0),
        (WITHOUT_BACKWARD, 3, "stopped", 3, 0),
        (MICRO_BATCHES, None, "ended", 3, 0),
        ("import torch; print(torch.ones(2).sum())", 2, "ended", 0, 0),
    ],
    ids=["as many", "all", "interrupted", "in backward", "in turn", "without backward", "micro-batches", "none"],
)
def test_steps_are_counted_and_the_script_ends_after_them_whatever_it_catches(
    script: str, asked: int | None, outcome: str, steps: int, made: int, tmp_path: Path
) -> None:
    ran = run_inside(tmp_path, script, steps=asked)
    assert (ran.report["outcome"], ran.report["num_steps"], ran.code) == (outcome, steps, 0)
    assert ran.output.count("made") == made
    assert "caught" not in ran.output


def test_optimizers_that_follow_at_once_make_the_same_step(tmp_path: Path) -> None:
    """As Muon for matrices and AdamW for the rest. The last step ends when both have made it."""
    ran = run_inside(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(4, 4)
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        for step in range(5):
            model(torch.ones(1, 4)).sum().backward()
            for i, optimizer in enumerate(optimizers):
                optimizer.register_step_post_hook(lambda *_given, i=i: print("stepped", i)) if step == 0 else None
                optimizer.step()
        """,
        steps=3,
    )
    assert (ran.report["outcome"], ran.report["num_steps"]) == ("stopped", 3)
    assert (ran.output.count("stepped 0"), ran.output.count("stepped 1")) == (3, 3)


def test_a_failure_names_the_users_line_and_shows_the_users_traceback(tmp_path: Path) -> None:
    ran = run_inside(
        tmp_path,
        """
        import torch
        def build():
            return torch.nn.Linear(4, 4)(torch.ones(1, 3))
        build()
        """,
    )
    failure = ran.report["failure"]
    assert ran.report["outcome"] == "failed"
    assert failure["type"] == "RuntimeError"
    assert (Path(failure["user_line"]["file"]).name, failure["user_line"]["line"]) == ("script.py", 4)
    assert failure["traceback"].splitlines()[1].strip().startswith('File "script.py", line 5')
    assert failure["traceback"] in ran.output


def test_an_exit_code_of_the_script_is_a_failure(tmp_path: Path) -> None:
    assert run_inside(tmp_path, "import sys, torch; sys.exit(3)").report["outcome"] == "failed"
    assert run_inside(tmp_path, "import sys, torch; sys.exit(0)").report["outcome"] == "ended"


def test_the_script_is_main_and_has_its_arguments(tmp_path: Path) -> None:
    ran = run_inside(
        tmp_path,
        "import sys, os; print(__name__, sys.argv, os.environ['WORLD_SIZE'], os.environ['RANK'])",
        *("--lr", "3"),
        rank=5,
        world_size=16,
    )
    assert "__main__ ['script.py', '--lr', '3'] 16 5" in ran.output


def test_the_scripts_own_modules_are_found_and_ours_are_not(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text("mine = True")
    ran = run_inside(tmp_path, "import steps; print(steps.mine)\nimport collectives")
    assert "True" in ran.output
    assert "No module named 'collectives'" in ran.report["failure"]["message"]


def test_a_rank_beyond_the_world_is_refused(tmp_path: Path) -> None:
    ran = run_inside(tmp_path, "", rank=8, world_size=8)
    assert ran.code == 2
    assert ran.report["refused"] == "rank: 8 is not allowed; 0 to 7, by the world size"


def test_processes_that_a_script_spawns_are_one(tmp_path: Path) -> None:
    ran = run_inside(
        tmp_path,
        """
        import torch.multiprocessing as mp
        def train(local_rank, world_size):
            print("trains", local_rank, world_size)
        if __name__ == "__main__":
            mp.spawn(train, args=(8,), nprocs=8)
        """,
        rank=3,
    )
    assert [line for line in ran.output.splitlines() if "trains" in line] == ["trains 3 8"]


def test_a_launcher_written_in_python_runs_its_program_as_this_rank(tmp_path: Path) -> None:
    """As ``tune run`` and ``fabric run`` do, through torch.distributed.run."""
    (tmp_path / "train.py").write_text('import os, sys; print("trains", os.environ["RANK"], *sys.argv)')
    ran = run_inside(
        tmp_path,
        """
        from torch.distributed.run import main
        main(["--nproc-per-node", "8", "--nnodes", "2", "train.py", "--lr", "1"])
        """,
        rank=3,
    )
    assert [line for line in ran.output.splitlines() if "trains" in line] == ["trains 3 train.py --lr 1"]
    assert "The command says 16 ranks; rehearsed was one of 8." in ran.report["notes"]


def test_deepspeeds_launcher_runs_its_program_as_this_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('import os, sys; print("trains", os.environ["RANK"], *sys.argv)')
    (tmp_path / "deepspeed" / "launcher").mkdir(parents=True)
    (tmp_path / "deepspeed" / "launcher" / "runner.py").write_text(
        """
from types import SimpleNamespace
def parse_args(args):
    said = {"num_gpus": 8, "num_nodes": -1, "no_local_rank": False, "module": False}
    return SimpleNamespace(**said, user_script="train.py", user_args=["x"])
def main(args=None):
    raise AssertionError("starts processes")
"""
    )
    ran = run_inside(tmp_path, "from deepspeed.launcher.runner import main; main()", rank=3)
    assert [line for line in ran.output.splitlines() if "trains" in line] == ["trains 3 train.py --local_rank=3 x"]


def test_a_forked_process_does_not_report_for_the_script(tmp_path: Path) -> None:
    """Its parent is killed, as by the kernel where memory runs out: there is no answer then, and not the child's."""
    ran = run_inside(
        tmp_path,
        """
        import os, signal, sys
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert ran.code == -signal.SIGKILL
    assert ran.report == {}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (r'RuntimeError("file \udcff")', "file ?"),
        ("type('Silent', (Exception,), {'__str__': lambda self: 1 / 0})()", "its message cannot be made"),
    ],
)
def test_an_error_is_reported_whatever_its_message(error: str, message: str, tmp_path: Path) -> None:
    ran = run_inside(tmp_path, f"raise {error}")
    assert ran.report["outcome"] == "failed"
    assert message in ran.report["failure"]["message"]


def test_who_waits_for_what() -> None:
    entries = [Entry(STREAM_WAIT, 2, 99, ""), Entry(HOST_WAITS_EVENT, -1, 98, ""), Entry(HOST_WAITS_DEVICE, -1, 0, "")]
    assert in_order([], entries) == [
        {"kind": "wait", "event": 99, "stream": 2},
        {"kind": "host_wait", "event": 98, "stream": None},
        {"kind": "host_wait", "event": None, "stream": None},
    ]


@pytest.mark.parametrize(
    ("notes", "names"),
    [
        ([Note(1, 2, {"name": "inner"}, False), Note(0, 3, {"name": "outer"}, False)], ["outer", "inner"]),
        ([Note(0, 3, {"name": "collective"}, True), Note(0, 3, {"name": "functional"}, False)], ["collective"]),
    ],
)
def test_of_nested_operators_the_inner_one_has_launched_and_of_a_collective_none(
    notes: list[Note], names: list[str]
) -> None:
    """tests/on_stand_in/rehearse/test_time.py has the order of everything else."""
    assert [event["name"] for event in in_order(notes, [Entry(LAUNCH, 0, 0, "kernel")] * 3)] == names


REPEATS = """
from fsdp_bench_rehearsal.observe.memory import History

def repeats(*last, number=1):
    history = History()
    first = ("alloc", 2 << 20, 1), ("alloc", 512, 2), ("free_completed", 2 << 20, 1)
    entries = [*first, *(last or first)]
    times = [0, 0, 0] + [1] * len(last or first)
    history._entries = [
        {"action": action, "size": size, "addr": address, "stream": 0, "time_us": time}
        for (action, size, address), time in zip(entries, times)
    ]
    return history.repeats(-1, 0, 1, number)

free = "free_completed", 2 << 20, 1
print(
    repeats(number=2),
    repeats(number=3),  # a history that lacks an allocation
    repeats(("alloc", 2 << 20, 1), ("alloc", 512, 9), free, number=2),  # losses take turns
    repeats(("alloc", 2 << 20, 1), ("alloc", 1024, 2), free, number=2),
    repeats(("alloc", 2 << 20, 9), ("alloc", 512, 2), ("free_completed", 2 << 20, 9), number=2),
    repeats(("alloc", 2 << 20, 1), ("segment_alloc", 2 << 20, 2), ("alloc", 512, 2), free, number=2),
)
"""


def test_a_step_repeats_another_if_large_blocks_are_where_they_were(tmp_path: Path) -> None:
    """Elsewhere, the next step may find no free block: so in results/nvidia-h200/scripts/fully_shard_llama.py."""
    ran = run_inside(tmp_path, REPEATS)
    assert ran.output.splitlines()[-1] == "True False True False False False"


def test_files_and_checkpoints_that_a_command_names_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    for file in ("train.py", "run.yaml", "model/config.json", "model/tokenizer.json"):
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)
    found = user_files(["train.py", "--config=run.yaml", "--model", "./model", "no-file"])
    expected = ["model/config.json", "run.yaml", "train.py"]
    assert [file for file in found if Path(file).is_relative_to(tmp_path)] == [str(tmp_path / one) for one in expected]
