"""Trains and measures with PyTorch. One trial is one process group. Imports spec, nothing else of the package.

Read in this order:
    models/       the benchmark models, their data, loss and optimizers
    wrapping/     fsdp(): applies FSDP1, fully_shard or DDP
    step.py       one optimizer step
    measuring/    memory, time and communication of a step
    processes/    starts ranks and runs a trial on each; how an exception becomes an outcome
    dry_run/      a training step on tensors without data
    recording/    records a model's code once, so that it can be predicted
    calibrating/  times single operators, copies and collectives
"""
