"""Datasheet rates that a run of the user's own scales, by class of work, or with a host's own times."""

from dataclasses import dataclass, field, fields
from pathlib import Path

from fsdp_bench.rates.datasheet import LAUNCH_SECONDS, MATMUL_EFFICIENCY, Datasheet
from fsdp_bench.simulate.events import IN_HOST_MEMORY, Work
from fsdp_bench.spec.calibration_profile import Scaling, WorkClass, read_calibration
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu

SCALED, WITH_OWN_HOST = "datasheet rates scaled by a run", "datasheet, the host measured"
"""The sources of such rates."""
_FOREACH = ("aten::_foreach_", "aten::_amp_foreach_")
_MULTI_TENSOR = ("optimizer adamw-foreach", "optimizer adamw-fused", "optimizer sgd")


def class_of(work: Work) -> WorkClass:
    """Return the class of an operator's work; ``optimizer`` are kernels that run over lists of tensors."""
    if work.is_product:
        return "matrix_products"
    if work.is_attention:
        return "attention"
    return "optimizer" if work.name.startswith((*_FOREACH, *_MULTI_TENSOR)) else "other_operators"


def product_flops_per_second(gpu: Gpu) -> float | None:
    """Return the rate of a GPU's matrix products in 16 bits by its datasheet."""
    peak = gpu.peak_flops_per_second("bf16")
    return None if peak is None else peak * (gpu.matmul_efficiency or MATMUL_EFFICIENCY)


@dataclass(frozen=True)
class Scaled(Datasheet):
    """A datasheet's rates, with how many times as long each class of work takes."""

    scaling: Scaling = field(kw_only=True)
    source: str = field(kw_only=True)
    launch_seconds: float = field(kw_only=True)

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float | None:
        """Return the seconds of an operator."""
        return self._times(class_of(work), super().run(work, beside))

    def collective(self, work: Work) -> float | None:
        """Return the seconds of a collective."""
        return self._times("communication", super().collective(work))

    def copy(self, work: Work) -> float | None:
        """Return the seconds of a copy to or from the host."""
        return self._times("copies", super().copy(work))

    def host(self, work: Work) -> float | None:
        """Return the seconds of a hook, or of an optimizer step in host memory."""
        own = None if work.name.startswith(IN_HOST_MEMORY) else self.scaling.hook_seconds.get(work.name.split()[0])
        return super().host(work) if own is None else own

    def _times(self, kind: WorkClass, seconds: float | None) -> float | None:
        return None if seconds is None else seconds * self.scaling.factors.get(kind, 1.0)


def read_scaling(path: Path, gpu: Gpu | None = None) -> Scaling:
    """Read what a run or a host changes of a GPU's rates. Raises SpecError for other files, and other GPUs."""
    found = read_calibration(path)
    if not isinstance(found, Scaling):
        raise SpecError(f"calibration: {path} has a whole machine's rates, for predict; here those of calibrate --from")
    if gpu is not None:
        refuse_other_gpu(found, gpu)
    return found


def refuse_other_gpu(scaling: Scaling, gpu: Gpu) -> None:
    """Raise SpecError if a run was on another GPU, or one with other rates."""
    if scaling.gpu not in (None, gpu.name):
        raise SpecError(f"calibration: of a run on {scaling.gpu}, this is {gpu.name}; a run on it gives another")
    if scaling.factors and scaling.datasheet_flops_per_second != product_flops_per_second(gpu):
        raise SpecError(f"calibration: of a run on {gpu.name} with other rates; give the same --cuda and --catalog")


def scaled(rates: Datasheet, scaling: Scaling | None) -> Datasheet:
    """Return the rates as a run or a host changes them. Raises SpecError if the run was on another GPU."""
    if scaling is None:
        return rates
    refuse_other_gpu(scaling, rates.gpu)
    known = {one.name: getattr(rates, one.name) for one in fields(rates) if one.init}
    return Scaled(
        **known,
        scaling=scaling,
        source=SCALED if scaling.factors else WITH_OWN_HOST,
        launch_seconds=scaling.launch_seconds or LAUNCH_SECONDS,
    )
