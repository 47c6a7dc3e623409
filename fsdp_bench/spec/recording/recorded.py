"""RecordedCode: a model's code, recorded once, for all sizes of its symbols, numbers of blocks, and wrappers."""

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import msgspec

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.config import Architecture
from fsdp_bench.spec.recording.steps import Call, LoopRecord, NodeRecord, Size, TensorRef
from fsdp_bench.spec.recording.variants import KINDS, VariantKind, offloaded

NO_ENDS = (
    "wrap = block-and-ends: of this model it is not known which modules those are: it takes one list of blocks, a table"
    " of tokens before it, and behind it the final norm and a head that is not the table (tie_word_embeddings); use"
    " wrap = block"
)
"""The reason against units of ends that are not found. A parameter that two modules share has to be in one unit."""

OwnParameters = tuple[str, Collection[tuple[Any, ...]]]
"""The name of a module, and the shapes of the parameters that are its own; a shared one is the first module's."""


class Ends(NamedTuple):
    """The modules of the unit before the blocks and of the one behind them, by name, in the order of forward."""

    before: tuple[str, ...]
    after: tuple[str, ...]


def find_ends(modules: Iterable[OwnParameters], block_lists: Collection[str]) -> Ends | None:
    """Return the ends of a decoder; None for another model, and where the head is the table of tokens.

    ``modules`` are in the order of nn.Module.named_modules, in which decoders register them as they run;
    ``block_lists`` are the names of the lists that hold blocks.
    """
    if len(block_lists) != 1:
        return None
    (path,) = block_lists
    before: list[OwnParameters] = []
    after: list[OwnParameters] = []
    found = before
    for name, shapes in modules:
        if name == path:
            found = after
        elif shapes and not name.startswith(f"{path}."):
            found.append((name, shapes))
    if len(before) != 1 or len(after) != 2:
        return None
    (table,), (norm, head) = before, after
    is_table = len(table[1]) == 1 and all(len(shape) == 2 for shape in table[1])
    is_norm = all(len(shape) == 1 for shape in norm[1])
    if not (is_table and is_norm and set(table[1]) <= set(head[1])):
        return None
    return Ends((table[0],), (norm[0], head[0]))


FORMAT_VERSION = 2
MULTIPLE = 32
"""Recordings hold for sequence lengths that are multiples of this: attention with a mask rounds lengths up to it."""


def length_not_recorded(name: str, length: int, multiple: int = MULTIPLE) -> str | None:
    """Return why a model's code is not recorded for a sequence length, with the nearest that are; None if it is."""
    below = length - length % multiple
    if below == length:
        return None
    near = f"{below} or {below + multiple}" if below else str(multiple)
    return f"seq: {length} is not allowed for {name}; its code is recorded for multiples of {multiple} tokens: {near}"


