"""The largest model, batch size or sequence length that fits, and the fewest GPUs that suffice."""
