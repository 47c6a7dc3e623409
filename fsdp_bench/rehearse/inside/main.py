"""Runs the user's script as one rank: ``python main.py PLAN``, in the user's own Python, beside the stand-in.

PLAN is a JSON file that fsdp_bench/rehearse/run.py writes. This package imports nothing of fsdp_bench: the user's
Python may not have it. Another JSON file reports what the script does, whatever happens.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # make the folder of this file a package, under a name of its own
    import importlib.util

    _HERE = Path(__file__).parent
    sys.path[:] = [path for path in sys.path if not path or Path(path) != _HERE]  # the script must not find these files
    _spec = importlib.util.spec_from_file_location(
        "fsdp_bench_rehearsal", _HERE / "__init__.py", submodule_search_locations=[str(_HERE)]
    )
    assert _spec is not None
    _package: ModuleType = importlib.util.module_from_spec(_spec)
    sys.modules["fsdp_bench_rehearsal"] = _package
    __package__ = "fsdp_bench_rehearsal"

if TYPE_CHECKING:
    from .observe.steps import Steps
    from .replace.hub import MissingFiles


END_SIGNAL = signal.SIGRTMIN + 5
"""Asks for the report of what was seen until now. Not SIGTERM or SIGUSR1, which training scripts handle themselves."""

PROGRESS_SECONDS = 30.0
"""The time between two lines on standard error that say where a long rehearsal is."""


class _Rehearsal:
    """One run of the script, and what is observed of it."""

    def __init__(self, plan: dict[str, Any], files: Any, launch: Any, rank: int, *of_ranks: int) -> None:
        import torch

        from .observe.imports import Imports
        from .observe.issued import IssuedWork
        from .observe.memory import PeakCounters
        from .observe.reads import Reads
        from .observe.steps import Steps
        from .replace.host_memory import SkippedWrites

        self.plan, self.files, self.launch, self.rank = plan, files, launch, rank
        self.world_size, self.gpus_per_node = of_ranks
        self.torch = torch
        self.counters = PeakCounters()
        self.issued = IssuedWork() if plan["notes_work"] else None
        self.steps: Steps = Steps(plan["steps"], self.counters, self.issued, plan["ends_early"])
        self.reads = Reads()
        self.host = SkippedWrites()
        self.missing: MissingFiles | None = None
        self.imports = Imports() if plan.get("imported") else None

    def prepare(self) -> None:
        from .observe.memory import record_history
        from .observe.side_effects import keep_from_dynamo
        from .observe.steps import EnoughSteps
        from .replace import checkpoints, collectives, integers, process_group

        keep_from_dynamo()
        self.counters.install()
        self.steps.install()
        self.reads.install()
        self.host.install()
        checkpoints.write_no_tensors(self.files.seen)
        if not _answer_of_stand_in("stand_in_has_cudnn"):
            os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"  # where PyTorch would prefer cuDNN's attention
        if not self.plan["stops_at_unsupported"]:
            self.torch.backends.cudnn.enabled = False
            self.torch.backends.cuda.enable_cudnn_sdp(False)
            self.torch._C._set_sdp_use_cudnn = lambda enabled: None  # sdpa_kernel would switch it on again
        integers.compute_small_integers()
        integers.balances_routing = self.plan["balanced_routing"]
        collectives.give_messages(self.plan["messages"], EnoughSteps)
        process_group.join_alone(self.rank, self.world_size)
        process_group.run_one_process(self.rank % self.gpus_per_node)
        process_group.run_launched_program(self._run_launched, self._set_num_processes)
        if self.plan["random_data"] is not None:
            from .replace import hub

            self.missing = hub.MissingFiles(self.plan["random_data"], Path(self.plan["report"]).parent, self.world_size)
            self.missing.install()
        if self.plan["random_weights"]:
            from .replace import random_weights

            random_weights.use_random_weights(Path(self.plan["report"]).parent)
        record_history()
        threading.Thread(target=_print_progress, args=(self.steps,), daemon=True).start()
        if self.issued is not None:
            self.issued.install()

    def _run_launched(self, words: Sequence[str]) -> None:
        """Run the program that the script, a launcher, starts: its folder takes the place of the launcher's."""
        from .launch import rank_environment, understand

        os.environ.update(rank_environment(self.rank, self.world_size, self.gpus_per_node))
        if not sys.flags.safe_path:
            del sys.path[:1]
        _run(understand("none", words, self.rank, self.world_size, self.gpus_per_node))

    def _set_num_processes(self, number: int) -> None:
        self.launch.num_processes = number

    def _notes(self) -> list[str]:
        """Say what was assumed or replaced because the command line says so."""
        from .replace import integers
        from .replace.checkpoints import skipped, sparse

        notes = {
            "balanced_routing": "Each expert gets equally many tokens (--balanced-routing).",
            "random_weights": "Models have random weights: no checkpoint was read (--random-weights).",
        }
        found = [text for option, text in notes.items() if self.plan[option]]
        if self.missing is not None:
            found += self.missing.notes()
        if self.plan["strategy"]:
            found.append(f"accelerate was given {self.plan['strategy']} (--strategy).")
        if not self.plan["stops_at_unsupported"]:
            found.append("PyTorch's own kernels ran instead of cuDNN's, which need other memory (--unsupported warn).")
        if _answer_of_stand_in("stand_in_pointwise_convolutions"):
            found.append(
                "Convolutions of 1x1 have the workspaces of kernels that cuDNN has without a GPU; with one it may run"
                " cuBLASLt's, with others."
            )
        if self.launch.num_processes not in (None, 1, self.world_size):  # torchrun's default is 1
            found.append(f"The command says {self.launch.num_processes} ranks; rehearsed was one of {self.world_size}.")
        if not integers.can_compute():
            found.append("Torch is older than 2.9: integers of the GPU are not computed, nor what follows from them.")
        found += [f"{name} was skipped {times} times: no checkpoint was written." for name, times in skipped.items()]
        found += [
            f"{name} wrote {times} file{'s' * (times != 1)} without the bytes of large tensors."
            for name, times in sparse.items()
        ]
        return found + self.files.notes()

    def finish(self, outcome: str, failure: dict[str, Any] | None) -> None:
        """Close the last span, report, and write what the script has printed."""
        self.steps.end()
        self.report(outcome, failure)
        sys.stdout.flush()
        sys.stderr.flush()

    def report(self, outcome: str, failure: dict[str, Any] | None) -> None:
        """Write the report, under a temporary name first."""
        from .files.places import named_by
        from .observe.memory import History
        from .observe.reads import own_runtime, unsupported
        from .observe.user_lines import user_files
        from .replace.collectives import calls, members, peers, sent, sizes, waits_for

        gc.disable()  # what follows makes many objects, and no garbage
        torch, seen = self.torch, History()
        is_whole = seen.reaches(self.counters.peak_requested_bytes)
        document = {
            "outcome": outcome,
            "failure": failure,
            "sentence": self.launch.sentence,
            "rank": self.rank,
            "world_size": self.world_size,
            "gpus_per_node": self.gpus_per_node,
            "num_steps": self.steps.num_steps,
            "spans": self.steps.document(),
            "lines_at_peak": seen.lines_at_peak() if is_whole else None,
            "curve": seen.curve() if is_whole else None,
            "step_ends_us": [[span.step, span.phase, span.ended_us] for span in self.steps.spans],
            "reads": self.reads.document(),
            "num_known_reads": self.reads.num_known,
            "unsupported": unsupported() | own_runtime(failure["message"] if failure else ""),
            "stops_at_unsupported": self.plan["stops_at_unsupported"],
            "process_groups": sizes,
            "collectives": [[group, name, count] for (group, name), count in calls.items()],
            "group_ranks": members,
            "peers": sorted(peers),
            "sent": sent,
            "waits_for": waits_for,
            "peak_host_bytes": self.host.peak_resident_bytes,
            "peak_unwritten_host_bytes": self.host.peak_unwritten_bytes,
            "notes": self._notes(),
            "user_files": user_files(named_by(self.plan)),
            "issued": None if self.issued is None else self.issued.document(),
            "why_nothing_issued": None if self.issued is None else self.issued.why_none,
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
            "device_name": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
            "allocator_settings": os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF")),
        }
        path = Path(self.plan["report"])
        text = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")  # a file's name may have any byte
        path.with_suffix(".tmp").write_bytes(text)
        path.with_suffix(".tmp").replace(path)
        if self.imports is not None:
            Path(self.plan["imported"]).write_text(json.dumps(self.imports.files()))
        if self.plan["snapshot"] and torch.cuda.is_initialized():
            torch.cuda.memory._dump_snapshot(self.plan["snapshot"])  # for pytorch.org/memory_viz


