"""Trains and measures with PyTorch. One trial is one process group. Imports spec, nothing else of the package.

``models/`` are the benchmark models, their data, loss and optimizers; ``wrapping/`` applies FSDP1, fully_shard or DDP;
``step.py`` is one optimizer step; ``measuring/`` reads memory, time and communication; ``processes/`` starts ranks and
runs a trial on each; ``dry_run/`` runs a step on tensors without data; ``calibrating/`` times single operations.
"""
