"""What every command and every Python function uses where the user gives nothing else."""

DEFAULT_PRECISION = "bf16-mixed"
DEFAULT_SEQUENCE_LENGTH = 4096
USUAL_GPUS_PER_NODE = 8
"""GPUs of a node where no server is named; most of the catalogue's servers have as many."""
