"""The optimizers of train/models/optimizer.py: the states of each, and the memory and traffic of its step.

Read in this order:
    shards.py        the shards that an optimizer updates
    torch_optim.py   AdamW, Adafactor and Muon of torch.optim
    dispatch.py      AdamW8bit of torchao; the optimizer of a setup: its states, step and time; in backward; on the CPU
"""
