"""The variant of recorded code that a setup runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.setup import Api, Checkpointing, TrainSetup, Wrap


class VariantKind(NamedTuple):
    """One way in which wrappers let a model compute."""

    compute: str
    store: str = "fp32"
    """The dtype that was the default when the model was built: some buffers have it."""
    autocast: bool = False
    """Parameters stay in fp32, and the model runs under torch.autocast: DistributedDataParallel."""
    casts_at_blocks: bool = False
    """fully_shard casts the floating inputs of each block (MixedPrecisionPolicy.cast_forward_inputs)."""
    trains: str = ""
    """The frozen parameters of which autograd computes gradients all the same, as FSDP1 with use_orig_params shows them
    as views of a flat parameter that is trained: none, those of ``units`` with a trained parameter where blocks are
    units, or ``all``, where the model is one unit."""

    is_apart: bool = False
    """Adapters are units of their own, which show them in the stored dtype until they run, and the model runs under
    torch.autocast besides: PEFT's fsdp_auto_wrap_policy under accelerate."""

    shows_gathered: bool = False
    """Adapters that are apart show what was gathered for them last, in the compute dtype: without use_orig_params FSDP1
    leaves these views in the modules (FlatParamHandle.reshard), from the second step on."""

    is_offloaded: bool = False
    """Tensors that blocks save for backward are in host memory meanwhile, from which they come back contiguous."""

    @property
    def name(self) -> str:
        """The name in a recording."""
        parts = [self.compute if self.store != self.compute else f"{self.compute}-true"]
        parts += ["autocast"] * self.autocast + ["cast at blocks"] * self.casts_at_blocks
        if self.compute == "fp32":
            parts = ["fp32"]
        parts += ["adapters apart"] * self.is_apart + ["as gathered"] * self.shows_gathered
        parts += ["offloaded"] * self.is_offloaded
        return " ".join([*parts, f"flat {self.trains}"] if self.trains else parts)

    @property
    def fallback(self) -> VariantKind | None:
        """The variant that this one equals in most models, and without which it cannot run."""
        if self.shows_gathered:
            return self._replace(is_apart=False, shows_gathered=False)
        if self.casts_at_blocks:
            return self._replace(casts_at_blocks=False)
        if self.store == "bf16":
            return self._replace(store="fp32")
        if self.compute == "fp16":
            return self._replace(compute="bf16")
        if self.trains:
            return self._replace(trains="")
        return None


KINDS = (
    VariantKind("bf16"),
    VariantKind("fp32"),
    VariantKind("bf16", autocast=True),
    VariantKind("bf16", store="bf16"),
    VariantKind("fp16"),
    VariantKind("bf16", casts_at_blocks=True),
    VariantKind("bf16", store="bf16", casts_at_blocks=True),
    VariantKind("fp16", casts_at_blocks=True),
    VariantKind("fp16", autocast=True),
)
"""All variants, each behind its fallback, of a model whose parameters are all trained."""

KINDS_WITH_FROZEN = (
    *KINDS,
    *(
        VariantKind(compute, store=store, trains=trains)
        for trains in ("units", "all")
        for compute, store in (("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"))
    ),
    VariantKind("bf16", is_apart=True),
    VariantKind("fp16", is_apart=True),
    VariantKind("bf16", is_apart=True, shows_gathered=True),
    VariantKind("fp16", is_apart=True, shows_gathered=True),
)
"""Those of a model with frozen parameters."""


def with_frozen(lora: LoRA | None) -> tuple[VariantKind, ...]:
    """Return the variants of a model with frozen parameters, which are adapters' or, with None, any others.

    A base that is stored in bf16 is not cast: it computes in bf16, or unpacked in fp32 where all does. FSDP1 flattens
    it with trained parameters in bf16 alone ("Must flatten tensors with uniform dtype").
    """
    if lora is None or lora.base is None:
        return KINDS_WITH_FROZEN
    compute = ("bf16",) if lora.is_quantized else ("bf16", "fp32")
    return tuple(
        kind for kind in KINDS_WITH_FROZEN if kind.compute in compute and (not kind.trains or kind.store == "bf16")
    )


def offloaded(kinds: Iterable[VariantKind]) -> tuple[VariantKind, ...]:
    """Return the same variants under activation offload."""
    return tuple(kind._replace(is_offloaded=True) for kind in kinds)


def kind_of(setup: TrainSetup, has_frozen: bool = False) -> VariantKind:
    """Return the variant of a setup; checkpointed blocks offload their inputs alone (checkpoint.py, save_inputs)."""
    is_offloaded = setup.activation_offload and setup.checkpointing is Checkpointing.NONE
    kind = _kind_of(setup)._replace(is_offloaded=is_offloaded)
    if has_frozen and setup.wrap is Wrap.BLOCK_AND_ADAPTERS:  # what is trained is not flattened with what is frozen
        is_apart = setup.precision.compute != setup.precision.store
        return kind._replace(is_apart=is_apart, shows_gathered=is_apart and not setup.use_orig_params)
    if has_frozen and setup.api is Api.FSDP1 and setup.use_orig_params:
        return kind._replace(trains="all" if setup.wrap is Wrap.NONE else "units")
    return kind


def _kind_of(setup: TrainSetup) -> VariantKind:
    precision = setup.precision
    if precision.compute == "fp32":
        return VariantKind("fp32")
    if setup.is_ddp and precision.compute != precision.store:
        return VariantKind(precision.compute, autocast=True)
    are_units = setup.wrap not in (Wrap.NONE, Wrap.SIZE)
    return VariantKind(precision.compute, store=precision.store, casts_at_blocks=are_units and casts_inputs(setup))


def casts_inputs(setup: TrainSetup) -> bool:
    """Return whether fully_shard casts the floating inputs of each unit: there is a policy to cast by."""
    precision = setup.precision
    is_mixed = not precision.store == precision.compute == precision.reduce
    return setup.uses_fully_shard and is_mixed and precision.compute != "fp32"
