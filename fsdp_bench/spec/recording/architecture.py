"""Architecture: which config.json files a recording for all sizes holds for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fsdp_bench.spec.errors import shown
from fsdp_bench.spec.recording.config import (
    ConfigClass,
    complete,
    layer_kinds,
    layers_to_record,
    loops_over_sequence,
    masked_from,
    settings,
)


class Architecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a config.json must have in common with the recorded one. Sizes and the number of layers may differ."""

    model_type: str
    config_class: ConfigClass
    settings: dict[str, Any]
    layer_kinds: tuple[str, ...]
    """The kinds of the recorded layers; empty if its code knows one kind."""
    side: str
    """The side of the sliding window: ``within``, or ``beyond``, where a mask is built; empty without a window.
    ``4096 tokens`` of code that loops over the sequence, which is recorded for one length."""

    def differences(self, config: Mapping[str, Any], sequence_length: int) -> list[str]:
        """Return for what a recording does not hold for a config.json; empty if it does.

        Raises:
            SpecError: for a config.json that no model can have.
        """
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
