"""The benchmark models in terms of operators.

transformer.py                Llama and GPT-2
activation_checkpointing.py   full and selective checkpointing of their blocks
"""
