"""Compiled modules: they are loaded where their source is unchanged, and give the same answers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_bench.replay import compiled
from fsdp_bench.replay.caching_allocator import allocator

IS_COMPILED = not str(allocator.__file__).endswith(".py")
needs_compiled = pytest.mark.skipif(
    not IS_COMPILED, reason="the allocator is not compiled: no C compiler at installation"
)

READINGS = """
import sys
from importlib.machinery import EXTENSION_SUFFIXES
if sys.argv[1] == "python":
    EXTENSION_SUFFIXES.insert(0, ".nowhere")
from fsdp_bench.plan.estimate import read_allocator
from fsdp_bench.catalog.loader import BUILT_IN, model
from fsdp_bench.plan.speed import speed, step_seconds
from fsdp_bench.replay import streams
from fsdp_bench.replay.caching_allocator import allocator
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import Api, TrainSetup

print(*(module.__file__.endswith(".py") for module in (allocator, streams)), file=sys.stderr)
servers = Hardware(server=BUILT_IN.server("p5.48xlarge"), gpu=BUILT_IN.gpu("H100-SXM"), num_nodes=8, gpus_per_node=8)
for api in Api:
    simulated = SimulatedSteps(model("Llama-3.1-8B").shape(), TrainSetup(api=api, world_size=64, sequence_length=4096))
    print(step_seconds(simulated, servers), speed(simulated, servers, with_spans=True))
    for expandable in (False, True):
        whole = read_allocator(simulated, None, expandable)
        print(whole)
        for share in (0.97, 0.9, 0.8):
            print(read_allocator(simulated, int(share * whole.peak_reserved_bytes), expandable))
"""
"""Times a step, and reads the allocator on GPUs that hold it, that hold it with retries, and that do not."""


@needs_compiled
def test_compiled_and_interpreted_modules_read_the_same() -> None:
    machine_code, python = (
        subprocess.run([sys.executable, "-c", READINGS, how], capture_output=True, text=True, check=True)
        for how in ("compiled", "python")
    )
    assert (machine_code.stderr, python.stderr) == ("False False\n", "True True\n")
    assert machine_code.stdout == python.stdout
    assert "num_alloc_retries=0" in python.stdout
    assert "out_of_memory=OutOfMemory" in python.stdout


@needs_compiled
@pytest.mark.parametrize("changed", [None, "caching_allocator/allocator.py", "streams.pxd"])
def test_what_was_compiled_from_another_source_is_not_loaded(
    changed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path(compiled.__file__).parent, tmp_path, dirs_exist_ok=True)
    if changed is not None:
        with (tmp_path / changed).open("a") as source:
            source.write("# changed\n")
    monkeypatch.setattr(compiled, "_FOLDER", tmp_path)
    files = [tmp_path / compiled.file_name(module) for module in compiled.MODULES]
    assert [file.exists() for file in files] == [changed is None] * len(files)
    before = dict(sys.modules)
    if changed is not None:
        compiled.load("a_package")
        assert sys.modules == before
