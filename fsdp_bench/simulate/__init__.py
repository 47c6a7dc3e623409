"""One training step of one rank, as a log of events: what is allocated, issued, sent and waited for. No torch.

Read in this order:
    events.py          the only event vocabulary
    tape.py            the recorder of events; storages and tensors without data
    autograd.py        the autograd graph and its engine
    operators/         what each operator allocates, saves for backward and computes
    losses.py          what each loss allocates, saves for backward and computes
    optimizers/        what each optimizer keeps, and what its step allocates
    models/            the benchmark models, and activation checkpointing
    recorded/          recorded models: any code, as it was recorded
    compiled/          blocks under torch.compile, as they were recorded
    wrappers/          FSDP1, fully_shard and DDP, in PyTorch's order and under PyTorch's names
    simulation.py      loading, and a step: forward, loss, backward, clipping, optimizer
    step.py            which steps are simulated: one in the steady state, or the first ones
    repeat.py          one block represents all blocks that are alike, and one step those that follow it
    candidate_ranks.py the ranks that can need the most memory
"""

TORCH_VERSION = "2.13"
"""The version whose code is written down here. `tools.validate --against dry-run` tells whether another agrees."""
