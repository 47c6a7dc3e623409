"""The analytic model: what one training step of one rank allocates, as events, and replays of them. No torch."""

TORCH_VERSION = "2.13"
"""The version whose code is written down here; `validate --against dry-run` tells whether another agrees."""
