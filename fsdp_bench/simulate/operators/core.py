"""Pointwise operators, matrix products and embedding: what they allocate, save for backward and allocate in backward.

One method for each operator of torch, as the dispatcher sees it; the docstring names the operator. ``numel`` counts
elements, ``itemsize`` bytes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fsdp_bench.simulate.autograd import Backward, Gradients, operator_node
from fsdp_bench.simulate.events import Category, Stream
from fsdp_bench.simulate.operators.kernel_workspaces import embedding_backward_workspace, sum_over_rows_workspace
from fsdp_bench.simulate.operators.kernels import Kernels, KernelScratch
from fsdp_bench.simulate.tape import Storage, Tape, Tensor
from fsdp_bench.spec.pointwise import CASTING, STRIDED, copy_path

Saved = Any
"""Saved tensors: a list, or autograd.Packed."""


def _casting(itemsize: int, other: int) -> str:
    """Return the path of a kernel with two inputs."""
    return CASTING if itemsize != other else ""


class Parameter(Tensor, eq=False):
    """A weight as the operators see it: whoever shards the model owns its bytes and its accumulator."""

    name: str = ""
    in_features: int = 0
    block: int = -1


class Operators:
    """The operators on one tape."""

    def __init__(self, tape: Tape, kernels: Kernels) -> None:
        self.tape = tape
        self.kernels = kernels
        self.batch = 1
        """Sequences in the running micro-batch."""
        self.autocast: int | None = None
        """Bytes of the dtype of matrix products while torch.autocast is on (DistributedDataParallel)."""
        self.computes_in_bf16 = False
        """Whether the 16 bits in which it computes are bf16's: older GPUs have fewer kernels for it."""
        self.scales_loss = False
        """Whether the loss is multiplied or divided by something, so that its gradient is not 1."""
        self.compiled: dict[tuple[object, ...], bool] = {}
        """Graphs of torch.compile that have run, so that their kernels are tuned; whether the gradient was aligned."""
        self._casts: dict[Parameter, Tensor] = {}
        """autocast's cache of weights."""
        self._workspaces: dict[tuple[bool, Stream], Tensor] = {}
        """cuBLAS's, of the thread that runs forward and of autograd's, and of each stream."""

    # -- elementwise -------------------------------------------------------------------------------------------

    def like(self, x: Tensor, label: str, numel: int | None = None) -> Tensor:
        """Allocate a tensor of the same dtype, and of the same size unless ``numel`` says otherwise."""
        return self.tape.tensor(x.numel if numel is None else numel, x.itemsize, label)

    def temporary(self, numel: int, itemsize: int, label: str) -> Tensor:
        """Allocate what backward needs for a moment, or hands on."""
        return self.tape.tensor(numel, itemsize, label, Category.TEMPORARY)

    def scratch(self, sizes: KernelScratch, label: str) -> list[Storage]:
        """Allocate what a kernel needs for itself; return what lives until it has allocated everything.

        Nothing where a dispatch mode watches, which does not see it.
        """
        held: list[Storage] = []
        if not sizes or self.kernels.observed:
            return held
        passing: dict[int, list[Storage]] = {}
        for index, size in enumerate(sizes):
            if isinstance(size, int):
                held.append(self.tape.storage(size, label, Category.TEMPORARY))
            else:
                made = self.tape.storage(size.num_bytes, label, Category.TEMPORARY)
                passing.setdefault(index + size.lives_for, []).append(made)
                del made
            passing.pop(index, None)
        return held

    def run(self, name: str, *tensors: Tensor, path: str = "") -> None:
        """Issue an operator that reads or writes each of these once.

        ``path``: why a pointwise kernel, whose result comes last, reads no vectors (spec/pointwise.py).
        """
        num_bytes = 0
        for tensor in tensors:
            num_bytes += tensor.numel * tensor.itemsize
        self.tape.kernel(name, num_bytes, tensors[0].itemsize, path=path, elements=tensors[-1].numel if path else 0)

    def record(self, out: Tensor, inputs: list[Tensor], saved: list[Tensor], backward: Backward) -> Tensor:
        """Put the operator into the graph, when any of its inputs is in it."""
        if self.tape.grad_enabled:
            for tensor in inputs:
                if tensor.node is not None:
                    out.node = operator_node(self.tape, backward, inputs, saved)
                    break
        return out

    def add(self, x: Tensor, y: Tensor, path: str = "") -> Tensor:
        """aten::add: both inputs get the output's gradient itself (AddBackward0)."""
        path = path or _casting(x.itemsize, y.itemsize)
        out = self.elementwise("aten::add", x.numel, max(x.itemsize, y.itemsize), x, y, path=path)
        itemsizes = x.itemsize, y.itemsize

        def backward(_saved: Saved, gradients: list[Tensor]) -> Gradients:
            both = gradients[0]
            return self._as_input(both, itemsizes[0]), self._as_input(both, itemsizes[1])

        return self.record(out, [x, y], [], backward)

    def _as_input(self, gradient: Tensor, itemsize: int) -> Tensor:
        """Return a gradient in its input's dtype (validate_outputs in engine.cpp)."""
        if gradient.itemsize == itemsize:
            return gradient
        cast = self.temporary(gradient.numel, itemsize, "aten::_to_copy")
        self.run("aten::_to_copy", gradient, cast, path=copy_path(gradient.itemsize, itemsize))
        return cast

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """aten::mul of two equal shapes, or by a factor without gradient that is broadcast (MulBackward0)."""
        path = STRIDED if y.node is None and y.numel > 1 else _casting(x.itemsize, y.itemsize)
        out = self.elementwise("aten::mul", x.numel, max(x.itemsize, y.itemsize), x, y, path=path)
        if y.node is not None:
            return self.record(out, [x, y], [x, y], self._mul_backward_two)
        itemsize = x.itemsize

        def backward(saved: Saved, gradients: list[Tensor]) -> Gradients:
            opened = saved.copy()
            product = self.temporary(gradients[0].numel, gradients[0].itemsize, "aten::mul")
            product.is_strided = bool(path)
            self.run("aten::mul", gradients[0], *opened, product, path=path)
            del opened
            return (self._as_input(product, itemsize),)

        return self.record(out, [x], [y], backward)

    def _mul_backward_two(self, saved: Saved, gradients: list[Tensor]) -> Gradients:
        numel, itemsize = gradients[0].numel, gradients[0].itemsize
        opened = saved.copy()
        dx, dy = self.temporary(numel, itemsize, "aten::mul"), self.temporary(numel, itemsize, "aten::mul")
        for factor, product in zip(opened, (dy, dx), strict=True):
            self.run("aten::mul", gradients[0], factor, product)
        return dx, dy

    def mul_broadcast(self, x: Tensor, y: Tensor, gradient: Category = Category.TEMPORARY) -> Tensor:
        """aten::mul by a smaller factor that needs a gradient, which is summed to its shape (sum_to_size) and cast."""
        path = f"{STRIDED} {_casting(x.itemsize, y.itemsize)}".rstrip()
        out = self.elementwise("aten::mul", x.numel, x.itemsize, x, y, path=path)
        small, small_itemsize = y.numel, y.itemsize

        def backward(saved: Saved, gradients: list[Tensor]) -> Gradients:
            numel, itemsize = gradients[0].numel, gradients[0].itemsize
            opened = saved.copy()
            whole = self.temporary(numel, itemsize, "aten::mul")
            dx = self.temporary(numel, itemsize, "aten::mul")
            self.run("aten::mul", gradients[0], opened[0], whole)
            self.run("aten::mul", gradients[0], opened[1], dx, path=path)
            del opened
            dy = self.tape.tensor(small, itemsize, "aten::sum", gradient)
            self.run("aten::sum", whole, dy)
            del whole
            if small_itemsize != itemsize:
                dy = self.tape.tensor(small, small_itemsize, "aten::_to_copy", gradient)
            return dx, dy

        return self.record(out, [x, y], [x, y], backward)

    def neg(self, x: Tensor) -> Tensor:
        """aten::neg of a half of each head, as its gradient is (NegBackward0)."""

        def backward(_saved: Saved, gradients: list[Tensor]) -> Gradients:
            dx = self.temporary(gradients[0].numel, gradients[0].itemsize, "aten::neg")
            self.run("aten::neg", gradients[0], dx, path=STRIDED)
            return (dx,)

        out = self.elementwise("aten::neg", x.numel, x.itemsize, x, path=STRIDED)
        return self.record(out, [x], [], backward)

    def cat(self, x: Tensor, y: Tensor) -> Tensor:
        """aten::cat of two halves of each head; the gradients are slices of the output's (CatBackward0)."""
        out = self.elementwise("aten::cat", x.numel + y.numel, x.itemsize, x, y, path=STRIDED)
        numels = x.numel, y.numel

        def backward(_saved: Saved, gradients: list[Tensor]) -> Gradients:
            return gradients[0].view(numels[0]), gradients[0].view(numels[1])

        return self.record(out, [x, y], [], backward)

    def split(self, x: Tensor, numels: Sequence[int], path: str = "") -> list[Tensor]:
        """aten::split into views; their gradients are concatenated (SplitBackward0), ``path`` says how."""
        numel, itemsize = x.numel, x.itemsize
        if not self.tape.grad_enabled or x.node is None:
            return [x.view(part) for part in numels]

        def backward(_saved: Saved, _gradients: list[Tensor]) -> Gradients:
            whole = self.temporary(numel, itemsize, "aten::cat")
            self.run("aten::cat", whole, whole, path=path)
            return (whole,)

        node = operator_node(self.tape, backward, [x], [], len(numels))
        return [Tensor(x.storage, part, itemsize, node, index, True) for index, part in enumerate(numels)]

    def to(self, x: Tensor, itemsize: int, gradient: Category = Category.TEMPORARY) -> Tensor:
        """aten::_to_copy, or nothing when it is that dtype already (ToCopyBackward0)."""
        if x.itemsize == itemsize:
            return x
        before = x.itemsize

        def backward(_saved: Saved, gradients: list[Tensor]) -> Gradients:
            cast = self.tape.tensor(gradients[0].numel, before, "aten::_to_copy", gradient)
            self.run("aten::_to_copy", gradients[0], cast, path=copy_path(gradients[0].itemsize, before))
            return (cast,)

        out = self.elementwise("aten::_to_copy", x.numel, itemsize, x, path=copy_path(before, itemsize))
        return self.record(out, [x], [], backward)

    def activation(self, name: str, x: Tensor) -> Tensor:
        """aten::silu or aten::gelu (SiluBackward0 and GeluBackward0 save the input)."""

        def backward(saved: Saved, gradients: list[Tensor]) -> Gradients:
            opened = saved.copy()
            dx = self.temporary(gradients[0].numel, gradients[0].itemsize, f"{name}_backward")
            self.run(f"{name}_backward", gradients[0], *opened, dx)
            return (dx,)

        return self.record(self.elementwise(name, x.numel, x.itemsize, x), [x], [x], backward)

    # -- matrix products ---------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """aten::mm or aten::addmm on the flattened input (MmBackward0, AddmmBackward0 save input and weight).

        The weight's t() is saved, a view that stays with its memory when the weight is given another.
        Saved tensors are packed before the product runs (torch/csrc/autograd/generated/VariableType), so that a
        recomputation that needs nothing else ends without it. Both gradients are views (of _unsafe_view and of t),
        which is why nothing is ever added to them in place.
        """
        in_features = weight.in_features
        out_features = weight.numel // in_features
        if self.autocast is not None:
            bias = None if bias is None else self.cast_weight(bias)
            weight = self.cast_weight(weight)
            x = self.to(x, self.autocast)
        rows, itemsize = x.numel // in_features, x.itemsize
        needs_dx, needs_db = x.node is not None, bias is not None  # no tensor: the graph would hold it

        dw_like, dx_like = (in_features * out_features, itemsize, Category.GRADIENTS), (rows * in_features, itemsize)

        def weight_gradient() -> Tensor:
            self.tape.product("tn", out_features, in_features, rows, itemsize)
            return self._gradient(*dw_like)

        def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
            opened = saved.copy()
            dw = None if needs_db else weight_gradient()  # mat2's before self's; for addmm after mat1's
            dx = None
            if needs_dx:
                dx = self._gradient(*dx_like)
                self.tape.product("nn", rows, in_features, out_features, itemsize)
            if not needs_db:
                return dx, dw
            dw = weight_gradient()
            del opened
            return self._sum_over_rows(rows, out_features, itemsize), dx, dw

        inputs = [x, weight] if bias is None else [bias, x, weight]
        node = None
        if self.tape.grad_enabled:
            transposed = weight.view(weight.numel)
            transposed.is_strided = in_features > 1 and out_features > 1
            node = operator_node(self.tape, backward, inputs, [x, transposed])

        def product() -> Tensor:
            self.tape.product("nt", rows, out_features, in_features, itemsize)
            out = self.tape.tensor(rows * out_features, itemsize, "aten::mm" if bias is None else "aten::addmm")
            self.make_workspace(self.tape.in_backward)
            return out

        out = self.saved_output("aten::mm" if bias is None else "aten::addmm", product)
        out.node = node
        return out

    def _gradient(self, numel: int, itemsize: int, category: Category = Category.TEMPORARY) -> Tensor:
        """A product in backward, seen through a view."""
        out = self.tape.tensor(numel, itemsize, "aten::mm", category)
        out.is_view = True
        self.make_workspace(in_backward=True)
        return out

    def _sum_over_rows(self, rows: int, columns: int, itemsize: int) -> Tensor:
        """aten::sum of a bias's gradient."""
        out = self.tape.tensor(columns, itemsize, "aten::sum", Category.GRADIENTS)
        _workspace = self.scratch(sum_over_rows_workspace(rows, columns, self.kernels), "Reduce.cuh")
        self.tape.kernel("aten::sum", (rows + 1) * columns * itemsize, itemsize)
        return out

    def make_workspace(self, in_backward: bool, stream: Stream = Stream.COMPUTE) -> None:
        """getCurrentCUDABlasHandle: a thread's first product on a stream makes its workspace, which stays.

        cuBLASLt, which runs products with a bias, shares it; torch 2.11 has 1 MiB more for that.
        """
        size = self.kernels.cublas_workspace_bytes
        key = in_backward, stream
        if size and key not in self._workspaces:
            self._workspaces[key] = self.temporary(size, 1, "getNewWorkspace")

    def end_autocast(self, in_one_block: bool = False) -> None:
        """Leave torch.autocast: the cache of weights is dropped, which are one block's in a recomputation."""
        self.autocast = None
        for weight in list(self._casts):
            if not in_one_block:
                self.tape.mark_block(weight.block)
            del self._casts[weight]
        if not in_one_block:
            self.tape.mark_block(-1)

    def cast_weight(self, weight: Any) -> Tensor:
        """cached_cast (aten/native/autocast_mode.cpp): a leaf's copy is made once and kept while autocast is on."""
        assert self.autocast is not None
        if weight.itemsize == self.autocast:
            same: Tensor = weight
            return same
        if weight not in self._casts:
            self._casts[weight] = self.to(weight, self.autocast, Category.GRADIENTS)
        return self._casts[weight]

    def saved_output(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Make an output that selective checkpointing may keep, or take the one that it kept."""
        kept = self.tape.kept
        out: Tensor = make() if kept is None else kept.output(name, make)
        return out

    def elementwise(self, name: str, numel: int, itemsize: int, *inputs: Tensor, path: str = "") -> Tensor:
        """Issue an operator that reads each input once and writes one output, which checkpointing may keep."""
        if self.tape.kept is None:
            return self._elementwise(name, numel, itemsize, inputs, path)
        return self.saved_output(name, partial(self._elementwise, name, numel, itemsize, inputs, path))

    def _elementwise(self, name: str, numel: int, itemsize: int, inputs: tuple[Tensor, ...], path: str) -> Tensor:
        out = self.tape.tensor(numel, itemsize, name)
        self.run(name, *inputs, out, path=path)
        return out

    def embedding(self, indices: Tensor, weight: Parameter, out_numel: int) -> Tensor:
        """aten::embedding (EmbeddingBackward0 saves the indices; its gradient is the whole dense weight's)."""
        out = self.tape.tensor(out_numel, weight.itemsize, "aten::embedding")
        self.run("aten::embedding", out, out, indices)
        numel, itemsize, width = weight.numel, weight.itemsize, weight.in_features
        before, after = embedding_backward_workspace(indices.numel, numel // width, width)

        def backward(_saved: Saved, _gradients: list[Tensor]) -> Gradients:
            _workspace = self.scratch(before, "Embedding.cu")
            dw = self.tape.tensor(numel, itemsize, "aten::embedding_dense_backward", Category.GRADIENTS)
            _workspace += self.scratch(after, "EmbeddingBackwardKernel.cu")
            num_bytes = (numel + 3 * out_numel) * itemsize
            self.tape.kernel("aten::embedding_dense_backward", num_bytes, itemsize, elements=out_numel)
            return (dw,)

        return self.record(out, [weight], [indices], backward)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """aten::add of S, D to B, S, D: the positions' gradient is summed over the batch (sum_to_size)."""
        out = self.like(x, "aten::add")
        self.run("aten::add", x, positions, out, path=STRIDED if x.numel > positions.numel else "")
        numel = positions.numel

        def backward(_saved: Saved, gradients: list[Tensor]) -> Gradients:
            summed = self.temporary(numel, gradients[0].itemsize, "aten::sum")
            self.run("aten::sum", gradients[0], summed)
            return gradients[0], summed

        return self.record(out, [x, positions], [], backward)

    def divide(self, x: Tensor) -> Tensor:
        """aten::div of a scalar by a number."""

        def backward(_saved: Saved, gradients: list[Tensor]) -> Gradients:
            return (self.temporary(1, gradients[0].itemsize, "aten::div"),)

        return self.record(self.like(x, "aten::div"), [x], [], backward)
