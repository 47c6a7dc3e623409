"""Random examples in the place of datasets that are not on this machine: texts, chats, images and sound.

Their columns are those that the command says, or that are known of a dataset. Texts are long enough to be cut at a
script's own maximum, where that is not above the words that were asked for.
"""

from __future__ import annotations

import io
import os
import random
import wave
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from ..at_import import change_at_import

WORDS = ("a", "about", "all", "and", "as", "at", "be", "but", "by", "can", "do", "for", "from", "get", "go", "good")
"""Words that nearly every tokenizer has as one token each."""

_SAMPLING_RATE, _NUM_LABELS, _IMAGE_SIZE = 16000, 1000, "640x480"
_USUAL_SIZES = {
    **{"short": "64", "short chat": "64", "caption": "20", "audio": "30", "label": str(_NUM_LABELS)},
    **{"image": _IMAGE_SIZE, "images": _IMAGE_SIZE},
}
_SPLITS = ("train", "validation", "test")
_UNITS = {"audio": " s", "label": " classes", "image": " pixels", "images": " pixels"}

_COLUMNS = {
    "wikitext openwebtext c4 fineweb fineweb-edu slimpajama-627b imdb tinystories": {"text": "text"},
    "capybara ultrachat_200k no_robots tulu-3-sft-mixture": {"messages": "chat"},
    "finetome-100k": {"conversations": "sharegpt chat"},
    "ultrafeedback_binarized orpo-dpo-mix-40k": {"chosen": "chat", "rejected": "chat"},
    "alpaca alpaca-cleaned": {"instruction": "short", "input": "short", "output": "text", "text": "text"},
    "gpt4-llm-cleaned alpaca_2k_test": {"instruction": "short", "input": "short", "output": "text", "text": "text"},
    "gsm8k": {"question": "short", "answer": "text"},
    "tldr": {"prompt": "text", "completion": "short"},
    "deepmath-103k": {"prompt": "short chat", "solution": "short"},
    "llava-instruct-mix llava-instruct-mix-vsft": {"messages": "image chat", "images": "images"},
    "imagenet-1k food101": {"image": "image", "label": "label"},
    "beans": {"image": "image", "labels": "label"},
    "naruto-blip-captions pokemon-blip-captions": {"image": "image", "text": "caption"},
    "common_voice_11_0 common_voice_17_0": {"audio": "audio", "sentence": "caption"},
    "librispeech_asr": {"audio": "audio", "text": "caption"},
    "glue mrpc": {"sentence1": "caption", "sentence2": "caption", "label": "label"},
}
"""Columns of datasets that examples of frameworks use, each with its kind, by the last part of a dataset's name."""


