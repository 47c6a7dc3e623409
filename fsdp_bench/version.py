"""The version of fsdp-bench, which pyproject.toml, pages, exports and results read."""

__version__ = "0.1.0"
