"""What each optimizer of train/models/optimizer.py keeps, and what its step allocates for a moment and moves.

Read in this order (what they update is in operators/optimizer.py):
    dispatch.py      the optimizer of a setup: its states, its step, its time; in backward; on the CPU
    adamw.py         AdamW and SGD of torch.optim
    adafactor.py     Adafactor of torch.optim
    adamw_8bit.py    AdamW8bit of torchao
    muon.py          Muon of torch.optim, and AdamW of what is no matrix
"""
