"""Records what torch.compile makes of blocks, the benchmark models' and transformers': with the CUDA build and Triton.

Kernels need not run: the stand-in for NVIDIA's libraries will do. Read in this order:
    main.py           ``python -m tools.compiled.main FILE``: all blocks, as the catalogue keeps them
    variants.py       which blocks are recorded, each in its model, and at which sizes
    compile_block.py  compiles one block at one size, in the order that is asked for; returns what Inductor wrote
    wrapper_code.py   reads the function that Inductor wrote
    kernels.py        the operators that it calls as they are
    formulas.py       functions of several sizes into one, with formulas
"""
