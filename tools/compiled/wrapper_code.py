"""Reads the Python function that Inductor wrote: which buffers it allocates, frees and reuses, what its kernels touch.

The function is straight-line code (PythonWrapperCodegen in torch/_inductor/codegen/wrapper.py). A statement that is not
known here is an error: nothing is guessed.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fsdp_bench.simulate.events import FAST_ACCUMULATION, SCALES_OF_ROWS
from tools.compiled.kernels import KERNEL_READERS, MAKES, Kernel, View

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1, "uint64": 8}
_ITEMSIZES |= {"float8_e4m3fn": 1, "float8_e5m2": 1}
_FP32 = 4
_MOST_OUTPUTS = 9
"""The most outputs of an operator in kernels.py."""
_NOTHING = ("assert_size_stride", "assert_alignment", "torch.cuda.set_device", "args.clear")
_SUM = re.compile(r"(\w+)\[.*\]\.view\((\d+), (\d+)\)\.sum\(dim=0\)\.view\(\[[\d, ]+\]\)(?:\.to\((.+)\))?")
_SEEDS = "aten.randint.low_out"
"""Draws the seeds of dropout (InductorSeeds)."""
_SCALED = "aten._scaled_mm"
"""Its factors are followed by their scales."""
_WITH_RANDOM_STATE = "torch.ops.higher_order.graphsafe_run_with_rng_state"
_NUMBER_OF_KERNEL = re.compile(r"_\d+$")


class UnknownCode(Exception):
    """The function has a statement that this reader does not know."""


class Made(NamedTuple):
    """A storage that a kernel allocates."""

    number: int
    num_bytes: int


class Run(NamedTuple):
    """A kernel, or an allocation without one."""

    name: str
    dims: tuple[int, ...]
    touched_bytes: tuple[int, ...]
    """The bytes of each tensor that it reads or writes."""
    itemsize: int
    makes: tuple[Made, ...]
    changed: tuple[int, ...] = ()
    """Which of them it changes in place: reads and writes."""
    is_tuned: bool = False
    """Whether Inductor tunes the kernel, which it does when the kernel first runs."""

    @property
    def changed_bytes(self) -> tuple[int, ...]:
        """The bytes of each tensor that it changes in place."""
        return tuple(self.touched_bytes[place] for place in self.changed)


class Dropped(NamedTuple):
    """The function holds a storage no longer."""

    number: int


class TritonKernel(NamedTuple):
    """A kernel of Triton: its changes in place, and whether Inductor tunes it."""

    changed: tuple[int, ...]
    """The positions of the arguments that it changes in place."""
    is_tuned: bool
    """Whether it has several configurations, of which Inductor takes the fastest when it first runs."""


ReadKernel = Callable[[str, str], TritonKernel]
"""Reads a kernel, from its name and its source."""


class Function(NamedTuple):
    """The steps and results of one compiled function."""

    num_inputs: int
    steps: list[Run | Dropped]
    returns: list[int | None]
    """The storage of each result."""
    input_bytes: tuple[int, ...] = ()
    """The bytes of each input's storage."""


class Compiled(NamedTuple):
    """Inductor's code of one block."""

    inputs: tuple[str, ...]
    """Parameters by their names in the block, and ``i:0``, ``i:1``, ... of the tensors that the block is given."""
    forward: Function
    backward: Function


def read_function(source: str, read_kernel: ReadKernel) -> Function:
    """Read the function ``call`` of a module that Inductor wrote.

    Raises UnknownCode for a statement that is not known.
    """
    tree = ast.parse(source)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    kernels = {name: read_kernel(name, text) for name, text in _kernels(tree)}
    return _Reader(functions["call"], functions["get_args"], kernels).read()


