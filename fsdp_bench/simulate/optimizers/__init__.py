"""What each optimizer of train/models/optimizer.py keeps, and what its step allocates for a moment and moves.

Read in this order (what they update is in operators/optimizer.py):
    dispatch.py      the optimizer of a setup: its states, its step, its time
    adamw.py         AdamW and SGD of torch.optim
    adafactor.py     Adafactor of torch.optim
    adamw_8bit.py    AdamW8bit of torchao
    muon.py          Muon of torch.optim, and AdamW of what is no matrix
    in_backward.py   one optimizer a parameter, called in backward
    offloaded.py     CPUOffloadOptimizer of torchao
"""
