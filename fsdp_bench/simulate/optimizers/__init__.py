"""The optimizers of train/models/optimizer.py: the states of each, and the memory and traffic of its step.

Read in this order:
    shards.py        the shards that an optimizer updates
    dispatch.py      the optimizer of a setup: its states, its step, its time; in backward; on the CPU
    torch_optim.py   AdamW, Adafactor and Muon of torch.optim
    adamw_8bit.py    AdamW8bit of torchao
"""
