"""The operators: what each allocates, saves for backward, frees and computes, by its name in PyTorch.

Read in this order:
    core.py                   pointwise operators, matrix products, embedding
    norms.py                  RMSNorm and LayerNorm
    attention.py              scaled_dot_product_attention
    unfused_attention.py      the same of single operators, where no fused kernel takes the tensors
    clipping.py               clip_grad_norm_, and the gradient scaler of fp16
    kernels.py                which implementation of an operator runs, and on dtypes of how many bytes
    kernel_workspaces.py      what CUDA's kernels allocate beside their results: sums, batched copies, attention
"""
