"""Orchestration: trials are subprocesses, results are files. No torch.

The public function ``fsdp_bench.sweep()`` has this package's name, so the package itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that is called as its function of the same name; Python knows only one name for both."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run a sweep file: see ``fsdp_bench.sweep.session.sweep``."""
        from fsdp_bench.sweep.start import sweep

        return sweep(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
