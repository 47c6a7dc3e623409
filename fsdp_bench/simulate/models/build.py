"""Builds the simulated form of a model: a benchmark model, or a recorded one; checkpoints its blocks."""

from functools import lru_cache

from msgspec.structs import replace

from fsdp_bench.simulate.autograd import Engine
from fsdp_bench.simulate.models.activation_checkpointing import SaveOnCpu, checkpointed, reentrant
from fsdp_bench.simulate.models.transformer import Loading, Module, SimulatedModel, SimulatedTransformer
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import Kernels
from fsdp_bench.simulate.recorded.bind import BoundStep, bind
from fsdp_bench.simulate.recorded.model import RecordedTransformer
from fsdp_bench.simulate.repeat import FEW_BLOCKS
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.recording.recorded import length_not_recorded
from fsdp_bench.spec.recording.variants import VariantKind, kind_of
from fsdp_bench.spec.setup import Checkpointing, Loss, Reentrant, TrainSetup


def build(op: Operators, model: Model, setup: TrainSetup, num_blocks: int) -> SimulatedModel:
    """Return a model with some of its blocks. Raises SpecError for a length that was not recorded."""
    if isinstance(model, RecordedModel):
        simulated = model if num_blocks == model.num_blocks else model.with_blocks(num_blocks)
        program = _program(
            simulated,
            kind_of(setup, model.has_frozen_parameters),
            setup.micro_batch_size,
            setup.sequence_length,
            op.kernels,
            # All kinds that are computed on logits have one program.
            setup.loss if setup.loss is Loss.PLAIN or setup.loss.includes_head else Loss.CHUNKED,
            setup.reentrant is not Reentrant.NO and model.has_frozen_parameters,
        )
        built = RecordedTransformer(op, program, num_blocks, model.num_blocks - num_blocks)
        if op.kernels.is_cuda and model.code.origin.code != "torchtitan":  # whose trainer is this package's
            built.loading = Loading.MOVED if op.kernels.moves_model else Loading.IN_PLACE
        return built
    return SimulatedTransformer(op, model, num_blocks)


def with_few_tokens(model: Model, setup: TrainSetup) -> TrainSetup:
    """Return a setup of the smallest batch that a model takes, for what the number of tokens does not matter to."""
    return replace(setup, sequence_length=model.shortest_sequence, micro_batch_size=1)


def num_few_blocks(model: Model) -> int:
    """Return how many blocks are simulated where one may stand for the others: all if they differ."""
    return min(model.num_blocks, FEW_BLOCKS) if model.repeats else model.num_blocks


def few_blocks(op: Operators, model: Model, setup: TrainSetup) -> SimulatedModel:
    """Return a model with few of its blocks, where one may stand for the others."""
    return build(op, model, setup, num_few_blocks(model))


@lru_cache(maxsize=16)
def _program(
    model: RecordedModel,
    kind: VariantKind,
    batch: int,
    length: int,
    kernels: Kernels,
    loss: Loss,
    inputs_need_grad: bool,
) -> BoundStep:
    code = model.code
    if length < code.shortest or length > (code.longest or length):
        if code.shortest == code.longest:
            raise SpecError(
                f"seq: {length} is not allowed for {model.name}, whose code loops over the sequence and was recorded"
                f" for {code.longest} tokens; record it with --seq {length} --fixed-length"
            )
        most = f"up to {code.longest}" if code.longest else f"of at least {code.shortest}"
        raise SpecError(
            f"seq: {length} is not allowed for {model.name}, which was recorded for sequences {most} tokens, on one"
            f" side of its sliding window; record it with --seq {length}"
        )
    if code.positions is not None and length > code.positions:
        raise SpecError(f"seq: {length} is not allowed; {model.name} has {code.positions} learned positions")
    if (reason := length_not_recorded(model.name, length, model.code.multiple)) is not None:
        raise SpecError(reason)
    variant = model.code.variant(kind, batch == 1)
    return bind(model, variant, batch, length, kernels, loss, inputs_need_grad)


def checkpointed_blocks(model: SimulatedModel, setup: TrainSetup) -> list[Module]:
    """Return the blocks that the policy chooses, in the order in which the model registers them."""
    if setup.checkpointing is Checkpointing.NONE:
        return []
    blocks = set(map(id, model.blocks))
    return [module for module in model.all_modules() if id(module) in blocks][:: setup.policy.every_blocks]


def checkpoint_blocks(op: Operators, engine: Engine, model: SimulatedModel, setup: TrainSetup) -> None:
    """Checkpoint the chosen blocks, but those around units, and offload all (train/wrapping)."""
    for block in checkpointed_blocks(model, setup):
        if setup.reentrant is Reentrant.INSIDE:
            block.around = reentrant(op, engine)
        elif setup.reentrant is Reentrant.NO:
            policy = setup.policy if setup.checkpointing is Checkpointing.SELECTIVE else None
            block.around = checkpointed(op, policy, block.num_positional)
    if setup.activation_offload:
        for block in model.blocks:
            block.put_around(SaveOnCpu(op).around)
