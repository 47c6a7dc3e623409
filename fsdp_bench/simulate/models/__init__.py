"""The benchmark models in terms of operators, and activation checkpointing of their blocks."""
