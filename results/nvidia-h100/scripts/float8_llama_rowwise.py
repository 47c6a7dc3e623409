"""float8_llama.py with torchao's rowwise recipe."""

import runpy

runpy.run_path("float8_llama.py", {"RECIPE": "rowwise"})
