"""float8_llama.py with torchao's tensorwise recipe."""

import runpy

runpy.run_path("float8_llama.py", {"RECIPE": "tensorwise"})
