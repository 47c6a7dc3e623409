"""Settings that every command and every Python function uses where the user gives none."""

DEFAULT_PRECISION = "bf16-mixed"
DEFAULT_SEQUENCE_LENGTH = 4096
