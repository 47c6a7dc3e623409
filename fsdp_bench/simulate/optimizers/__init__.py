"""The optimizers of train/models/optimizer.py: the states of each, and the memory and traffic of its step.

Read in this order:
    shards.py        the shards that an optimizer updates
    dispatch.py      the optimizer of a setup: its states, its step, its time; in backward; on the CPU
    adamw.py         AdamW and SGD of torch.optim
    adafactor.py     Adafactor of torch.optim
    adamw_8bit.py    AdamW8bit of torchao
    muon.py          Muon of torch.optim, and AdamW for parameters that are no matrix
"""
