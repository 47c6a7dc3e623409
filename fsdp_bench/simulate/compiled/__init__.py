"""Blocks under torch.compile: the buffers of the code that Inductor wrote for them, as it was recorded.

Read in this order:
    choose.py   which recording a setup runs, and why a setup is predicted for eager instead
    block.py    runs a recording, one node of the graph for a block; what tuning its kernels allocates
"""
