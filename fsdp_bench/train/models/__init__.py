"""The benchmark models in PyTorch with their data, losses and optimizers; and a user's own module."""