class RecordedParameter(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One parameter of the bare model; a tied one is listed once."""

    name: str
    shape: tuple[str, ...]
    """Formulas."""
    is_trained: bool
    dtype: str = ""
    """The dtype that it is stored in and shown in, where it is not the setup's: a frozen base's (LoRA.base)."""
    packed: int = 1
    """The number of the model's numbers that an element holds: four of 4 bits in one of bf16."""


class ModuleRecord(msgspec.Struct, array_like=True, frozen=True):
    """One module, in the order of nn.Module.named_modules."""

    name: str
    kind: str
    parameters: tuple[str, ...]


class Input(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One tensor of a batch."""

    name: str
    numel: str
    itemsize: int
    """The itemsize of the tensor that the data loader makes."""
    is_float: bool
    """Whether wrappers cast it to the compute dtype."""


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training step of the bare model in one compute dtype, for one sequence or for several."""

    formulas: tuple[str, ...]
    names: tuple[str, ...]
    """Names of operators: ``aten::mm nt in bitsandbytes::gemm_4bit`` (``operator_name`` reads it)."""
    top: Call
    nodes: dict[int, NodeRecord]
    """The nodes of the graph, without those of loops."""
    loops: tuple[LoopRecord, ...]
    loss: TensorRef
    buffers: tuple[Size, ...]
    """Bytes of each buffer, which are on the device all the time."""
    buffer_modules: tuple[str, ...] = ()
    """The module that has each of them; empty where none is in a block."""


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose code was recorded, and by what."""

    code: str
    """``huggingface``, ``torchtitan`` or ``module``."""
    architecture: str
    """The class of the model, or the function ``pkg.mod:function``."""
    versions: dict[str, str]
    """The versions of torch, transformers, torchtitan, ..."""
    date: str
    lora: LoRA | None = None
    """The adapters that PEFT put in."""
    attention: str | None = None
    """transformers' attn_implementation, if it is not its default."""
    before_sm80: bool = False
    """Whether it was recorded as on GPUs of compute capability 7.0 and 7.5 (Gpu.is_before_sm80)."""


class RecordedCode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, eq=False, dict=True):
    """A model's code, recorded once."""

    origin: Origin
    block: str
    num_blocks: dict[str, int]
    """Recorded blocks of each nn.ModuleList of blocks."""
    counts: dict[str, int]
    """Blocks of the model that was asked for."""
    sizes: dict[str, int]
    """Symbols in formulas beside B and S, with their values in the model that was recorded."""
    parameters: tuple[RecordedParameter, ...]
    modules: tuple[ModuleRecord, ...]
    batch: tuple[Input, ...]
    variants: dict[str, msgspec.Raw]
    """Each a Variant, by the name of its kind (variants.py), with ``, one sequence`` for a batch of one. ``read`` reads
    one."""
    same: dict[str, str] = {}
    """Variants that are like another one, by name, with that one's."""
    missing: dict[str, str] = {}
    """Variants that cannot run, by name, with torch's reason."""
    architecture: Architecture | None = None
    """The config.json files that the recording holds for; None: for one model alone."""
    notes: tuple[str, ...] = ()
    """The assumptions, in sentences for the user."""
    shortest: int = 1
    """The shortest sequence, where a sliding window makes shorter ones take another path."""
    longest: int | None = None
    """The longest sequence, where a sliding window makes longer ones take another path."""
    positions: int | None = None
    """The positions that the model has learned; it fails on longer sequences."""
    multiple: Annotated[int, msgspec.Meta(ge=1)] = 1
    """The sequence lengths for which the formulas were found right: multiples of this."""
    format_version: int = FORMAT_VERSION

    def read(self, name: str) -> Variant:
        """Return a variant, or the one that it is like. Raises SpecError if what is written down is no variant."""
        name = self.same.get(name, name)
        if name not in self._read:
            try:
                self._read[name] = msgspec.json.decode(self.variants[name], type=Variant)
            except msgspec.DecodeError as error:
                raise SpecError(f"the recording of {self.origin.architecture} is damaged in {name}: {error}") from None
        return self._read[name]

    @property
    def has_offloaded(self) -> bool:
        """Whether what runs under activation offload was recorded, too."""
        return any(kind.name in self.variants or kind.name in self.same for kind in offloaded(KINDS))

    @cached_property
    def ends(self) -> Ends | None:
        """The modules before and behind the blocks, for units of their own; None if they are not found."""
        shapes = {parameter.name: parameter.shape for parameter in self.parameters}
        own = ((module.name, tuple(shapes[name] for name in module.parameters)) for module in self.modules)
        return find_ends(own, self.num_blocks)

    @cached_property
    def _read(self) -> dict[str, Variant]:
        return {}

    def variant(self, kind: VariantKind, is_single: bool) -> str:
        """Return the variant to replay. Raises SpecError if it cannot run, with torch's reason, or was not recorded."""
        name = f"{kind.name}, one sequence" if is_single else kind.name
        if name in self.variants or name in self.same:
            return name
        tried: VariantKind | None = kind
        while tried is not None:  # a variant is not recorded when the one that it falls back to cannot run
            if tried.name in self.missing:
                option = "wrap" if tried.is_apart else "precision"
                raise SpecError(
                    f"{option}: {self.origin.architecture} does not run in {tried.name}: {self.missing[tried.name]}"
                )
            tried = tried.fallback
        raise SpecError(
            f"precision: {kind.name} of {self.origin.architecture} was not recorded; record it again, or use another"
            " precision"
        )
