"""QLoRA's base: linear layers whose weights bitsandbytes keeps in 4 bits, on tensors without data.

As transformers loads a model with BitsAndBytesConfig(load_in_4bit, nf4, bnb_4bit_use_double_quant, and bfloat16 for
bnb_4bit_compute_dtype and bnb_4bit_quant_storage): a weight is four numbers in each element of a bf16 parameter, which
FSDP shards and gathers as any other. The QuantState that is needed to read them is a plain attribute, whole on every
rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fsdp_bench.spec.errors import MachineError, install_hint

PACKED = 4
"""Numbers of 4 bits in an element of a bf16 parameter."""
_LARGEST = 0.05
"""The largest weight of a model that is made for a trial."""
_running: list[str] = []
"""The operators of bitsandbytes that run, from the outermost to the innermost."""


def quantize(model: Any) -> None:
    """Replace the linear layers of a Hugging Face model on the meta device, all but its head, as transformers does.

    Raises MachineError if bitsandbytes is not installed.
    """
    try:
        import bitsandbytes as bnb
    except ImportError:
        raise MachineError(f"QLoRA needs bitsandbytes: {install_hint('qlora')}") from None
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    kept = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or [])]
    replace_with_bnb_linear(model, kept, config)
    maps = bnb.functional.name2qmap  # filled by the first quantization, with numbers that are computed
    maps["dynamic"] = torch.empty(256, dtype=torch.float32, device="meta")
    for _, module in quantized_layers(model):
        weight = module.weight
        whole = torch.empty(weight.shape, dtype=torch.bfloat16, device="meta")
        packed = bnb.nn.Params4bit(whole, requires_grad=False, **weight.__dict__)
        module.weight = packed._quantize("meta")
        module.quant_state = module.weight.quant_state
    maps.clear()
    model.is_loaded_in_4bit = True


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers whose weights are in 4 bits, with their names."""
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit" and hasattr(module, "quant_state"):
            yield name, module


def quantization_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what is needed to read the weights, with names: on every rank whole, and in no parameter or buffer.

    The code of the second quantization is one for all layers.
    """
    shared: set[int] = set()
    for name, module in quantized_layers(model):
        state = module.quant_state
        yield from ((f"{name}.{each}", getattr(state, each)) for each in ("absmax", "code", "offset"))
        yield f"{name}.absmax2", state.state2.absmax
        if id(state.state2.code) not in shared:
            shared.add(id(state.state2.code))
            yield "code2", state.state2.code


def materialize_states(model: nn.Module, home: torch.device, with_values: bool = False) -> None:
    """Put what is needed to read the weights on a device; the code of the second quantization is one for all layers.

    With values, any four bits are a number of at most _LARGEST.
    """
    code = None
    for _, module in quantized_layers(model):
        state = module.quant_state
        for owner, name in ((state, "absmax"), (state, "code"), (state, "offset"), (state.state2, "absmax")):
            setattr(owner, name, _empty_like(getattr(owner, name), home))
        code = _empty_like(state.state2.code, home) if code is None else code
        state.state2.code = code
        if with_values:
            from bitsandbytes.functional import get_4bit_type

            state.code.copy_(get_4bit_type("nf4", device=home))
            for zeros in (state.absmax, state.state2.absmax, code):
                zeros.zero_()
            state.offset.fill_(_LARGEST)  # what is added to absmax, once that is read


def _empty_like(tensor: Tensor, home: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=home)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let bitsandbytes do on tensors without data what it does on CUDA.

    bitsandbytes::gemm_4bit has a kernel that unpacks the weight into a temporary one and multiplies by that
    (backends/cuda/ops.py, _dequant_linear_fallback); for more than 1536 rows it always takes it, for fewer it may take
    one that needs no temporaries, by the GPU. And Linear4bit makes a Params4bit of what FSDP puts in the place of a
    parameter, which a tensor without data cannot become; what it makes takes no memory and no gradient. Without an
    argument torch.is_autocast_enabled, which PEFT asks, means CUDA; the fake accelerator has a CPU's autocast.
    """
    try:
        import bitsandbytes as bnb
    except ImportError:
        yield
        return
    matmul, is_enabled = bnb.matmul_4bit, torch.is_autocast_enabled

    def without_gradient(a: Tensor, b: Tensor, quant_state: Any, out: Any = None, bias: Any = None) -> Any:
        return matmul(a, b.detach(), quant_state=quant_state, out=out, bias=bias)

    def restore_state(module: Any) -> None:
        module.weight.quant_state = module.quant_state

    with (
        mock.patch.object(torch.ops.bitsandbytes.gemm_4bit, "default", _dequantize_and_multiply),
        mock.patch.object(bnb, "matmul_4bit", without_gradient),
        mock.patch.object(bnb.nn.modules, "fix_4bit_weight_quant_state_from_module", restore_state),
        mock.patch.object(torch, "is_autocast_enabled", lambda *device: is_enabled(*(device or ("cpu",)))),
    ):
        yield


def _dequantize_and_multiply(
    a: Tensor,
    b: Tensor,
    shape: Any,
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """Do what _dequant_linear_fallback does, allocation by allocation."""
    _running.append("bitsandbytes::gemm_4bit")
    try:
        if absmax_8bit is not None:
            assert absmax_code is not None
            assert absmax_offset is not None
            unpacked = torch.ops.bitsandbytes.dequantize_blockwise.default(
                absmax_8bit, absmax, absmax_code, 256, torch.float32
            )
            absmax = unpacked + absmax_offset
        weight = torch.ops.bitsandbytes.dequantize_4bit.default(b, absmax, blocksize, quant_type, shape, a.dtype)
        return nn.functional.linear(a, weight, bias)
    finally:
        _running.pop()


def outer_operator() -> str:
    """Return the operator of bitsandbytes that runs what is dispatched now; empty if none does.

    On CUDA that operator is one kernel of the dispatcher, and no dispatch mode sees what it runs: selective
    checkpointing, which keeps what aten::mm returns, keeps nothing of a product with an unpacked weight.
    """
    return _running[-1] if _running else ""