def _answer_of_stand_in(name: str) -> int:
    return int(getattr(ctypes.CDLL(None), name, int)())


def report_at_signal(report: Callable[[], object]) -> None:
    """Report and end the process at END_SIGNAL. A process that the script forked only ends."""
    own = os.getpid()

    def end(_number: int, _frame: object) -> None:
        try:
            if os.getpid() == own:
                report()
        finally:
            os._exit(0)

    signal.signal(END_SIGNAL, end)


def _print_progress(steps: Steps) -> None:
    started = time.monotonic()
    while True:
        time.sleep(PROGRESS_SECONDS)
        passed = round(time.monotonic() - started)
        where = "loading" if steps.phase == "load" else f"{steps.phase} of step {steps.num_steps + 1}"
        print(f"fsdp-bench rehearse: {passed} s, {where}", file=sys.stderr, flush=True)


def _run(launch: Any) -> None:
    """Run the script as Python itself would."""
    is_code, is_module = launch.kind == "code", launch.kind == "module"
    sys.argv = ["-c" if is_code else launch.target, *launch.arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, "" if is_code else os.getcwd() if is_module else str(Path(launch.target).resolve().parent))
    if is_code:
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(launch.target, "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif is_module:
        runpy.run_module(launch.target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(launch.target, run_name="__main__")


def _outcome(rehearsal: _Rehearsal, launch: Any) -> tuple[str, dict[str, Any] | None]:
    """Run the script to its end, its last step or its failure; say which."""
    from .observe.steps import EnoughSteps

    try:
        _run(launch)
    except EnoughSteps:
        return "stopped", None
    except SystemExit as end:
        if end.code in (None, 0):
            return "ended", None
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)  # as Python does
        return "failed", _failure(end)
    except BaseException as error:
        failure = _failure(error)
        sys.stderr.write(failure["traceback"])
        is_memory = isinstance(error, rehearsal.torch.cuda.OutOfMemoryError)
        return "out_of_memory" if is_memory else "failed", failure
    return "ended", None


def _failure(error: BaseException) -> dict[str, Any]:
    """Return an exception as JSON takes it; its traceback begins in the user's script, as Python prints it."""
    from .observe.user_lines import as_document, cause

    start = error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        start = start.tb_next
    stack = traceback.extract_tb(start)
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(stack)]
    inner, own = cause(frames)
    return {
        "type": type(error).__name__,
        "message": _message(error),
        "line": as_document(inner),
        "user_line": as_document(own),
        "traceback": "".join(traceback.format_exception(type(error), error, start)),
    }


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # of the script's own class
        return f"its message cannot be made: {type(other).__name__}"


