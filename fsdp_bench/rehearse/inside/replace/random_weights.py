"""Models without a checkpoint: what a hub or a server would have is made from the configuration alone.

A model of transformers or diffusers is built from its configuration; quantized weights, which are made from a
checkpoint's, from one that holds nothing. torchvision and timm build the model first: its weights stay as they are.
"""

from __future__ import annotations

import json
import tempfile
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..at_import import change_at_import
from .checkpoints import safetensors_header

_FILE_BYTES = 5 * 10**9
"""The largest file of a published checkpoint: a machine may refuse to map one larger than its memory."""


def use_random_weights(folder: Path) -> None:
    """Let whatever would read or download published weights make random ones; ``folder`` takes empty checkpoints."""

    def change_transformers(module: ModuleType) -> None:
        load = module.PreTrainedModel.from_pretrained.__func__
        module.PreTrainedModel.from_pretrained = classmethod(_from_config(load, folder))

    changes = {
        "transformers.modeling_utils": change_transformers,
        "diffusers.models.modeling_utils": _change_diffusers,
        "torchvision.models._api": _change_torchvision,
        "timm.models._builder": _change_timm,
    }
    change_at_import(changes)


def _from_config(load: Any, folder: Path) -> Any:
    """Return transformers' ``from_pretrained`` without reading weights."""

    def from_pretrained(cls: Any, name: Any, /, *arguments: Any, config: Any = None, **keywords: Any) -> Any:
        import transformers

        if keywords.get("quantization_config") is not None:
            return load(cls, _empty_checkpoint(cls, name, folder, config), *arguments, config=config, **keywords)
        major, minor, *_rest = transformers.__version__.split(".")
        name_of_dtype = "dtype" if (int(major), int(minor)) >= (4, 56) else "torch_dtype"
        usual_dtype = "auto" if int(major) >= 5 else None
        dtype = keywords.pop("dtype", keywords.pop("torch_dtype", usual_dtype))
        device = _device(keywords.pop("device_map", None))
        attention = keywords.pop("attn_implementation", None)
        if config is None:  # what names a field of the configuration changes it, as num_labels does
            config, _unused = transformers.AutoConfig.from_pretrained(name, return_unused_kwargs=True, **keywords)
        # "auto" is the configuration's dtype, which _from_config takes by itself; None is torch's default.
        given = {} if dtype == "auto" else {name_of_dtype: dtype or torch.get_default_dtype()}
        if attention is not None:
            given["attn_implementation"] = attention
        return cls._from_config(config, **given).to(device)

    return from_pretrained


def _empty_checkpoint(cls: Any, name: Any, folder: Path, config: Any) -> str:
    """Return a folder with a configuration and a checkpoint of its model whose files are all holes."""
    import transformers

    config = config if config is not None else transformers.AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model = cls._from_config(config)
    saved = model.state_dict().keys()
    tensors = {key: one for key, one in (*model.named_parameters(), *model.named_buffers()) if key in saved}
    place = Path(tempfile.mkdtemp(dir=folder, prefix="empty-"))
    config.save_pretrained(place)
    starts = accumulate((one.nbytes for one in tensors.values()), initial=0)
    files = {key: f"model-{start // _FILE_BYTES}.safetensors" for key, start in zip(tensors, starts, strict=False)}
    for name in set(files.values()):
        header, num_bytes = safetensors_header(
            {key: tensors[key] for key in files if files[key] == name}, {"format": "pt"}
        )
        with open(place / name, "wb") as file:
            file.write(header)
            file.truncate(len(header) + num_bytes)
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return str(place)


def _device(device_map: Any) -> Any:
    """Return where ``from_pretrained`` puts the model. Raises ValueError for several devices."""
    if isinstance(device_map, dict) and list(device_map) == [""]:
        device_map = device_map[""]
    if isinstance(device_map, dict) or device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        raise ValueError(f"--random-weights: device_map={device_map!r} is not supported; one device is, or none")
    return "cpu" if device_map is None else device_map


def _change_diffusers(module: ModuleType) -> None:
    def from_pretrained(
        cls: Any, name: Any, /, *, subfolder: str | None = None, torch_dtype: Any = None, **_others: Any
    ) -> Any:
        model = cls.from_config(cls.load_config(name, subfolder=subfolder)).eval()
        return model if torch_dtype is None else model.to(torch_dtype)

    module.ModelMixin.from_pretrained = classmethod(from_pretrained)


def _change_torchvision(module: ModuleType) -> None:
    """Give the weights of a model that has just been built: none, which are loaded into nothing."""
    module.WeightsEnum.get_state_dict = lambda _self, *_arguments, **_keywords: _Unchanged()
    load = torch.nn.Module.load_state_dict

    def load_state_dict(self: Any, state_dict: Any, *arguments: Any, **keywords: Any) -> Any:
        return None if isinstance(state_dict, _Unchanged) else load(self, state_dict, *arguments, **keywords)

    torch.nn.Module.load_state_dict = load_state_dict


class _Unchanged(dict[str, Any]):
    """The weights that a model has."""


def _change_timm(module: ModuleType) -> None:
    module.load_pretrained = lambda *_arguments, **_keywords: None
