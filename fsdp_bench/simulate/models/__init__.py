"""The benchmark models in terms of operators.

Read in this order:
    transformer.py                Llama and GPT-2
    activation_checkpointing.py   full, selective and reentrant checkpointing of their blocks, and activation offload
    build.py                      builds a benchmark model or a recorded one, and checkpoints its blocks
"""
