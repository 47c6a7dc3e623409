"""The FLOPs and bytes of a rehearsed step's operator, as rates/ understands it; None where nobody knows its time.

Matrix products and attention are bound by what they compute, the rest by memory: an operator reads its tensor arguments
and writes its results, and what it changes in place is read and written. Where that is not so, a table here says so.
"""

import math
import re
from collections.abc import Callable, Sequence

import msgspec

from fsdp_bench.simulate.events import FAST_ACCUMULATION, IN_HOST_MEMORY, SCALES_OF_ROWS, Work
from fsdp_bench.simulate.recorded.bind import slice_backward, work_of
from fsdp_bench.spec.pointwise import COPIES, STRIDED, Operand, is_strided_cat, path_of
from fsdp_bench.spec.subprocesses.issued import HostOperator, IssuedOperator, IssuedTensor, TensorNumbers

Tensors = Sequence[IssuedTensor]
"""IssuedStep.tensors."""

Operator = IssuedOperator | HostOperator

_MEMORY_BOUND = ("aten::", "prims::", "fsdp::", "_c10d_functional::")
"""Namespaces of operators that are bound by memory, unless they are among the following."""

_BOUND_BY_MORE = re.compile(
    r"aten::_?("
    r".*attention.*|.*conv(olution)?\d?d?(_backward|_transpose.*)?|.*_?(lstm|gru|rnn)(_.*)?|linalg_(?!vector_norm).*|fft_.*"
    r"|cholesky.*|svd|geqrf|ormqr|lu_.*|triangular_solve.*"
    r"|scaled_.*mm.*|int_mm|weight_int.*|sparse_.*|.*cdist.*|grid_sampler.*|ctc_loss.*|embedding_bag.*"
    r")"
)
"""Operators whose time the bytes of their arguments do not tell."""

_MANY_PASSES = re.compile(
    r"aten::_?(sort|argsort|topk|kthvalue|msort|unique.*|nonzero.*|bincount|histc|multinomial|mode|cummax|cummin)"
)
"""Operators that pass over their arguments an unknown number of times. Small ones take hardly longer than a launch."""

SMALL_BYTES = 1 << 20


_FP8 = "float8_e4m3fn", "float8_e5m2"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Dtypes whose peak the catalogue has, by PyTorch's names."""


def work_of_operator(operator: IssuedOperator, tensors: Tensors) -> Work | None:
    """Return an operator's work. None if its time is not known."""
    if operator.name == "aten::slice_backward":
        return _slice_backward(operator, tensors)
    find = _COMPUTED.get(operator.name)
    if find is not None:
        is_known = dtype_of(operator, tensors) in DTYPES or find is _scaled_product
        return find(operator, tensors) if is_known else None
    num_bytes = _moved_bytes(operator, tensors)
    if not _is_bound_by_memory(operator) or (_MANY_PASSES.fullmatch(operator.name) and num_bytes > SMALL_BYTES):
        return None
    path, elements = _path(operator, tensors)
    return Work(operator.name, num_bytes, (), _itemsize(operator, tensors), path=path, elements=elements)


def _path(operator: IssuedOperator, tensors: Tensors) -> tuple[str, int]:
    """Return why a pointwise kernel reads no vectors, and how many elements it computes (spec/pointwise.py)."""
    if operator.name == "aten::embedding_dense_backward":
        return "", sum(math.prod(one.shape) for one in _of(operator, "grad_output", tensors))
    if not (operator.is_pointwise or operator.name in COPIES or operator.name == "aten::cat"):
        return "", 0
    given = {name: _of(operator, name, tensors) for name in operator.arguments}
    changed = [one for name in (*operator.written, *operator.outputs) for one in given[name]]
    results = [*(tensors[number] for number in operator.results), *changed]
    overwritten = (*operator.outputs, *(operator.written if _OVERWRITTEN.fullmatch(operator.name) else ()))
    read = [one for name, found in given.items() if name not in overwritten for one in found if one.device == "cuda"]
    if not results or not all(len(one.strides) == len(one.shape) for one in (*read, results[0])):
        return "", 0
    operands, written = [_operand(one) for one in read], _operand(results[0])
    if operator.name == "aten::cat":
        path = STRIDED if is_strided_cat(operands, written, results[0].itemsize) else ""
    else:
        path = path_of(operator.name, operands, written)
    return path, math.prod(written.shape) if path else 0


def _operand(tensor: IssuedTensor) -> Operand:
    return Operand(tensor.shape, tensor.strides, tensor.dtype)


def _is_bound_by_memory(operator: Operator) -> bool:
    return operator.name.startswith(_MEMORY_BOUND) and _BOUND_BY_MORE.fullmatch(operator.name) is None


