"""Pieces of Python that checkpoint, offload and compile the blocks of a model, before it is sharded."""

from __future__ import annotations

from fsdp_bench.spec.setup import Checkpointing, Reentrant, TrainSetup

_POLICY = '''
SAVED = {{
{saved}
}}


def saves_some():
    """Return the contexts of a block that saves the outputs of SAVED and computes the others again."""
{counter}
    def policy(context, operator, *args, **kwargs):
{every_second}        is_saved = getattr(operator, "overloadpacket", None) in SAVED
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
'''
_COUNTER = "    products = {True: 0, False: 0}  # in recomputation and in forward\n"
_EVERY_SECOND = """\
        if operator is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
"""


def blocks_imports(setup: TrainSetup) -> list[str]:
    """Return the imports of what is done to blocks."""
    names = [] if setup.checkpointing is Checkpointing.NONE else ["checkpoint_wrapper"]
    names = ["CheckpointImpl", *names] if setup.reentrant is not Reentrant.NO else names
    names += ["offload_wrapper"] if setup.activation_offload else []
    where = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    found = [f"from {where} import {', '.join(names)}"] if names else []
    if setup.checkpointing is Checkpointing.SELECTIVE:
        found.append("from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts")
    return found


def policy_text(setup: TrainSetup) -> str:
    """Return the policy of selective checkpointing; empty without it."""
    if setup.checkpointing is not Checkpointing.SELECTIVE:
        return ""
    policy = setup.policy
    is_second = policy.recomputes_every_second_product
    return _POLICY.format(
        saved="\n".join(f"    torch.ops.{name}," for name in policy.saved),
        counter=_COUNTER if is_second else "",
        every_second=_EVERY_SECOND if is_second else "",
    )


def blocks_text(setup: TrainSetup) -> str:
    """Return the statements, indented once, that replace the blocks of the list ``blocks``."""
    lines = [] if setup.reentrant is Reentrant.AROUND else _checkpointing(setup)
    if setup.activation_offload:
        lines += ["for index in range(len(blocks)):", "    blocks[index] = offload_wrapper(blocks[index])"]
    if setup.compile:
        lines += ["for block in blocks:", "    block.compile()"]
    return "".join(f"    {line}\n" for line in lines)


def around_text(setup: TrainSetup) -> str:
    """Return the statements, indented once, that checkpoint the blocks of the list ``blocks`` around their units."""
    return "".join(f"    {line}\n" for line in _checkpointing(setup)) if setup.reentrant is Reentrant.AROUND else ""


def _checkpointing(setup: TrainSetup) -> list[str]:
    if setup.checkpointing is Checkpointing.NONE:
        return []
    every = setup.policy.every_blocks
    numbers = f"range(0, len(blocks), {every})" if every > 1 else "range(len(blocks))"
    options = ", context_fn=saves_some" if setup.checkpointing is Checkpointing.SELECTIVE else ""
    options = ", CheckpointImpl.REENTRANT" if setup.reentrant is not Reentrant.NO else options
    return [f"for index in {numbers}:", f"    blocks[index] = checkpoint_wrapper(blocks[index]{options})"]
