"""The operators: what each allocates, saves for backward, frees and computes, by its name in PyTorch.

Read in this order:
    core.py                   pointwise operators, matrix products, embedding
    norms.py                  RMSNorm and LayerNorm
    attention.py              scaled_dot_product_attention
    unfused_attention.py      the same of single operators, where no fused kernel takes the tensors
    optimizer.py              what an optimizer updates (the optimizers are in simulate/optimizers/)
    clipping.py               clip_grad_norm_
    scaler.py                 the gradient scaler of fp16
    precision.py              bytes of the dtypes of parameters, compute and reduction
    kernels.py                which implementation of an operator runs
    attention_workspaces.py   what CUDA's attention kernels allocate beside their results
    reduction_workspaces.py   what CUDA's sums over rows allocate beside their results
    batched_copies.py         what fully_shard's batched copies allocate for their arguments
"""
