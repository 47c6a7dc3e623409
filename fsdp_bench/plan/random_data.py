"""Reads what --random-data says, and gives a rehearsal the catalogue's configurations."""

import re
from typing import Any

from fsdp_bench.catalog.loader import Catalog
from fsdp_bench.catalog.user_file import names_of
from fsdp_bench.rehearse.inside.replace.hub import model_key
from fsdp_bench.rehearse.inside.replace.random_examples import KINDS
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.subprocesses.rehearsal import RandomData

_SIZE = re.compile(r"[1-9]\d*(x[1-9]\d*)?")


def read_random_data(asked: str | bool | None, catalog: Catalog) -> RandomData | None:
    """Read what --random-data says: nothing, the words of a text, ``COLUMN=KIND`` or ``COLUMN=KIND:SIZE``.

    Raises SpecError for anything else.
    """
    if asked is None or asked is False:
        return None
    tokens, columns = RandomData().tokens, dict[str, str]()
    for word in filter(None, ("" if asked is True else asked).split(",")):
        column, is_column, kind = map(str.strip, word.partition("="))
        if is_column and _is_kind(kind):
            columns[column] = kind
        elif word.strip().isdecimal() and int(word) >= 2:
            tokens = int(word)
        else:
            raise SpecError(
                f"random-data: {shown(word)} is not allowed; the words of a text, 2 or more, or COLUMN=KIND[:SIZE]:"
                f" {', '.join(KINDS)}; as in photo=image:640x480"
            )
    names = {name: model for model in catalog.models() for name in (*names_of(model), *model.same_architecture)}
    configs = {model_key(name): _with_dtype(model.hf_config()) for name, model in names.items()}
    return RandomData(tokens=tokens, columns=columns, configs=configs)


def _is_kind(text: str) -> bool:
    name, has_size, size = text.partition(":")
    is_image = name in ("image", "images")
    return name in KINDS and (not has_size or (_SIZE.fullmatch(size) is not None and ("x" in size) == is_image))


def _with_dtype(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the dtype in which large language models are published; the catalogue has none."""
    is_older = config["model_type"] == "gpt2" or not "".join(config.get("architectures", [])).endswith("ForCausalLM")
    return config if is_older else {**config, "torch_dtype": "bfloat16"}
