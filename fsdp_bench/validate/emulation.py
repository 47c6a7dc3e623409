"""Compares the memory of emulated trials (rank 0 alone) with that of trials with all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.validate.label import cell_label


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Peak allocated bytes of one model and setup, measured emulated and with all ranks."""

    label: str
    alone_bytes: int
    """Peak of rank 0 in the emulated trial."""
    among_peers_bytes: int
    """Peak of rank 0 in the trial with all ranks."""

    @property
    def relative(self) -> float:
        """``alone_bytes / among_peers_bytes - 1``."""
        return self.alone_bytes / self.among_peers_bytes - 1


def agreements(records: Sequence[TrialRecord]) -> list[Agreement]:
    """Pair each emulated trial with the trial with all ranks that has the same model, setup and device."""
    peers = {_key(record): record for record in _measured(records) if not record.alone}
    pairs = [(record, peers.get(_key(record))) for record in _measured(records) if record.device == "emulated"]
    return [
        Agreement(
            label=f"{alone.id} and {real.id} {cell_label(alone.model, alone.setup)}",
            alone_bytes=_peak(alone),
            among_peers_bytes=_peak(real),
        )
        for alone, real in pairs
        if real is not None
    ]


def _measured(records: Iterable[TrialRecord]) -> Iterable[TrialRecord]:
    return (record for record in records if record.outcome is Outcome.OK and _peak(record))


def _key(record: TrialRecord) -> bytes:
    torch = record.ranks[0].environment.get("torch", "unknown")
    model = msgspec.structs.replace(record.model, name="")
    return to_json((model, record.setup, record.hardware, record.ranks[0].device_name, torch))


def _peak(record: TrialRecord) -> int:
    memory = record.ranks[0].memory
    return (memory.peak_allocated_bytes or 0) if memory else 0
