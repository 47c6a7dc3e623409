"""The benchmark models in PyTorch with their data, losses and optimizers; and a user's own module.

Read in this order:
    transformer.py       llama and gpt2
    data.py              random token batches
    loss.py              cross-entropy: plain, chunked, compiled, other packages'
    optimizer.py         AdamW and SGD
    dtypes.py            torch's dtypes by name
    attention_kernel.py  which kernel attention runs: FlashAttention, cuDNN, memory-efficient
    user_module.py       a user's own model, for dry runs and recordings
    huggingface.py       builds a Hugging Face model and its batch from a config.json
"""
