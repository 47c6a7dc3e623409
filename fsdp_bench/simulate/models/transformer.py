"""Models of train/models/transformer.py as operators: each forward holds what its twin holds, for as long."""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.losses import liger_fused_linear
from fsdp_bench.simulate.operators.attention import Heads, attention, merge_heads, split_heads
from fsdp_bench.simulate.operators.core import Operators, Parameter
from fsdp_bench.simulate.operators.kernels import FP32, INT64
from fsdp_bench.simulate.operators.norms import fused_norm, rms_norm
from fsdp_bench.simulate.repeat import repeated_block
from fsdp_bench.simulate.tape import Storage, Tape, Tensor
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.pointwise import STRIDED

M = TypeVar("M", bound="Module")


class Weight:
    """One parameter of the bare model: its shape, and how operators see it while it is gathered."""

    __slots__ = ("block", "dim0", "dtype", "is_copied", "is_trained", "name", "ndim", "numel", "rest", "seen", "shape")

    def __init__(self, name: str, dim0: int, columns: int | None = None) -> None:
        rest = 1 if columns is None else columns
        self.name = name
        self.dim0 = dim0
        self.ndim = 1 if columns is None else 2
        self.rest = rest
        """Elements of one row."""
        self.numel = dim0 * rest
        self.shape: tuple[int, ...] = (dim0,) if columns is None else (dim0, columns)
        self.block = -1
        """The block that it belongs to; -1 outside of blocks."""
        self.is_copied = True
        """Whether its values are copied from others on the GPU, in fp32, as the benchmark's code fills matrices."""
        self.is_trained = True
        """Parameter.requires_grad."""
        self.dtype = ""
        """The dtype that it is stored and shown in, where it is not the setup's."""
        self.seen: Parameter = None  # type: ignore[assignment]  # a wrapper sets it before the first forward


def whole_weights(tape: Tape, weights: Sequence[Weight], itemsize: int) -> list[Storage]:
    """Allocate whole weights, of a module or of a model, in one dtype."""
    return [tape.storage(weight.numel * itemsize, "to_empty", Category.PARAMETERS) for weight in weights]


def fill(tape: Tape, weight: Weight) -> None:
    """train/models/transformer.py, initialize: a matrix is copied from random numbers in fp32."""
    if weight.ndim > 1 and weight.is_copied:
        tape.storage(weight.numel * FP32, "aten::normal_", Category.TEMPORARY)


class Module:
    """A node of the module tree: its own weights, its children, and what a wrapper put around it."""

    def __init__(self, op: Operators) -> None:
        self.op = op
        self.weights: list[Weight] = []
        self.children: list[Module] = []
        self.around: Callable[..., Tensor] | None = None
        """Called with the module's forward and its inputs instead of forward (hooks, checkpointing)."""
        self.num_positional: int | None = None
        """The number of its inputs, the first ones, that are positional arguments; None: all."""
        self._all_weights: list[Weight] | None = None

    def __call__(self, *inputs: Any) -> Tensor:
        """Run forward inside of what is around it."""
        return self.forward(*inputs) if self.around is None else self.around(self.forward, *inputs)

    def put_around(self, outer: Callable[..., Tensor]) -> None:
        """Put ``outer``, which is called with forward and the inputs, around what is around the module already."""
        inner = self.around
        if inner is None:
            self.around = outer
        else:
            self.around = lambda forward, *inputs: outer(lambda *rest: inner(forward, *rest), *inputs)

    def forward(self, *inputs: Any) -> Tensor:
        """Run the module's operators."""
        raise NotImplementedError

    def own(self, name: str, dim0: int, columns: int | None = None) -> Weight:
        """Register a weight: a vector, or a matrix of so many columns."""
        weight = Weight(name, dim0, columns)
        self.weights.append(weight)
        return weight

    def child(self, module: M) -> M:
        """Register a child."""
        self.children.append(module)
        return module

    def all_modules(self) -> "Iterator[Module]":
        """Yield this module and all below it, parents first (nn.Module.modules)."""
        yield self
        for child in self.children:
            yield from child.all_modules()

    @property
    def all_weights(self) -> list[Weight]:
        """The weights of this module and of all below it, as nn.Module.parameters; read once it is built."""
        if not self.children:
            return self.weights
        if self._all_weights is None:
            self._all_weights = [*self.weights, *chain.from_iterable([child.all_weights for child in self.children])]
        return self._all_weights


