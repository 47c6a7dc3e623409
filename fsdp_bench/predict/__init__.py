"""The analytic model: what one training step of one rank allocates, as events, and replays of them. No torch."""
