"""The pages (README.md, docs/) are run: what they print is what fsdp-bench prints."""
