"""Models of Hugging Face from their configuration alone (--random-weights): no checkpoint is read."""

from __future__ import annotations

from typing import Any


def use_random_weights() -> None:
    """Let ``from_pretrained`` make the model from its configuration, without reading weights."""
    import transformers

    major, minor, *_rest = transformers.__version__.split(".")
    name_of_dtype = "dtype" if (int(major), int(minor)) >= (4, 56) else "torch_dtype"
    usual_dtype = "auto" if int(major) >= 5 else None

    def from_pretrained(cls: Any, name: Any, /, *_arguments: Any, config: Any = None, **keywords: Any) -> Any:
        if keywords.get("quantization_config") is not None:
            raise ValueError("--random-weights: quantization_config is not supported, because it reads the weights")
        dtype = keywords.pop("dtype", keywords.pop("torch_dtype", usual_dtype))
        device = _device(keywords.pop("device_map", None))
        attention = keywords.pop("attn_implementation", None)
        if config is None:  # what names a field of the configuration changes it, as num_labels does
            config, _unused = transformers.AutoConfig.from_pretrained(name, return_unused_kwargs=True, **keywords)
        # "auto" is the configuration's dtype, which _from_config takes by itself; None is torch's default.
        given = {} if dtype == "auto" else {name_of_dtype: dtype or _default_dtype()}
        if attention is not None:
            given["attn_implementation"] = attention
        return cls._from_config(config, **given).to(device)

    transformers.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _default_dtype() -> Any:
    import torch

    return torch.get_default_dtype()


def _device(device_map: Any) -> Any:
    """Return where ``from_pretrained`` puts the whole model.

    Raises:
        ValueError: if it would be put on several devices.
    """
    if isinstance(device_map, dict) and list(device_map) == [""]:
        device_map = device_map[""]
    if isinstance(device_map, dict) or device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        raise ValueError(f"--random-weights: device_map={device_map!r} is not supported; one device is, or none")
    return "cpu" if device_map is None else device_map
