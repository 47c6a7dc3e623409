"""Predictions, dry runs and searches as text on the terminal: the answer first, then its reasons."""
