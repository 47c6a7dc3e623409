"""What a script would load from a hub and this machine does not have: configurations, tokenizers, processors, datasets.

With --random-data nothing is downloaded. What is in a local folder or in the user's cache is read from there. A missing
configuration is the catalogue's. A missing tokenizer has the configuration's vocabulary and makes each word one token;
processors of images and sound are those of the model's type, with the sizes that the configuration says. A missing
dataset has random examples (random_examples.py).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from ..at_import import change_at_import
from .random_examples import WORDS, RandomExamples

_CONFIG_FILES = ("config.json",)
_OWN_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Files of which a repository with a tokenizer or a processor has one."""

_OF_MODELS = ("models.auto.configuration_auto", "models.auto.auto_factory", "configuration_utils", "modeling_utils")
_OF_DATA = (
    *("models.auto.tokenization_auto", "models.auto.processing_auto", "models.auto.image_processing_auto"),
    *("models.auto.feature_extraction_auto", "models.auto.video_processing_auto", "tokenization_utils_base"),
    *("processing_utils", "image_processing_base", "feature_extraction_utils", "video_processing_utils"),
)
"""Modules of transformers whose classes have a ``from_pretrained``."""

_OF_TRAINING = {"base", "pt", "instruct", "it", "chat", "hf"}
"""Words of a model's name that say how its weights were trained."""


class MissingFiles:
    """Makes what a hub has: ``configs`` by ``model_key``, and examples in the datasets."""

    def __init__(self, asked: dict[str, Any], folder: Path, world_size: int) -> None:
        self._configs, self._folder = asked["configs"], folder
        self._examples = RandomExamples(asked["tokens"], asked["columns"], world_size)
        self._made: dict[str, str] = {}
        self._notes: list[str] = []

    def install(self) -> None:
        """Replace what loads from a hub, once the script imports it."""
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        change_at_import({f"transformers.{name}": _redirecting(self._with_config) for name in _OF_MODELS})
        change_at_import({f"transformers.{name}": _redirecting(self._with_tokenizer) for name in _OF_DATA})
        self._examples.install()

    def notes(self) -> list[str]:
        """Say what was made, a sentence each."""
        return self._notes + self._examples.notes

    def _with_config(self, name: str, _subfolder: str) -> str:
        """Return where the configuration is: where it was said, or a folder with the catalogue's."""
        if os.path.exists(name) or _cached(name, _CONFIG_FILES) is not None:
            return name
        return self._folder_for(name, None)

    def _with_tokenizer(self, name: str, subfolder: str) -> str:
        """Return where a tokenizer and a processor are: where it was said, or a folder with random ones.

        A pipeline of diffusers has the vocabulary of its folder ``tokenizer`` in ``text_encoder``.
        """
        if not os.path.exists(name):
            is_cached = _cached(name, _OWN_FILES) is not None
            return name if is_cached else self._folder_for(name, _cached(name, _CONFIG_FILES))
        config = os.path.join(name, subfolder.replace("tokenizer", "text_encoder"), *_CONFIG_FILES)
        has_own = any(os.path.exists(os.path.join(name, subfolder, file)) for file in _OWN_FILES)
        known = os.path.join(name, subfolder) if subfolder else name
        return self._folder_for(known, config) if os.path.exists(config) and not has_own else name

    def _folder_for(self, name: str, config_file: str | None) -> str:
        """Return a folder with all but the weights, made once. Raises OSError without a configuration."""
        if name in self._made:
            return self._made[name]
        if config_file is not None:
            config, source = json.loads(Path(config_file).read_text()), ""
        elif (config := self._configs.get(model_key(name))) is not None:
            dtype = f", with {config['torch_dtype']} weights" if "torch_dtype" in config else ""
            source = f"the configuration is the catalogue's{dtype}; "
        else:
            raise OSError(
                f"--random-data: the configuration of {name!r} is neither on this machine nor in the catalogue; put"
                " its config.json into a folder, and let the script load that folder"
            )
        self._notes.append(f"{name}: {source}the tokenizer random, a token a word (--random-data).")
        folder = tempfile.mkdtemp(dir=self._folder, prefix="hub-")
        self._made[name] = folder
        (Path(folder) / "config.json").write_text(json.dumps(config))
        _write_tokenizer(Path(folder), config)
        _write_processor(Path(folder), config)
        return folder


def model_key(name: str) -> str:
    """Return what the names of a model's published weights share: without owner, words on training, and separators."""
    words = re.split(r"[-_ ]+", name.rpartition("/")[2].lower())
    return re.sub(r"[^a-z0-9]", "", "".join(word for word in words if word not in _OF_TRAINING))


