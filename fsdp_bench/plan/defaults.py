"""Defaults of all commands and Python functions: precision, sequence length, GPUs per node."""

DEFAULT_PRECISION = "bf16-mixed"
DEFAULT_SEQUENCE_LENGTH = 4096
USUAL_GPUS_PER_NODE = 8
"""GPUs per node if no server is named. Most servers of the catalogue have 8."""
