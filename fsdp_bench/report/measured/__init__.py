"""Measured results as tables on the terminal."""
