"""Models of Hugging Face from their configuration alone (--random-weights): no checkpoint is read."""

from __future__ import annotations

from typing import Any


def use_random_weights() -> None:
    """Let ``from_pretrained`` make the model from its configuration, without reading weights."""
    from transformers import AutoConfig, PreTrainedModel

    def from_pretrained(cls: Any, name: Any, /, *arguments: Any, config: Any = None, **keywords: Any) -> Any:
        if config is None:
            config = AutoConfig.from_pretrained(name)
        dtype = keywords.get("dtype", keywords.get("torch_dtype"))
        attention = keywords.get("attn_implementation")
        options = {"dtype": dtype, "attn_implementation": attention}
        given = {name: value for name, value in options.items() if value not in (None, "auto")}
        try:
            return cls._from_config(config, **given)
        except TypeError:  # before transformers 4.56 the dtype had another name
            given["torch_dtype"] = given.pop("dtype", None)
            return cls._from_config(config, **given)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
