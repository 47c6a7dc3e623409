"""Measuring a running trial: memory by phase, communication, time."""
