"""A Hugging Face config.json of recorded code: its sizes, and the settings that decide which code runs.

A code is recorded once for all sizes: its formulas have the fields of config.json as symbols. Two files whose settings
are equal run the same operators. Fields that are neither have nothing to do with memory: the base of rotary positions,
numbers of tokens, spreads of initial weights. The names are those of the configuration classes of transformers.
"""

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec

from fsdp_bench.spec.errors import SpecError, shown

_FIELDS: dict[str, tuple[str, ...]] = {
    name: tuple(fields)
    for name, fields in tomllib.loads(resources.files(__package__).joinpath("config_fields.toml").read_text()).items()
}
"""Names of fields, by what they decide."""

HIDDEN, HEADS, POSITIONS, LAYERS = (_FIELDS[name] for name in ("hidden", "heads", "positions", "layers"))
WINDOWS, PER_LAYER, ANYWHERE = (_FIELDS[name] for name in ("windows", "per_layer", "anywhere"))
SIZES = (*HIDDEN, *HEADS, *POSITIONS, *_FIELDS["sizes"])
"""Fields that are symbols in formulas."""

_ALIKE_ROTARY = ("default", "linear", "llama3", "yarn", None)
"""Kinds of rotary positions that differ only in their frequencies (modeling_rope_utils.py, ROPE_INIT_FUNCTIONS): the
others compute them anew in forward (dynamic_rope_update)."""

SHARED = "heads_share_hidden_size"
"""The setting of architectures whose heads together are as wide as the model, whatever config.json says."""


class ConfigClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules by which a configuration class of transformers reads a config.json."""

    defaults: dict[str, Any]
    """All fields that it knows. It ignores others."""
    other_names: dict[str, str] = {}
    """Names under which it also takes a field (attribute_map)."""
    patterns: dict[str, list[Any]] = {}
    """The values that repeat in lists with an item for each layer, where a config.json leaves them out."""


def complete(config: Mapping[str, Any], kind: ConfigClass) -> dict[str, Any]:
    """Return a config with its class's defaults and what code derives. Raises SpecError for impossible sizes."""
    own = kind.defaults.keys()
    given = {name if name in own else kind.other_names.get(name, name): value for name, value in config.items()}
    known = {*own, *ANYWHERE}
    full = kind.defaults | {name: value for name, value in given.items() if name in known or _is_token(name)}
    _add_heads(full)
    _add_lists(full, config, kind)
    if "n_inner" in full and full["n_inner"] is None:
        full["n_inner"] = 4 * _number(full, *HIDDEN)  # GPT2MLP
    if "num_decoder_layers" in full and full["num_decoder_layers"] is None:
        full["num_decoder_layers"] = full["num_layers"]  # T5Config
    if full.get("model_type") == "t5":
        # T5Config of transformers 5 always ties them; the field says whether the decoder's output is scaled.
        full["tie_word_embeddings"] = config.get("tie_word_embeddings") is not False
    if "num_labels" not in full and isinstance(full.get("id2label"), Mapping):
        full["num_labels"] = len(full["id2label"])
    return full


def _add_heads(full: dict[str, Any]) -> None:
    """Add the heads of keys and values and the width of a head, where a config leaves them to its class."""
    heads, hidden = _number(full, *HEADS), _number(full, *HIDDEN)
    full["num_key_value_heads"] = full.get("num_key_value_heads") or heads
    full[SHARED] = not full.keys() & {"head_dim", "d_kv", "kv_lora_rank"}
    if not full.keys() & {"d_kv", "kv_lora_rank"} and not full.get("head_dim"):
        if hidden % heads:
            raise SpecError(f"{HIDDEN[0]}: {hidden} is not allowed; a multiple of the {heads} attention heads")
        full["head_dim"] = hidden // heads


def _add_lists(full: dict[str, Any], config: Mapping[str, Any], kind: ConfigClass) -> None:
    """Add the lists with an item for each layer that a config leaves to its class."""
    layers = _number(full, *LAYERS)
    for name, pattern in kind.patterns.items():
        if not full.get(name):
            full[name] = [pattern[layer % len(pattern)] for layer in range(layers)]
            intervals = [config[other] for other in _FIELDS["intervals"] if other in config]
            full["interval_of_layers"] = [interval for interval in intervals if interval != len(pattern)]
        else:
            _listed(full, name)
    dense = full.get("first_k_dense_replace")
    if dense is not None and type(dense) is not int:
        raise SpecError(f"first_k_dense_replace: {shown(dense)} is not allowed; a whole number")


