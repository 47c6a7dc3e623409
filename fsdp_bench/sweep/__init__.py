"""Orchestration: trials are subprocesses, results are files. No torch."""
