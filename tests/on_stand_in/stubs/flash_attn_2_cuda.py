"""Stands for the extension of attention kernels, which the loss does not use and only a CUDA compiler builds."""