def layer_kinds(full: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer of a complete config; empty if its code knows one kind.

    Raises SpecError for what is no list, or one of another length than there are layers.
    """
    lists = [_listed(full, name) for name in PER_LAYER if full.get(name)]
    layers = _number(full, *LAYERS)
    for name in PER_LAYER:
        if full.get(name) and len(full[name]) != layers:
            raise SpecError(f"{name}: has {len(full[name])} items for {layers} layers")
    return [" ".join(map(str, kinds)) for kinds in zip(*lists, strict=True)]


_ALIKE = 4
"""The first layer may differ; the last ends with the model; three between them show that they are alike."""


def layers_to_record(full: Mapping[str, Any]) -> int:
    """Return how many layers of a complete config show which of them are alike."""
    first = int(full.get("first_k_dense_replace") or 0) + (2 if "num_decoder_layers" in full else 1)
    return enough_layers(layer_kinds(full), first)


def enough_layers(kinds: Sequence[str], first: int) -> int:
    """Return how many layers show which of them are alike: of these kinds, if ``first`` of them may differ."""
    each = period(kinds[first:])
    if each == 1:
        return first + _ALIKE + 1
    found = first + 3 * each + 1  # before the two that are alike one more that makes as much
    return found + (len(kinds) - found) % each


def period(kinds: Sequence[Any]) -> int:
    """Return after how many layers their kinds are the same again."""
    return next((n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n]), 1)


def symbols(full: Mapping[str, Any]) -> dict[str, int]:
    """Return the values of a config's symbols: sizes, and what code derives. Raises SpecError for a bad size."""
    found = {name: _number(full, name) for name in SIZES if full.get(name) is not None}
    heads, kv_heads = _number(full, *HEADS), full["num_key_value_heads"]
    if type(kv_heads) is not int or kv_heads < 1:  # one number, unlike a size that images have twice
        raise SpecError(f"num_key_value_heads: {shown(kv_heads)} is not allowed; a positive whole number")
    found["num_key_value_groups"], rest = divmod(heads, kv_heads)
    if rest:
        raise SpecError(f"num_key_value_heads: {kv_heads} is not allowed; a divisor of the {heads} attention heads")
    if "linear_num_key_heads" in found and "linear_num_value_heads" in found:
        keys, values = found["linear_num_key_heads"], found["linear_num_value_heads"]
        found["linear_value_heads_of_key_head"], rest = divmod(values, keys)
        if rest:
            raise SpecError(f"linear_num_key_heads: {keys} is not allowed; a divisor of the {values} heads of values")
    if "image_size" in found and "patch_size" in found:
        found["patches_a_side"] = found["image_size"] // found["patch_size"]
        found["num_patches"] = found["patches_a_side"] ** 2
        found["num_image_tokens"] = found["num_patches"] + 1  # and the class token, ViTEmbeddings
    return found


def settings(full: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides which code runs, for a complete config: fields that are set, and how sizes relate.

    A field that is not set, false, nought or empty is left out: transformers takes these for the same.
    """
    others = {*_FIELDS["without_effect"], *SIZES, *LAYERS, *WINDOWS}
    found = {name: value for name, value in full.items() if name not in others and not _is_token(name)}
    found |= {name: True for name, value in found.items() if ("dropout" in name or name.endswith("pdrop")) and value}
    found |= {name: full.get(name) is not None for name in _FIELDS["only_whether"]}
    heads, kv_heads = _number(full, *HEADS), full["num_key_value_heads"]
    found["key_value_heads"] = "one" if kv_heads == 1 else "all" if kv_heads == heads else "some"
    found["head_width"] = _uneven_heads(full)
    found["one_expert_per_token"] = full.get("num_experts_per_tok") == 1
    found |= _rotary(full)
    return {name: value for name, value in sorted(found.items()) if value not in (None, False, 0, 0.0, "", [], {})}


def _uneven_heads(full: Mapping[str, Any]) -> str | None:
    """Return which multiples a head's width is not, where that decides what attention runs; None for multiples of 8.

    FlashAttention pads heads to a multiple of 8 (pad_last_dim, aten/src/ATen/native/transformers/attention.cpp).
    Memory-efficient attention takes multiples of 8 in 16 bits and of 4 in fp32 (check_head_dim_size_mem_efficient).
    """
    widths = [full[name] for name in _FIELDS["head_widths"] if type(full.get(name)) is int]
    return next((f"no multiple of {n}" for n in (4, 8) if any(width % n for width in widths)), None)


def _is_token(name: str) -> bool:
    return name.endswith("_token_id")


def _rotary(full: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides which code runs: kinds that compute in forward, and the part of a head that is turned."""
    kinds: list[Any] = []
    part = full.get("partial_rotary_factor")
    for given in (full.get("rope_scaling"), full.get("rope_parameters")):
        if isinstance(given, Mapping):
            nested = [value for value in given.values() if isinstance(value, Mapping)]
            for each in nested or [given]:
                kinds.append(each.get("rope_type", each.get("type")))
                part = each.get("partial_rotary_factor", part)
    return {
        "rope_scaling": sorted({str(kind) for kind in kinds if kind not in _ALIKE_ROTARY}),
        "partial_rotary_factor": None if part == 1 else part,
    }


LOOPING_TYPES = ("qwen3_next",)
"""The model_types whose layers have linear attention where config.json names no layers."""


def loops_over_sequence(full: Mapping[str, Any]) -> bool:
    """Whether operators depend on the length: linear attention without kernels (torch_chunk_gated_delta_rule)."""
    kinds = _listed(full, "layer_types") if full.get("layer_types") else ()
    return full.get("model_type") in LOOPING_TYPES or "linear_attention" in kinds


def masked_from(full: Mapping[str, Any]) -> int | None:
    """Return the shortest sequence for which a mask is built because some layers see fewer tokens; None if all see all.

    masking_utils._ignore_causal_mask_sdpa: from as many tokens on as the sliding window has. ModernBERT's is half of
    its local_attention to either side.
    """
    if full.get("use_sliding_window") is False:
        return None
    kinds = full.get("layer_types")
    if isinstance(kinds, list) and kinds and all(kind == "full_attention" for kind in kinds):
        return None
    name = next((name for name in WINDOWS if isinstance(full.get(name), int)), None)
    if name is None:
        return None
    return int(full[name]) // 2 if name == "local_attention" else int(full[name])


def _listed(full: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = full[name]
    if not isinstance(found, list | tuple):
        raise SpecError(f"{name}: {shown(found)} is not allowed; a list with the kind of each layer")
    return found


def _number(full: Mapping[str, Any], *names: str) -> int:
    name = next((name for name in names if full.get(name) is not None), names[0])
    value = full.get(name)
    if isinstance(value, list | tuple) and value and all(each == value[0] for each in value):
        value = value[0]  # the two sides of an image
    if type(value) is not int or value < 1:
        raise SpecError(f"{name}: {shown(value)} is not allowed; a positive whole number")
    return value


class Architecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a config.json that must equal the recorded one. Sizes and the number of layers may differ."""

    model_type: str
    config_class: ConfigClass
    settings: dict[str, Any]
    layer_kinds: tuple[str, ...]
    """The kinds of the recorded layers; empty if its code knows one kind."""
    side: str
    """The side of the sliding window: ``within``, or ``beyond``, where a mask is built; empty without a window.
    ``4096 tokens`` of code that loops over the sequence, which is recorded for one length."""

    def differences(self, config: Mapping[str, Any], sequence_length: int) -> list[str]:
        """Return for what a recording does not hold, empty if it holds. Raises SpecError for an impossible config."""
        full = complete(config, self.config_class)
        theirs = settings(full)
        found = [
            f"{name} {shown(theirs.get(name))}, recorded with {shown(self.settings.get(name))}"
            for name in sorted(theirs.keys() | self.settings.keys())
            if theirs.get(name) != self.settings.get(name)
        ]
        kinds = layer_kinds(full)[: layers_to_record(full)]
        if tuple(kinds) != self.layer_kinds[: len(kinds)]:
            found.append("another order of the kinds of layers")
        if loops_over_sequence(full) and side_of(full, sequence_length) != self.side:
            found.append(f"sequences of {sequence_length} tokens, over which its code loops; recorded with {self.side}")
        elif side_of(full, sequence_length) != self.side:
            found.append(f"sequences of {sequence_length} tokens and a mask from {masked_from(full)} tokens on")
        return found


def side_of(full: Mapping[str, Any], sequence_length: int) -> str:
    """Return on which side of a sliding window sequences are, for a complete config; empty if it has none."""
    if loops_over_sequence(full):
        return f"{sequence_length} tokens"
    first = masked_from(full)
    return "" if first is None else "within" if sequence_length < first else "beyond"
