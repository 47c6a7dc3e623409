"""Torch-bound: one trial is one process group. Knows spec, nothing else of the package."""