def work_of_host(operator: HostOperator, tensors: Tensors) -> Work | None:
    """Return the work of an operator in host memory, timed like an optimizer's; None if not bound by memory."""
    if operator.name in _COMPUTED or not _is_bound_by_memory(operator):
        return None
    there = [msgspec.structs.replace(one, device="cuda" if one.device == "cpu" else "") for one in tensors]
    return Work(f"{IN_HOST_MEMORY}{operator.name}", _moved_bytes(operator, there))


# -- what is bound by computing ------------------------------------------------------------------------------------


def _product(first: str, second: str) -> Callable[[IssuedOperator, Tensors], Work | None]:
    """Return what reads a matrix product; of several products in one operator, one with so many more rows."""

    def read(operator: IssuedOperator, tensors: Tensors) -> Work | None:
        a, b = (_of(operator, name, tensors)[0] for name in (first, second))
        if len(a.shape) < 2 or len(b.shape) < 2:
            return None
        dims = math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
        return work_of(operator.name, _layout(a, b), dims, _moved_bytes(operator, tensors), a.itemsize)

    return read


def _scaled_product(operator: IssuedOperator, tensors: Tensors) -> Work | None:
    """Return a product in float8, with how it accumulates, and whether rows have scales of their own."""
    scale = next(iter(_of(operator, "scale_a", tensors)), None)
    found = None if scale is None else _product("self", "mat2")(operator, tensors)
    if found is None or scale is None or dtype_of(operator, tensors) not in _FP8:
        return None
    fast = FAST_ACCUMULATION if operator.arguments.get("use_fast_accum") else ""
    rows = SCALES_OF_ROWS if math.prod(scale.shape) > 1 else ""
    return msgspec.structs.replace(found, name=f"{found.name}{fast}{rows}")


def _layout(*matrices: IssuedTensor) -> str:
    """Return for each matrix whether its rows (n) or its columns (t) are contiguous, as cuBLAS calls it."""
    return "".join(
        "t" if len(m.strides) > 1 and m.strides[-1] != 1 and m.strides[-2] == 1 and m.shape[-1] > 1 else "n"
        for m in matrices
    )


def _convolution(operator: IssuedOperator, tensors: Tensors) -> Work | None:
    """Return a convolution as one product: a row for each output pixel, k the weights of one output channel."""
    weight = _of(operator, "weight", tensors)[0]
    out = tensors[operator.results[0]]
    dims = out.shape[0] * math.prod(out.shape[2:]), weight.shape[0], math.prod(weight.shape[1:])
    return work_of(operator.name, "nt", dims, _moved_bytes(operator, tensors), weight.itemsize)


def _slice_backward(operator: IssuedOperator, tensors: Tensors) -> Work:
    gradient = _of(operator, "grad_output", tensors)[0]
    return slice_backward(_num_bytes(gradient), _result_bytes(operator, tensors), gradient.itemsize)


def _attention(operator: IssuedOperator, tensors: Tensors) -> Work | None:
    query, key = (_of(operator, name, tensors)[0] for name in ("query", "key"))
    is_causal = bool(operator.arguments.get("is_causal"))
    dims = *query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3], int(is_causal)
    return work_of(operator.name, "", dims, _moved_bytes(operator, tensors), query.itemsize)


_COMPUTED: dict[str, Callable[[IssuedOperator, Tensors], Work | None]] = {
    "aten::mm": _product("self", "mat2"),
    "aten::addmm": _product("mat1", "mat2"),
    "aten::addmm_": _product("mat1", "mat2"),
    "aten::_addmm_activation": _product("mat1", "mat2"),
    "aten::_scaled_mm": _scaled_product,
    "aten::bmm": _product("self", "mat2"),
    "aten::baddbmm": _product("batch1", "batch2"),
    "aten::_grouped_mm": _product("self", "mat2"),
    "aten::convolution": _convolution,
    **{
        f"aten::_scaled_dot_product_{kernel}_attention{ending}": _attention
        for kernel in ("flash", "efficient", "cudnn")
        for ending in ("", "_backward")
    },
}
"""Operators that are bound by what they compute."""


# -- what is bound by memory ---------------------------------------------------------------------------------------

_OVERWRITTEN = re.compile(
    r"aten::(_foreach_)?(copy|fill|zero|normal|uniform|random|bernoulli|exponential|geometric|log_normal|cauchy)_"
)
"""Operators that do not read what they change in place."""

_SHAPED_ALIKE = re.compile(r"aten::(new_(zeros|ones|full)|(zeros|ones|full|rand|randn|randint)_like)")
"""Operators that ask ``self`` for its shape alone."""

_ONLY_READ = {"aten::_fused_adamw_": ("grads",), "aten::_fused_adam_": ("grads",), "aten::_fused_sgd_": ("grads",)}
"""Arguments that a schema says are changed, and are not (without a gradient scaler)."""

