"""Makes higher-order operators and compiled code work under TorchDispatchMode on older versions of torch.

Newer ones ask the mode: ``supports_higher_order_operators``, ``ignore_compile_internals`` (neither is in torch 2.8).
"""

from __future__ import annotations

import functools
from typing import Any

from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

COMPILES_UNDER_MODES = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether code that was compiled without a mode runs under one that says ``ignore_compile_internals``."""


def give_higher_order_operators(mode_type: type[TorchDispatchMode]) -> None:
    """Give flex_attention and the like to a mode, as newer versions do if it ``supports_higher_order_operators``."""
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    original = HigherOrderOperator.dispatch

    @functools.wraps(original)
    def dispatch(self: Any, key: Any, *arguments: Any, **keywords: Any) -> Any:
        rules = self.python_key_table if hasattr(self, "python_key_table") else self.python_key_mode_table
        rules.setdefault(mode_type, functools.partial(_given_to_mode, self))
        return original(self, key, *arguments, **keywords)

    HigherOrderOperator.dispatch = dispatch


def _given_to_mode(operator: Any, mode: TorchDispatchMode, *arguments: Any, **keywords: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), arguments, keywords)


def build_guards_under(mode: TorchDispatchMode) -> None:
    """Let compiled code be taken under a mode.

    Dynamo compiles with all modes off (CatchErrorsWrapper in torch/_dynamo/convert_frame.py), and its guards compare
    the dispatch keys of tensors, to which a mode adds its own: no later call would be like the one that was compiled.
    """
    from torch._dynamo.guards import CheckFunctionManager

    original = CheckFunctionManager.__init__

    @functools.wraps(original)
    def build(self: Any, *arguments: Any, **keywords: Any) -> None:
        with mode:
            original(self, *arguments, **keywords)

    CheckFunctionManager.__init__ = build
