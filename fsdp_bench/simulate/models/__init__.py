"""The benchmark models in terms of operators.

Read in this order:
    transformer.py                Llama and GPT-2
    activation_checkpointing.py   full and selective checkpointing of their blocks
    reentrant.py                  reentrant checkpointing
    activation_offload.py         their saved tensors in host memory
    build.py                      builds a benchmark model or a recorded one
"""