_READ_IN_PART = {
    "aten::embedding": "weight",
    "aten::index_select": "self",
    "aten::gather": "self",
    "aten::index": "self",
    "aten::take": "self",
    "aten::take_along_dim": "self",
}
"""Operators that read of an argument as many elements as they return."""

_WRITTEN_IN_PART = {
    "aten::index_put_": "values",
    "aten::_index_put_impl_": "values",
    "aten::index_add_": "source",
    "aten::index_copy_": "source",
    "aten::scatter_": "src",
    "aten::scatter_add_": "src",
}
"""Operators that change of ``self`` as many elements as another argument has."""


def _moved_bytes(operator: Operator, tensors: Tensors) -> int:
    special = _MOVED.get(operator.name)
    if special is not None:
        return special(operator, tensors)
    if _SHAPED_ALIKE.fullmatch(operator.name):
        return _result_bytes(operator, tensors)
    read_once = (*operator.outputs, *(operator.written if _OVERWRITTEN.fullmatch(operator.name) else ()))
    unchanged = _ONLY_READ.get(operator.name, ())
    partly = _READ_IN_PART.get(operator.name)
    source = _WRITTEN_IN_PART.get(operator.name)
    total = results = _result_bytes(operator, tensors)
    for name in operator.arguments:
        own = _bytes_of(operator, tensors, name)
        if name == partly:
            own = results or _bytes_of(operator, tensors, *operator.outputs)
        if name == "self" and source is not None:
            own = _bytes_of(operator, tensors, source) or own
        total += own
        if name in operator.written and name not in read_once and name not in unchanged:
            total += own
    return total


def _result_bytes(operator: Operator, tensors: Tensors) -> int:
    return sum(_num_bytes(tensors[number]) for number in operator.results)


def _bytes_of(operator: Operator, tensors: Tensors, *names: str) -> int:
    return sum(_num_bytes(one) for name in names for one in _of(operator, name, tensors))


def _norm_backward(operator: Operator, tensors: Tensors) -> int:
    """Return the bytes of a norm's backward: both inputs once for the input's gradient, once for the weight's."""
    return 2 * _bytes_of(operator, tensors, "grad_out", "input") + _result_bytes(operator, tensors)


def _embedding_backward(operator: Operator, tensors: Tensors) -> int:
    """Return the bytes of an embedding's backward: it fills the weight's gradient, then adds each token's to a row."""
    gradient, indices = (_bytes_of(operator, tensors, name) for name in ("grad_output", "indices"))
    return 3 * gradient + indices + _result_bytes(operator, tensors)


def _nll_loss(operator: Operator, tensors: Tensors) -> int:
    """Return the bytes of nll_loss_forward: of each row one element, and its target."""
    target, x = _of(operator, "target", tensors)[0], _of(operator, "self", tensors)[0]
    return math.prod(target.shape) * (target.itemsize + x.itemsize)


_MOVED: dict[str, Callable[[Operator, Tensors], int]] = {
    "aten::native_layer_norm_backward": _norm_backward,
    "aten::_fused_rms_norm_backward": _norm_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::nll_loss_forward": _nll_loss,
    "aten::nll_loss_backward": _result_bytes,  # it reads one number and the targets
    # fully_shard's copy of shards into one's own part of the gathered buffer
    "fsdp::all_gather_copy_in": lambda operator, tensors: 2 * _bytes_of(operator, tensors, "all_gather_inputs"),
}
"""Operators that move other bytes than those of their arguments and results."""


def _of(operator: Operator, name: str, tensors: Tensors) -> list[IssuedTensor]:
    argument = operator.arguments.get(name)
    return [tensors[number] for number in argument.tensors] if isinstance(argument, TensorNumbers) else []


def _num_bytes(tensor: IssuedTensor) -> int:
    """Return a tensor's bytes on the GPU; what is expanded is read once."""
    if tensor.device != "cuda":
        return 0
    strides = tensor.strides or (1,) * len(tensor.shape)
    sizes = [size for size, stride in zip(tensor.shape, strides, strict=True) if stride or size == 0]
    return math.prod(sizes) * tensor.itemsize


def _first(operator: Operator, tensors: Tensors) -> IssuedTensor | None:
    found = [one for name in operator.arguments for one in _of(operator, name, tensors)]
    return next(iter([*found, *(tensors[number] for number in operator.results)]), None)


def dtype_of(operator: IssuedOperator, tensors: Tensors) -> str:
    """Return the dtype of an operator's first tensor, as PyTorch names it; empty without one."""
    first = _first(operator, tensors)
    return first.dtype if first is not None else ""


def _itemsize(operator: IssuedOperator, tensors: Tensors) -> int:
    first = _first(operator, tensors)
    return first.itemsize if first is not None else 0
