"""Question: a setup to predict, its hardware and assumptions. prediction.py has the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from fsdp_bench.plan.defaults import assumptions
from fsdp_bench.plan.document import ABSENT, AnswerDocument, ModelDocument, hardware_document, setup_document
from fsdp_bench.plan.estimate import KERNELS, available_bytes, communicators_for
from fsdp_bench.plan.headroom import Headroom, headroom_of
from fsdp_bench.plan.speed import Speed, speed
from fsdp_bench.rates.communicators import Communicators
from fsdp_bench.replay.host_memory import Build, host_memory
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.simulate.operators.kernels import Kernels, kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import TrainSetup


@dataclass(frozen=True)
class Question:
    """One setup to predict, its hardware, and the assumptions."""

    model: Model
    setup: TrainSetup
    hardware: Hardware | None = None
    kernels: str = "cuda"
    """``cuda`` or ``cpu``: the device whose kernels run."""
    build: Build = Build.META
    expandable_segments: bool = False
    profile: Profile | None = None
    """A calibration that predicts time instead of the datasheet."""
    headroom_bytes: int | None = None
    """Memory kept free on each GPU for the CUDA context and NCCL. None: what headroom.py derives and assumes."""
    sliding_window: int | None = None
    """The sliding window of a Hugging Face model, in tokens. Predictions do not model it."""

    @property
    def gpu(self) -> Gpu | None:
        """The GPU. None if none is named."""
        return self.hardware.gpu if self.hardware else None

    @property
    def has_server(self) -> bool:
        """Whether a server is named, which says how many GPUs a node has."""
        return self.hardware is not None and self.hardware.has_server

    @property
    def kernel_set(self) -> Kernels:
        """The kernels as ``estimate`` takes them, with the cuBLAS workspace of the GPU."""
        return kernels_on(KERNELS[self.kernels], self.gpu, moves_model=self.build is not Build.META)

    @cached_property
    def simulated(self) -> SimulatedSteps:
        """The steps of the setup."""
        return SimulatedSteps(self.model, self.setup, self.kernel_set)

    def on_same_steps(self, **changes: Any) -> Question:
        """Return the question with other assumptions, under which the same is simulated."""
        return replace(self, **changes).with_steps(self.simulated)

    def with_steps(self, simulated: SimulatedSteps) -> Question:
        """Return the question with its steps as they are simulated already, or on kernels that have no name."""
        changed = replace(self)
        changed.__dict__["simulated"] = simulated  # where cached_property finds it
        return changed

    @property
    def is_on_gpu(self) -> bool:
        """Whether the kernels are CUDA's. Only these have an allocator with reserved memory."""
        return self.kernels == "cuda"

    @cached_property
    def communicators(self) -> Communicators:
        """NCCL's communicators of one rank, and the GPU memory that they take beside torch's."""
        return communicators_for(self.model, self.setup, self.hardware)

    @property
    def required_headroom(self) -> Headroom:
        """GPU memory kept free for the CUDA context and NCCL."""
        return headroom_of(self.gpu, self.communicators, self.headroom_bytes)

    @property
    def available_bytes(self) -> int | None:
        """GPU memory that torch's allocator can reserve: all but the headroom. None if that is not known."""
        return available_bytes(self.gpu, self.communicators, self.headroom_bytes)

    @cached_property
    def host_memory_fraction(self) -> float:
        """The fraction of a node's host memory that its ranks need. 0 if the host memory is not known."""
        where = self.hardware
        if where is None or where.server.host_memory_bytes is None:
            return 0.0
        if not self.setup.uses_host_memory and self.build is Build.META:
            return 0.0
        return host_memory(self.simulated, where.gpus_per_node, self.build).peak_bytes / where.server.host_memory_bytes

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions that follow transformers' Trainer, each with the option that says otherwise."""
        return assumptions(self.model, self.setup)

    @property
    def impossible(self) -> str | None:
        """Why the setup cannot run; None if it can."""
        return why_impossible(self.model, self.setup, self.kernels)

    def document(self, **answered: Any) -> AnswerDocument:
        """Return the document of an answer. Without one it is that of a setup that cannot run: it has the reason."""
        reason = self.impossible
        return AnswerDocument(
            source="predicted",
            torch=TORCH_VERSION,
            kernels=self.kernels,
            device=ABSENT,
            expandable_segments=self.expandable_segments,
            load=self.build.value,
            model=msgspec.convert(self.model.document(), ModelDocument),
            setup=setup_document(self.setup, reason is None),
            assumptions=self.assumptions,
            server=hardware_document(self.hardware),
            impossible=reason,
            seconds=ABSENT,
            **answered,
        )


def speed_of(question: Question) -> Speed:
    """Predict how fast a setup trains."""
    return speed(question.simulated, question.hardware, question.profile)