class RandomExamples:
    """Makes examples: ``words`` in each text, and ``columns`` with what is in each, if the command says them."""

    def __init__(self, words: int, columns: dict[str, str], world_size: int) -> None:
        self._words, self._columns = words, columns
        self._num_rows = min(max(512, 16 * world_size), 4096)
        self.notes: list[str] = []
        """Sentences on what was made."""

    def install(self) -> None:
        """Replace what loads datasets, once the script imports it."""
        change_at_import({"datasets": self._change_datasets, "torchvision.datasets.folder": self._change_folders})
        change_at_import({"evaluate": self._change_metrics, "huggingface_hub._snapshot_download": _change_snapshots})

    def _change_datasets(self, module: ModuleType) -> None:
        load = module.load_dataset

        @wraps(load)
        def load_dataset(path: Any, *arguments: Any, **keywords: Any) -> Any:
            columns = self._columns_of(str(path))
            if os.path.exists(path) or ("/" not in str(path) and columns is None):
                return load(path, *arguments, **keywords)  # the user's files, or a builder such as json
            try:
                return load(path, *arguments, **keywords)
            except Exception:  # neither here nor in the cache: each version of datasets raises something else
                pass
            is_streaming = keywords.get("streaming", False)
            return self._dataset(module, str(path), columns, keywords.get("split"), is_streaming)

        module.load_dataset = load_dataset

    def _columns_of(self, name: str) -> dict[str, str] | None:
        known = {one: columns for names, columns in _COLUMNS.items() for one in names.split()}
        found = known.get(name.rpartition("/")[2].lower())
        return self._columns if self._columns and (found or "/" in name) else found

    def _dataset(
        self, datasets: ModuleType, name: str, columns: dict[str, str] | None, split: Any, is_streaming: bool
    ) -> Any:
        """Return what load_dataset returns. Raises OSError if the columns are not known."""
        if columns is None:
            raise OSError(
                f"--random-data: dataset {name!r} is not on this machine, and its columns are not known; say them, as"
                f" in --random-data messages=chat ({', '.join(KINDS)})"
            )
        made = datasets.Dataset.from_dict(*self._rows(datasets, columns))
        made.info.splits = datasets.splits.SplitDict()
        for part in _SPLITS:
            made.info.splits.add(datasets.SplitInfo(name=part, num_examples=self._num_rows))
        said = ", ".join(f"{column} ({self._said(kind)})" for column, kind in columns.items())
        self._note(f"{name}: {self._num_rows:,} random examples a split: {said} (--random-data).")
        if is_streaming:
            made = made.to_iterable_dataset()
        if split is None:
            both = datasets.IterableDatasetDict if is_streaming else datasets.DatasetDict
            return both(dict.fromkeys(_SPLITS, made))
        return [made for _part in split] if isinstance(split, (list, tuple)) else made

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _rows(self, datasets: ModuleType, columns: dict[str, str]) -> tuple[dict[str, list[Any]], Any]:
        """Return the values of each column, and the features where values alone do not say them."""
        drawn = random.Random(0)
        values = dict[str, list[Any]]()
        features = datasets.Features()
        for column, kind in columns.items():
            few = [self._value(kind, drawn) for _ in range(8)]
            values[column] = [few[row % len(few)] for row in range(self._num_rows)]
            feature = _feature(datasets, kind.partition(":")[0])
            features[column] = feature or datasets.Dataset.from_dict({column: few}).features[column]
        return values, features

    def _value(self, kind: str, drawn: random.Random) -> Any:
        """Return what one example has in a column of this kind."""
        return KINDS[kind.partition(":")[0]](self._size(kind), drawn)

    def _size(self, kind: str) -> str:
        name, _, size = kind.partition(":")
        return size or _USUAL_SIZES.get(name, str(self._words))

    def _said(self, kind: str) -> str:
        name = kind.partition(":")[0]
        return f"{name}, {self._size(kind)}{_UNITS.get(name, ' words')}"

    def _change_metrics(self, module: ModuleType) -> None:
        """Give metrics whose code a hub has the value zero."""
        load = module.load

        @wraps(load)
        def instead(path: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return load(path, *arguments, **keywords)
            except Exception:  # neither here nor in the cache
                self._note(f"{path}: a metric that is always 0 (--random-data).")
                return _Metric(path)

        module.load = instead

    def _change_folders(self, module: ModuleType) -> None:
        """Give folders that are not there as many classes as ImageNet has."""
        initialize = module.DatasetFolder.__init__

        def instead(dataset: Any, root: Any, loader: Any, *arguments: Any, **keywords: Any) -> None:
            if os.path.isdir(root):
                return initialize(dataset, root, loader, *arguments, **keywords)
            from PIL import Image

            image = Image.open(io.BytesIO(_image(_IMAGE_SIZE, random.Random(0))["bytes"])).convert("RGB")
            transforms = {name: keywords.get(name) for name in ("transform", "target_transform")}
            module.VisionDataset.__init__(dataset, str(root), **transforms)
            dataset.loader = lambda _path: image
            dataset.classes = [str(label) for label in range(_NUM_LABELS)]
            dataset.class_to_idx = {name: int(name) for name in dataset.classes}
            dataset.samples = dataset.imgs = [(f"{root}/{row}.jpg", row % _NUM_LABELS) for row in range(self._num_rows)]
            dataset.targets = [label for _path, label in dataset.samples]
            return self._note(f"{root}: {self._num_rows:,} random images, {_IMAGE_SIZE} pixels (--random-data).")

        module.DatasetFolder.__init__ = instead


def _change_snapshots(module: ModuleType) -> None:
    """Let a dataset be on the hub for who asks for none of its files, but whether it is there."""
    download = module.snapshot_download

    @wraps(download)
    def instead(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("repo_type") == "dataset" and keywords.get("ignore_patterns") in ("*", ["*"]):
            return ""
        return download(*arguments, **keywords)

    module.snapshot_download = instead


class _Metric:
    """A metric as evaluate.load returns one, whose value is zero."""

    def __init__(self, name: str) -> None:
        self._name = name

    def add_batch(self, **_values: Any) -> None:
        """Take predictions and references."""

    def compute(self, **_values: Any) -> dict[str, float]:
        """Return the value."""
        return {self._name: 0.0}


def _text(size: str, drawn: random.Random) -> str:
    return " ".join(drawn.choices(WORDS, k=int(size)))


def _chat(size: str, drawn: random.Random) -> list[dict[str, Any]]:
    """Return a question, the same in all chats as chosen and rejected answers have it in common, and an answer."""
    texts = _text(str(int(size) // 2), random.Random(0)), _text(str(int(size) - int(size) // 2), drawn)
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]


def _sharegpt_chat(size: str, drawn: random.Random) -> list[dict[str, Any]]:
    """Return a chat in the format of ShareGPT."""
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[one["role"]], "value": one["content"]} for one in _chat(size, drawn)]


def _image_chat(size: str, drawn: random.Random) -> list[dict[str, Any]]:
    """Return a chat whose first message has an image before its words."""
    both = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in _chat(size, drawn)]
    both[0]["content"].insert(0, {"type": "image", "text": None})
    return both


