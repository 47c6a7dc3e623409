"""Whether a setup fits a GPU, decided from its dry run.

A dry run measures live bytes only. Reserved memory is predicted for the benchmark models. For a user's own module it is
unknown, so live bytes can only show that the module does not fit.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fsdp_bench.plan.document import AnswerDocument, MemoryDocument, ModelDocument, gpu_document, partly, setup_document
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.prediction import Prediction, answer
from fsdp_bench.plan.question import Question
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.subprocesses.dry_run import SIZES, DryRunResult, DryRunSpec


@dataclass(frozen=True)
class DryRun:
    """One dry run and the GPU that it is compared with."""

    spec: DryRunSpec
    result: DryRunResult
    hardware: Hardware | None = None
    stated_headroom_bytes: int | None = None

    @property
    def gpu(self) -> Gpu | None:
        """The GPU. None if none is named, and for CPU kernels."""
        if self.spec.kernels != "cuda":
            return None
        return self.hardware.gpu if self.hardware else None

    @cached_property
    def question(self) -> Question:
        """The question of the same setup. Its model is None for a user's own module."""
        setup, headroom = self.spec.setup, self.stated_headroom_bytes
        return Question(self.spec.model, setup, self.hardware, headroom_bytes=headroom)  # type: ignore[arg-type]

    @cached_property
    def prediction(self) -> Prediction | None:
        """The prediction of the same setup, for its reserved memory. None for a user's own module."""
        if self.spec.model is None or self.gpu is None:
            return None
        try:
            return answer(self.question)
        except SpecError:  # torch runs it, and it cannot be predicted
            return None

    @property
    def available_bytes(self) -> int | None:
        """GPU memory that torch's allocator can reserve: all but the headroom. None if that is not known."""
        return None if self.gpu is None else self.question.available_bytes

    @property
    def exceeds(self) -> bool:
        """Whether live bytes alone exceed the available GPU memory."""
        return self.available_bytes is not None and self.result.peak_allocated_bytes > self.available_bytes

    @property
    def verdict(self) -> Verdict | None:
        """Whether the setup fits. None if that is not known."""
        if self.exceeds:
            return Verdict.DOES_NOT_FIT
        return self.prediction.verdict if self.prediction else None

    @property
    def fits(self) -> bool | None:
        """Whether the setup fits without allocation retries. None if that is not known."""
        return None if self.verdict is None else self.verdict is Verdict.FITS

    def document(self) -> AnswerDocument:
        """Return the answer as a document. Reserved memory is predicted, and has the key of its source beside it."""
        spec, result, predicted = self.spec, self.result, self.prediction
        kept = self.question.required_headroom if self.available_bytes is not None else None
        own_sizes = {**dict.fromkeys(SIZES), **result.arguments, "loss": None} if spec.module is not None else {}
        return partly(
            AnswerDocument,
            source="dry-run",
            model=ModelDocument(name=spec.name, num_parameters=result.num_parameters),
            torch=result.torch,
            kernels=result.kernels,
            device="fake",
            setup={**setup_document(spec.setup), **own_sizes},
            server=gpu_document(self.hardware, self.gpu),
            memory=partly(
                MemoryDocument,
                peak_allocated_bytes=result.peak_allocated_bytes,
                peak_reserved_bytes=predicted.reserved_bytes if predicted else None,
                peak_reserved_source="predicted" if predicted and predicted.reserved_bytes is not None else None,
                peak_phase=result.peak_phase,
                phases=result.phases,
                load_bytes=result.load_bytes,
                resident=result.resident,
                breakdown_bytes=result.breakdown_bytes,
                peak_device_bytes=None,
                peak_host_bytes_per_node=None,
            ),
            fits=self.fits,
            verdict=self.verdict,
            headroom_bytes=predicted.headroom_bytes if predicted else None,
            required_headroom_bytes=kept.num_bytes if kept else None,
            required_headroom_source=kept.source if kept else None,
            seconds=result.seconds,
        )


def dry_run_document(run: DryRun) -> dict[str, Any]:
    """Return the JSON form, with the keys of ``predict --json``."""
    spec = run.spec
    model: dict[str, Any] = {"name": spec.name} if spec.model is None else to_builtins(spec.model)
    model |= {"lora": to_builtins(spec.lora)} if spec.config is not None else {}
    model |= {"num_parameters": run.result.num_parameters}
    return {**to_builtins(run.document()), "model": model}
