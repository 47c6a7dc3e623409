"""The losses of train/models/loss.py: what the logits cost.

Read in this order:
    cross_entropy.py   the loss of a setup; torch's cross-entropy, whole or in chunks
    fused.py           the same, compiled; flash-attn's; unsloth's, on fp32 logits
    liger.py           Liger's, and the one that includes the head
"""
