"""The benchmark models in terms of operators.

Read in this order:
    transformer.py                Llama and GPT-2
    activation_checkpointing.py   full and selective checkpointing of their blocks, and activation offload
    reentrant.py                  reentrant checkpointing
    build.py                      builds a benchmark model or a recorded one
"""