def _redirecting(place: Callable[[str, str], str]) -> Callable[[ModuleType], None]:
    """Return a change of a module: the ``from_pretrained`` of its classes reads another folder than it is told."""

    def change(module: ModuleType) -> None:
        for one in list(vars(module).values()):
            if isinstance(one, type) and one.__module__ == module.__name__ and "from_pretrained" in vars(one):
                load = vars(one)["from_pretrained"].__func__
                one.from_pretrained = classmethod(_reading(load, place))

    return change


def _reading(load: Callable[..., Any], place: Callable[[str, str], str]) -> Callable[..., Any]:
    @wraps(load)
    def from_pretrained(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        name = arguments[0] if arguments else keywords.pop("pretrained_model_name_or_path", None)
        if isinstance(name, (str, os.PathLike)):
            found = place(os.fspath(name), keywords.get("subfolder") or "")
            if found != os.fspath(name):
                keywords.pop("subfolder", None)  # of what was made
            name = found
        return load(cls, name, *arguments[1:], **keywords)

    return from_pretrained


def _cached(name: str, files: tuple[str, ...]) -> str | None:
    """Return the place of the first of these files that the user's cache has of a repository."""
    from huggingface_hub import try_to_load_from_cache

    for file in files:
        try:
            found = try_to_load_from_cache(name, file)
        except ValueError:  # not a name that a repository can have
            return None
        if isinstance(found, str):
            return found
    return None


_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}{% if message['content'] is string %}{% generation %}"
    "{{ message['content'] + ' ' }}{% endgeneration %}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ IMAGE }}{% elif part['text'] %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}"
    "{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
_USUAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_MASK_TOKENS = {"mask_token": "<mask>", "cls_token": "<cls>", "sep_token": "<sep>"}
_MEDIA_TOKENS = {
    **{"image_token": "<image>", "video_token": "<video>", "audio_token": "<audio>", "boi_token": "<boi>"},
    **{"eoi_token": "<eoi>", "vision_start_token": "<vision_start>", "vision_end_token": "<vision_end>"},
}
"""Special tokens by their names in transformers, with the text that a random tokenizer has for them."""


def _write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """Write a tokenizer of the configuration's vocabulary: a word is a token, and each special token has its ID."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = {**config, **config.get("text_config", {})}
    size = int(inner.get("vocab_size", 32000))
    special = _special_tokens({**inner, **config}, size)
    vocabulary = dict(special.values())
    taken = set(vocabulary.values())
    free = [index for index in range(size) if index not in taken]
    vocabulary |= dict(zip(WORDS, free, strict=False))
    vocabulary |= {f"word{index}": index for index in free[len(WORDS) :]}
    unknown = f"word{free[-1]}" if len(free) > len(WORDS) else WORDS[0]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(sorted({token for token, _index in special.values()}))
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = {name: token for name, (token, _index) in special.items()}
    image = texts.get("image_token", "")
    template = _CHAT_TEMPLATE.replace("IMAGE", repr(f" {image} " if image else ""))
    (folder / "chat_template.jinja").write_text(template)  # where processors look for it
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: token for name, token in texts.items() if name not in _MEDIA_TOKENS},
        "unk_token": unknown,
        "model_max_length": inner.get("max_position_embeddings") or inner.get("n_positions") or 1 << 20,
        "extra_special_tokens": {name: token for name, token in texts.items() if name in _MEDIA_TOKENS},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _special_tokens(config: dict[str, Any], size: int) -> dict[str, tuple[str, int]]:
    """Return the special tokens by their names, each with its text and its ID: the configuration's, or a free one."""
    taken = {value for value in config.values() if isinstance(value, int)}
    spare = (index for index in range(size - 1, -1, -1) if index not in taken)
    tokens = dict[str, tuple[str, int]]()
    texts = dict[int, str]()
    for name, text in {**_USUAL_TOKENS, **_MEDIA_TOKENS, **_MASK_TOKENS}.items():
        index = config.get(f"{name}_id", config.get(f"{name}_index"))
        index = index[0] if isinstance(index, list) and index else index
        if not isinstance(index, int) or not 0 <= index < size:
            if name in _MEDIA_TOKENS:
                continue
            index = next(spare)
        tokens[name] = (texts.setdefault(index, text), index)
    return tokens


def _write_processor(folder: Path, config: dict[str, Any]) -> None:
    """Write what the model type's own processors need beside their defaults: sizes."""
    vision = config.get("vision_config") or config
    images = dict[str, Any]()
    if isinstance(size := vision.get("image_size"), int):
        images = {name: {"height": size, "width": size} for name in ("size", "crop_size")}
    if "num_mel_bins" in config:
        images["feature_size"] = config["num_mel_bins"]
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    whole = dict[str, Any]()
    if str(config.get("model_type", "")).startswith("llava"):
        whole = {"patch_size": vision.get("patch_size", 14), "num_additional_image_tokens": 1}
        whole["vision_feature_select_strategy"] = config.get("vision_feature_select_strategy", "default")
    (folder / "processor_config.json").write_text(json.dumps(whole))