def _understood(plan: dict[str, Any]) -> tuple[Any, int, int, int]:
    """Return what the launcher would start, the rank, the world size and the GPUs of a node.

    The world is by default as its arguments say, or one GPU. Raises ValueError, one line, for what cannot be rehearsed.
    """
    from .launch import understand

    rank, world_size, gpus_per_node = plan["rank"], plan["world_size"], plan["gpus_per_node"]
    if world_size is None:
        asked = understand(plan["launcher"], plan["words"], 0, 1, 1)
        if plan["launcher"] != "none" and asked.num_processes is None:
            raise ValueError("the command does not say how many ranks there are; --world-size N or --server NAME does")
        world_size = asked.num_processes or 1
        gpus_per_node = min(asked.processes_per_node or gpus_per_node, world_size)
    if rank >= world_size:
        raise ValueError(f"rank: {rank} is not allowed; 0 to {world_size - 1}, by the world size")
    world = rank, world_size, gpus_per_node
    return understand(plan["launcher"], plan["words"], *world, plan["strategy"]), *world


def main() -> None:
    """Read the plan, run, report, end the process."""
    from .files.places import named_by
    from .files.protection import Protection
    from .forks import END_WITH_PARENT, serve
    from .launch import rank_environment

    if sys.argv[1] == "--forks":
        serve(int(sys.argv[2]), Path(sys.argv[3]))
    path = Path(sys.argv[1])
    plan = json.loads(path.read_text())
    files = Protection(path.parent, named_by(plan))
    ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    try:
        files.edit(plan["edited"])
        launch, *world = _understood(plan)
    except (ValueError, OSError) as error:
        Path(plan["report"]).write_text(json.dumps({"refused": str(error)}))
        os._exit(2)
    if launch.gives_ranks or plan["world_size"] is not None:
        os.environ.update(rank_environment(*world))
    os.environ.update(launch.environment)
    os.environ |= {"WANDB_MODE": "disabled", "DO_NOT_TRACK": "1"}  # a rehearsal is no run of the user's account
    with warnings.catch_warnings():
        rehearsal = _Rehearsal(plan, files, launch, *world)
        rehearsal.prepare()
    own = os.getpid()
    report_at_signal(lambda: rehearsal.finish("interrupted", None))
    outcome, failure = _outcome(rehearsal, launch)
    if os.getpid() != own:  # the script forked this process, which does not answer for it
        os._exit(int(outcome not in ("ended", "stopped")))
    signal.signal(END_SIGNAL, signal.SIG_IGN)  # the report is being written
    rehearsal.finish(outcome, failure)
    os._exit(0)  # what the script left running, such as loaders' processes, would only be waited for


if __name__ == "__main__":
    main()