def _image(size: str, drawn: random.Random) -> dict[str, Any]:
    """Return a JPEG of so many pixels, of coarse noise."""
    from PIL import Image

    width, height = map(int, size.split("x"))
    file = io.BytesIO()
    Image.frombytes("RGB", (16, 16), drawn.randbytes(3 * 16 * 16)).resize((width, height)).save(file, "JPEG")
    return {"bytes": file.getvalue(), "path": None}


def _audio(size: str, drawn: random.Random) -> dict[str, Any]:
    """Return so many seconds of noise as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, _SAMPLING_RATE, 0, "NONE", ""))
        written.writeframes(drawn.randbytes(2 * _SAMPLING_RATE * int(size)))
    return {"bytes": file.getvalue(), "path": None}


KINDS: dict[str, Callable[[str, random.Random], Any]] = {
    **{"text": _text, "short": _text, "caption": _text},
    **{"chat": _chat, "image chat": _image_chat, "sharegpt chat": _sharegpt_chat},
    "short chat": lambda size, drawn: _chat(size, drawn)[:1],
    "image": _image,
    "images": lambda size, drawn: [_image(size, drawn)],
    "audio": _audio,
    "label": lambda size, drawn: drawn.randrange(int(size)),
}
"""Functions that make a value of each kind: of so many words, pixels, seconds or classes."""


def _feature(datasets: ModuleType, kind: str) -> Any:
    """Return the type of a column that its values do not say."""
    if kind == "images":
        return [datasets.Image()]
    if kind == "label":
        return datasets.ClassLabel(num_classes=_NUM_LABELS)
    if kind == "audio":
        return datasets.Audio(sampling_rate=_SAMPLING_RATE)
    return datasets.Image() if kind == "image" else None