def _kernels(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield name and source of each ``triton_x = async_compile.triton('triton_x', SOURCE, ...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == "async_compile.triton":
            name, text = map(ast.literal_eval, node.args[:2])
            yield name, text


class _Reader:
    def __init__(self, call: ast.FunctionDef, arguments: ast.FunctionDef, kernels: dict[str, TritonKernel]) -> None:
        self._call = call
        self._kernels = kernels
        self._untuned = {name for name, kernel in kernels.items() if kernel.is_tuned}
        """The kernels that will be tuned when they first run."""
        self._views: dict[str, View] = {}
        self._tuples: dict[str, tuple[View, ...]] = {}
        self._steps: list[Run | Dropped] = []
        self._next = 0
        self._read_arguments(arguments)
        self._num_inputs = self._next
        given = {view.storage: _numel(view.shape) * view.itemsize for view in self._views.values()}
        self._input_bytes = tuple(given[number] for number in range(self._next))

    def _read_arguments(self, function: ast.FunctionDef) -> None:
        """Number the arguments that are tensors; several may share a storage, which lives as long as any of them."""
        tensors: dict[str, View] = {}
        for statement in function.body:
            if isinstance(statement, ast.Return):
                assert isinstance(statement.value, ast.List)
                for name in map(ast.unparse, statement.value.elts):
                    if name in tensors:
                        self._views[name] = tensors[name]._replace(storage=self._next)
                        self._next += 1
            elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
                name, call = ast.unparse(statement.targets[0]), statement.value
                if _called(call) == "torch.as_strided":
                    base, shape, strides = call.args
                    itemsize = tensors[ast.unparse(base)].itemsize
                elif _called(call) == "rand_strided":
                    shape, strides = call.args
                    itemsize = _itemsize(next(each.value for each in call.keywords if each.arg == "dtype"))
                else:
                    continue  # a generator of random numbers
                tensors[name] = View(-1, ast.literal_eval(shape), itemsize, ast.literal_eval(strides))

    def read(self) -> Function:
        returns: list[int | None] = []
        for statement in self._statements(self._call.body):
            if isinstance(statement, ast.Return):
                assert isinstance(statement.value, ast.Tuple)
                returns = [None if _is_none(each) else self._view(each).storage for each in statement.value.elts]
            else:
                self._statement(statement)
        return Function(self._num_inputs, self._steps, returns, self._input_bytes)

    def _statements(self, body: Sequence[ast.stmt]) -> Any:
        for statement in body:
            if isinstance(statement, ast.With):
                yield from self._statements(statement.body)
            else:
                yield statement

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._delete(ast.unparse(target))
        elif isinstance(statement, ast.Assign):
            self._assign(ast.unparse(statement.targets[0]), statement.value)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._expression(statement.value)
        else:
            raise UnknownCode(ast.unparse(statement))

    def _assign(self, name: str, value: ast.expr) -> None:
        called = _called(value)
        if name.startswith(("(primals", "raw_stream")) or "args" in (name, ast.unparse(value)):
            return
        if called in ("copy_if_misaligned", "get_raw_stream"):
            return
        if called == "empty_strided_cuda":
            assert isinstance(value, ast.Call)
            shape, strides = (ast.literal_eval(each) for each in value.args[:2])
            view = self._views[name] = self._new(shape, strides, _itemsize(value.args[2]))
            self._steps.append(Run("empty_strided_cuda", (), (), view.itemsize, (self._made(view),)))
        elif called.startswith("torch.ops.aten."):
            assert isinstance(value, ast.Call)
            self._fallback(name, called.removeprefix("torch.ops.").removesuffix(".default"), value)
        elif called == _WITH_RANDOM_STATE:
            assert isinstance(value, ast.Call)
            self._fallback(name, ast.unparse(value.args[0]).removeprefix("torch.ops.").removesuffix(".default"), value)
        elif ".sum(dim=0)" in ast.unparse(value):
            self._sum_of_workspace(name, ast.unparse(value))
        elif isinstance(value, ast.Subscript):
            self._views[name] = self._tuples[ast.unparse(value.value)][ast.literal_eval(value.slice)]
        elif isinstance(value, ast.Name) or called == "reinterpret_tensor":
            self._views[name] = self._view(value)
        else:
            raise UnknownCode(f"{name} = {ast.unparse(value)}")

    def _fallback(self, name: str, operator: str, value: ast.Call) -> None:
        """Read an operator of torch that Inductor calls as it is."""
        if operator not in MAKES:
            raise UnknownCode(ast.unparse(value))
        inputs = [self._view(each) for each in value.args if self._is_tensor(each)]
        outputs = MAKES[operator](inputs)
        made: dict[int, View] = {}
        for index, (shape, itemsize) in outputs.items():
            made[index] = self._new(shape, _contiguous(shape), itemsize)
        self._tuples[name] = tuple(made.get(index, View(-1, (), 1)) for index in range(_MOST_OUTPUTS))
        kernel = Kernel(operator.replace(".", "::", 1), KERNEL_READERS[operator](inputs))
        makes = tuple(map(self._made, made.values()))
        self._steps.append(self._run(kernel, [*inputs, *made.values()], inputs[0].itemsize, makes))

    def _sum_of_workspace(self, name: str, value: str) -> None:
        """Read ``workspace_0[...].view(parts, columns).sum(dim=0).view([columns])``, which torch's own kernel sums."""
        found = _SUM.fullmatch(value)
        if found is None:
            raise UnknownCode(value)
        parts, columns = int(found[2]), int(found[3])
        total = self._new((columns,), (1,), _FP32)
        base = self._views[found[1]]._replace(shape=(parts, columns))
        self._steps.append(self._run(Kernel("aten::sum", (parts, columns)), [base, total], _FP32, (self._made(total),)))
        itemsize = _FP32 if found[4] is None else _ITEMSIZES[found[4].removeprefix("torch.")]
        self._views[name] = total
        if itemsize != _FP32:
            cast = self._views[name] = self._new((columns,), (1,), itemsize)
            self._steps.append(self._run(Kernel("aten::_to_copy", ()), [total, cast], _FP32, (self._made(cast),)))
            self._steps.append(Dropped(total.storage))

    def _expression(self, call: ast.Call) -> None:
        name = _called(call)
        if name in _NOTHING:
            return
        if name == _SEEDS:
            seeds = self._view(next(each.value for each in call.keywords if each.arg == "out"))
            self._steps.append(self._run(Kernel("aten::randint", ()), [seeds], seeds.itemsize, ()))
        elif name.startswith("extern_kernels."):
            product = f"aten.{name.removeprefix('extern_kernels.')}"
            if product not in KERNEL_READERS:
                raise UnknownCode(ast.unparse(call))
            views = [self._view(each) for each in call.args]
            out = next(self._view(each.value) for each in call.keywords if each.arg == "out")
            factors = views[:2] if product == _SCALED else views[-2:]
            layout = "".join("n" if view.strides[-1] == 1 else "t" for view in factors)
            if product == _SCALED:
                fast = any(each.arg == "use_fast_accum" and ast.literal_eval(each.value) for each in call.keywords)
                has_rows = _numel(views[2].shape) > 1
                layout += (FAST_ACCUMULATION if fast else "") + (SCALES_OF_ROWS if has_rows else "")
            kernel = Kernel(f"{product.replace('.', '::', 1)} {layout}", KERNEL_READERS[product](views))
            self._steps.append(self._run(kernel, [*views, out], factors[-1].itemsize, ()))
        elif name.startswith("triton_") and name.endswith(".run"):
            self._triton(name.removesuffix(".run"), call.args)
        else:
            raise UnknownCode(ast.unparse(call))

    def _triton(self, name: str, args: Sequence[ast.expr]) -> None:
        places = [place for place, each in enumerate(args) if self._is_tensor(each)]
        views = [self._view(args[place]) for place in places]
        run = self._run(Kernel(_NUMBER_OF_KERNEL.sub("", name), ()), views, min(view.itemsize for view in views), ())
        changed = tuple(places.index(place) for place in self._kernels[name].changed)
        self._steps.append(run._replace(changed=changed, is_tuned=name in self._untuned))
        self._untuned.discard(name)

    def _run(self, kernel: Kernel, views: list[View], itemsize: int, makes: tuple[Made, ...]) -> Run:
        num_bytes = tuple(_numel(view.shape) * view.itemsize for view in views)
        return Run(kernel.name, kernel.dims, num_bytes, itemsize, makes)

    def _delete(self, name: str) -> None:
        gone = {self._views[name].storage} if name in self._views else {view.storage for view in self._tuples[name]}
        self._views.pop(name, None)
        self._tuples.pop(name, None)
        held = {view.storage for view in self._views.values()}
        held |= {view.storage for views in self._tuples.values() for view in views}
        self._steps += [Dropped(number) for number in sorted(gone - held - {-1})]

    def _new(self, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> View:
        numel = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        view = View(self._next, tuple(shape), itemsize, strides=tuple(strides), storage_bytes=numel * itemsize)
        self._next += 1
        return view

    @staticmethod
    def _made(view: View) -> Made:
        return Made(view.storage, view.storage_bytes)

    def _is_tensor(self, value: ast.expr) -> bool:
        return _called(value) == "reinterpret_tensor" or (isinstance(value, ast.Name) and value.id in self._views)

    def _view(self, value: ast.expr) -> View:
        if isinstance(value, ast.Name):
            return self._views[value.id]
        if not isinstance(value, ast.Call) or _called(value) != "reinterpret_tensor":
            raise UnknownCode(ast.unparse(value))
        base = self._view(value.args[0])
        return base._replace(shape=ast.literal_eval(value.args[1]), strides=ast.literal_eval(value.args[2]))


def _called(value: ast.expr) -> str:
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


def _itemsize(dtype: ast.expr) -> int:
    name = ast.unparse(dtype).removeprefix("torch.")
    if name not in _ITEMSIZES:
        raise UnknownCode(name)
    return _ITEMSIZES[name]


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _numel(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