class Linear(Module):
    """nn.Linear."""

    def __init__(self, op: Operators, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(op)
        self.weight = self.own("weight", out_features, in_features)
        self.bias = self.own("bias", out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Rows of in_features to rows of out_features."""
        return self.op.linear(x, self.weight.seen, self.bias.seen if self.bias else None)


class Embedding(Module):
    """nn.Embedding."""

    def __init__(self, op: Operators, rows: int, width: int) -> None:
        super().__init__(op)
        self.weight = self.own("weight", rows, width)

    def forward(self, indices: Tensor) -> Tensor:
        """Row numbers to rows."""
        return self.op.embedding(indices, self.weight.seen, indices.numel * self.weight.rest)


class Norm(Module):
    """nn.RMSNorm, or nn.LayerNorm, which has a bias."""

    def __init__(self, op: Operators, width: int, bias: bool = False) -> None:
        super().__init__(op)
        self.weight = self.own("weight", width)
        self.bias = self.own("bias", width) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows."""
        if self.bias is None:
            return rms_norm(self.op, x, self.weight.seen)
        return fused_norm(self.op, x, self.weight.seen, self.bias.seen)


def rotate(op: Operators, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """train/models/transformer.py, rotate: x * cos + cat(-second, first) * sin."""
    first, second = op.split(x, (x.numel // 2,) * 2, STRIDED)
    return op.add(op.mul(x, cos), op.mul(op.cat(op.neg(second), first), sin), STRIDED)


def rotary_tables(op: Operators, length: int, head_dim: int, itemsize: int) -> tuple[Tensor, Tensor]:
    """train/models/transformer.py, rotary_tables; all in fp32 until the cast."""
    half = head_dim // 2
    steps = op.tape.tensor(half, FP32, "aten::arange")
    negative = op.tape.tensor(half, FP32, "aten::neg")
    del steps
    exponents = op.tape.tensor(half, FP32, "aten::div")
    del negative
    frequencies = op.tape.tensor(half, FP32, "aten::pow")
    op.scratch([INT64], "aten::pow")  # the base, moved to the device (scalar_to_tensor)
    del exponents
    positions = op.tape.tensor(length, FP32, "aten::arange")
    outer = op.tape.tensor(length * half, FP32, "aten::mul")
    del positions
    angles = op.tape.tensor(length * head_dim, FP32, "aten::repeat")
    del outer
    cos = op.to(op.tape.tensor(length * head_dim, FP32, "aten::cos"), itemsize)
    sin = op.to(op.tape.tensor(length * head_dim, FP32, "aten::sin"), itemsize)
    del frequencies, angles
    return cos, sin


class SimulatedLlamaAttention(Module):
    """train/models/transformer.py, LlamaAttention."""

    def __init__(self, op: Operators, shape: ModelShape) -> None:
        super().__init__(op)
        self.head_dim = shape.head_dim
        self.heads = shape.num_attention_heads
        self.groups = shape.num_attention_heads // shape.num_key_value_heads
        self.q_proj = self.child(Linear(op, shape.hidden_size, shape.hidden_size))
        self.k_proj = self.child(Linear(op, shape.hidden_size, shape.kv_size))
        self.v_proj = self.child(Linear(op, shape.hidden_size, shape.kv_size))
        self.o_proj = self.child(Linear(op, shape.hidden_size, shape.hidden_size))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Tokens x hidden_size to the same."""
        op = self.op
        heads = Heads(self.heads, self.groups, self.head_dim, cos.numel // self.head_dim)
        q = rotate(op, split_heads(op, self.q_proj(x), heads, is_query=True), cos, sin)
        k = rotate(op, split_heads(op, self.k_proj(x), heads, is_query=False), cos, sin)
        v = split_heads(op, self.v_proj(x), heads, is_query=False)
        return self.o_proj(merge_heads(op, attention(op, op.to(q, v.itemsize), op.to(k, v.itemsize), v, heads), heads))


class SimulatedLlamaMLP(Module):
    """train/models/transformer.py, LlamaMLP."""

    def __init__(self, op: Operators, shape: ModelShape) -> None:
        super().__init__(op)
        self.gate_proj = self.child(Linear(op, shape.hidden_size, shape.intermediate_size))
        self.up_proj = self.child(Linear(op, shape.hidden_size, shape.intermediate_size))
        self.down_proj = self.child(Linear(op, shape.intermediate_size, shape.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens x hidden_size to the same."""
        return self.down_proj(self.op.mul(self.op.activation("aten::silu", self.gate_proj(x)), self.up_proj(x)))


class SimulatedLlamaBlock(Module):
    """train/models/transformer.py, LlamaBlock."""

    def __init__(self, op: Operators, shape: ModelShape) -> None:
        super().__init__(op)
        self.input_layernorm = self.child(Norm(op, shape.hidden_size))
        self.self_attn = self.child(SimulatedLlamaAttention(op, shape))
        self.post_attention_layernorm = self.child(Norm(op, shape.hidden_size))
        self.mlp = self.child(SimulatedLlamaMLP(op, shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Tokens x hidden_size to the same."""
        x = self.op.add(x, self.self_attn(self.input_layernorm(x), cos, sin))
        return self.op.add(x, self.mlp(self.post_attention_layernorm(x)))


class SimulatedGPT2Block(Module):
    """train/models/transformer.py, GPT2Block."""

    def __init__(self, op: Operators, shape: ModelShape) -> None:
        super().__init__(op)
        d, f = shape.hidden_size, shape.intermediate_size
        self.heads = shape.num_attention_heads
        self.head_dim = shape.head_dim
        self.hidden_size = d
        self.ln_1 = self.child(Norm(op, d, bias=True))
        self.c_attn = self.child(Linear(op, d, 3 * d, bias=True))
        self.c_proj = self.child(Linear(op, d, d, bias=True))
        self.ln_2 = self.child(Norm(op, d, bias=True))
        self.c_fc = self.child(Linear(op, d, f, bias=True))
        self.mlp_proj = self.child(Linear(op, f, d, bias=True))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens x hidden_size to the same."""
        op = self.op
        heads = Heads(self.heads, 1, self.head_dim, x.numel // self.hidden_size // op.batch, are_slices=True)
        parts = op.split(self.c_attn(self.ln_1(x)), (x.numel,) * 3)
        q, k, v = (split_heads(op, part, heads, is_query=True) for part in parts)
        del parts
        x = op.add(x, self.c_proj(merge_heads(op, attention(op, q, k, v, heads), heads)))
        return op.add(x, self.mlp_proj(op.activation("aten::gelu", self.c_fc(self.ln_2(x)))))


class ModuleList(Module):
    """nn.ModuleList."""


class Loading(Enum):
    """The ways in which the parameters of a model come to the GPU under fully_shard."""

    FILLED = "from the meta device: one whole parameter at a time is filled on the GPU, and sharded"
    IN_PLACE = "from the meta device: each rank initializes its own shards"
    MOVED = "from host memory: each unit is moved to the GPU whole, and sharded"


class EndModules(NamedTuple):
    """The modules of the unit before the blocks and of the one behind them, each in the order of forward."""

    before: tuple[Module, ...]
    after: tuple[Module, ...]


class SimulatedModel(Module):
    """A model with some of its blocks, of which one stands for those that are left out (simulate/repeat.py)."""

    blocks: list[Module]
    """In the order in which they run."""
    lm_head: Module | None = None
    """The head, where it is registered first and runs last."""
    loading = Loading.FILLED

    def __init__(self, op: Operators, num_blocks: int, extra_blocks: int) -> None:
        super().__init__(op)
        self.num_blocks = num_blocks
        """The number of blocks, or of groups of them, as ``Weight.block`` counts."""
        self.extra_blocks = extra_blocks
        """The number that is left out."""

    def times(self, block: int) -> int:
        """Return for how many blocks a block stands; 1 for what is outside of blocks (-1)."""
        return 1 + self.extra_blocks if self.extra_blocks and block == repeated_block(self.num_blocks) else 1

    def kept_in_root(self) -> list[Module]:
        """Return the modules that cannot be units because their weights are read elsewhere, too."""
        return []

    def reads(self) -> dict[int, list[Weight]]:
        """Return the weights that modules have beside their own, by the id of the module: tied ones."""
        return {}

    @property
    def ends(self) -> EndModules | None:
        """The modules of the units beside blocks with block-and-ends; None if the head is the embedding, or unknown."""
        return None

    def forward_order(self) -> Iterator[Module]:
        """Yield the modules in the order in which they run first."""
        raise NotImplementedError


class SimulatedTransformer(SimulatedModel):
    """train/models/transformer.py, Llama and GPT2."""

    def __init__(self, op: Operators, shape: ModelShape, num_blocks: int) -> None:
        super().__init__(op, num_blocks, shape.num_hidden_layers - num_blocks)
        self.shape = shape
        llama = shape.family is Family.LLAMA
        tied = shape.tie_word_embeddings
        head = None if tied else self.child(Linear(op, shape.hidden_size, shape.vocab_size))
        self.lm_head = head
        self.embedding = self.child(Embedding(op, shape.vocab_size, shape.hidden_size))
        self.head_weight = (head or self.embedding).weight
        self.positions = None
        if not llama:
            self.positions = self.child(Embedding(op, shape.max_position_embeddings, shape.hidden_size))
        make = SimulatedLlamaBlock if llama else SimulatedGPT2Block
        self.block_list = self.child(ModuleList(op))
        self.blocks = [self.block_list.child(make(op, shape)) for _ in range(num_blocks)]
        for index, block in enumerate(self.blocks):
            for weight in block.all_weights:
                weight.block = index
        self.norm = self.child(Norm(op, shape.hidden_size, bias=not llama))

    @property
    def ends(self) -> EndModules | None:
        """The embeddings; the norm and the head."""
        positions = () if self.positions is None else (self.positions,)
        return None if self.lm_head is None else EndModules((self.embedding, *positions), (self.norm, self.lm_head))

    def kept_in_root(self) -> list[Module]:
        """Return a tied embedding, which the head reads (train/wrapping/units.py)."""
        return [self.embedding] if self.lm_head is None else []

    def forward_order(self) -> Iterator[Module]:
        """Yield the modules in the order in which they run: the head is registered first and runs last."""
        yield from (module for module in self.all_modules() if module is not self.lm_head)
        if self.lm_head is not None:
            yield self.lm_head

    def head(self, x: Tensor) -> Tensor:
        """Tokens x hidden_size to logits."""
        tape = self.op.tape
        tape.category = Category.LOGITS
        out: Tensor = self.lm_head(x) if self.lm_head else self.op.linear(x, self.embedding.weight.seen)
        tape.category = Category.ACTIVATIONS
        return out

    def head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Tokens x hidden_size to the mean loss."""
        return liger_fused_linear(self.op, x, self.head_weight.seen, targets)

    def forward(self, tokens: Tensor, sequence_length: int, targets: Tensor | None = None) -> Tensor:
        """Token numbers to logits; with targets to the mean loss, which includes the head."""
        run = self._llama if self.positions is None else self._gpt2
        return run(tokens, sequence_length, targets)

    def _end(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run what comes after the blocks, while what forward has made for them is alive."""
        self.op.tape.mark("forward")
        x = self.norm(x)
        return self.head(x) if targets is None else self.head_loss(x, targets)

    def _llama(self, tokens: Tensor, sequence_length: int, targets: Tensor | None) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rotary_tables(self.op, sequence_length, self.shape.head_dim, x.itemsize)
        for index, block in enumerate(self.blocks):
            x = self._run(index, block, x, cos, sin)
        return self._end(x, targets)

    def _gpt2(self, tokens: Tensor, sequence_length: int, targets: Tensor | None) -> Tensor:
        assert self.positions is not None
        positions = self.op.tape.tensor(sequence_length, INT64, "aten::arange")
        x = self.op.add_positions(self.embedding(tokens), self.positions(positions))
        for index, block in enumerate(self.blocks):
            x = self._run(index, block, x)
        return self._end(x, targets)

    def _run(self, index: int, block: Module, *inputs: Tensor) -> Tensor:
        """Run a block, and mark where its part of forward and of backward begins."""
        tape = self.op.tape
        tape.mark("forward", index)
        out: Tensor = block(*inputs)
        if out.node is not None:
            out.node.pre_hooks = [lambda: tape.mark("backward", index), *(out.node.pre_hooks or ())]
        return out
