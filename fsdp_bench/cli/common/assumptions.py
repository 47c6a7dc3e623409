"""Options of a prediction beside the setup: kernels, memory, rates; commands that predict share them."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import click

from fsdp_bench.cli.common.options import FILE, Decorator, SetupOptions, taken_together
from fsdp_bench.cli.common.setups import sliding_window_of, with_models
from fsdp_bench.plan.headroom import as_stated, stated_headroom
from fsdp_bench.plan.question import Question
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.spec.calibration_profile import Calibration, read_calibration
from fsdp_bench.spec.subprocesses.dry_run import KernelSet


@dataclass(frozen=True)
class AssumptionOptions:
    """The options as the user wrote them."""

    kernels: KernelSet = "cuda"
    gpu_memory: str | None = None
    headroom: str | None = None
    load: str = Build.META.value
    calibration: Path | None = None
    expandable_segments: bool = False
    cuda: str | None = None

    @cached_property
    def profile(self) -> Calibration | None:
        """The calibration, if one is given."""
        return read_calibration(self.calibration) if self.calibration else None


gpu_memory_option = click.option(
    "--gpu-memory", metavar="24GiB", help="GPU memory that a process can use, instead of the catalogue's."
)
headroom_option = click.option(
    "--headroom",
    metavar="SIZE",
    help="Memory of each GPU kept free for the CUDA context and NCCL. Default: their derived or measured sizes; 2GiB is"
    " assumed for what is unknown.",
)
calibration_option = click.option(
    "--calibration",
    type=FILE,
    metavar="FILE.toml",
    help="Rates that fsdp-bench calibrate measured or scaled, instead of the datasheet's; a measured CUDA context is"
    " kept free.",
)
_OPTIONS = {
    "kernels": click.option(
        "--kernels",
        default="cuda",
        show_default=True,
        type=click.Choice(["cuda", "cpu"]),
        help="Predict CUDA or CPU operators.",
    ),
    "load": click.option(
        "--load",
        default=Build.META.value,
        show_default=True,
        type=click.Choice([build.value for build in Build]),
        help="Where parameters are initialized before sharding: on meta, on rank 0's host memory, or on every rank's.",
    ),
    "gpu_memory": gpu_memory_option,
    "headroom": headroom_option,
    "calibration": calibration_option,
    "expandable_segments": click.option(
        "--expandable-segments", is_flag=True, help="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    ),
    "cuda": click.option(
        "--cuda",
        metavar="12.1",
        help="Version of CUDA of the torch in use: cuBLAS multiplies more slowly before 12.5, where that is published,"
        " and torch takes FlashAttention-2 before 13.0. Default: a recent one.",
    ),
}


def assumption_options(without: Collection[str] = ()) -> Decorator:
    """Add these options but for some to a command, which gets them as its argument ``assumed``."""
    options = [option for name, option in _OPTIONS.items() if name not in without]
    return taken_together("assumed", AssumptionOptions, options)


def read_questions(options: SetupOptions, assumed: AssumptionOptions) -> list[Question]:
    """Return a question for every combination of the options."""
    profile = assumed.profile
    found = with_models(options)
    windows = {code: sliding_window_of(replace(options, code=code)) for code in {one.options.code for one, _ in found}}
    questions = []
    for (one, setup, hardware), model in found:
        hardware = as_stated(hardware, assumed.gpu_memory, profile, assumed.cuda)
        kept = stated_headroom(assumed.headroom, hardware)
        build, segments = Build(assumed.load), assumed.expandable_segments
        questions.append(
            Question(model, setup, hardware, assumed.kernels, build, segments, profile, kept, windows[one.code])
        )
    return questions
