"""Input and output of the subprocess that says what a model's code builds."""

from __future__ import annotations

from typing import Any

import msgspec

from fsdp_bench.spec.checked import Checked
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.subprocesses.dry_run import UserModule


class DescriptionSpec(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The code to describe: a Hugging Face model, or a user's function."""

    config: dict[str, Any] | None = None
    """A config.json of Hugging Face's."""
    lora: LoRA | None = None
    """PEFT's adapters in it."""
    module: UserModule | None = None

    def _check(self) -> None:
        if (self.config is None) == (self.module is None):
            raise SpecError("a description needs a config.json or a user's module, and not both")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What the code builds: fields of ModelCode."""

    architecture: str
    num_parameters: int
    num_hidden_layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    max_position_embeddings: int | None
    has_tokens: bool
    arguments: tuple[str, ...] = ()
    versions: dict[str, str] = {}


class DescriptionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A description, or an error."""

    description: Description | None = None
    error: str | None = None
    """The error in one line."""
    users_mistake: bool = True
    """Whether the user can correct the error."""
