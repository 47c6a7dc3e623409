"""Reads where to look: a card's memory from the command line, and what a calibration says of it."""

from __future__ import annotations

from fsdp_bench.plan.usable_memory import sized, stated_headroom, without_context

__all__ = ["sized", "stated_headroom", "without_context"]
