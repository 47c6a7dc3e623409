"""Pieces of Python that build a model of transformers and shard it: fully_shard, FullyShardedDataParallel or DDP."""

from __future__ import annotations

from fsdp_bench.plan.export.adapters import adapters_text, base_dtype, inputs_text, is_filled_in_4_bits, zeros_text
from fsdp_bench.plan.export.blocks import around_text, blocks_text
from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.pieces import DTYPES
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.recorded import NO_ENDS
from fsdp_bench.spec.setup import Api, BackwardPrefetch, Offload, TrainSetup, Wrap

_DDP = "from torch.nn.parallel import DistributedDataParallel"


def is_built_on_host(chosen: Chosen) -> bool:
    """Whether every rank builds the whole model in host memory: FSDP1 would part a tied head from its embedding."""
    return chosen.setup.api is Api.FSDP1 and chosen.modules.is_tied and not _is_quantized(chosen)


def _is_quantized(chosen: Chosen) -> bool:
    """Whether linear layers are in 4 bits, which takes their values: the model is built on the GPU."""
    return chosen.lora is not None and chosen.lora.is_quantized


def is_mixed(setup: TrainSetup) -> bool:
    """Whether not all dtypes of the setup are the stored one."""
    precision = setup.precision
    return not precision.store == precision.compute == precision.reduce


def sharding_imports(setup: TrainSetup) -> list[str]:
    """Return the imports of what shards the model."""
    if setup.is_bare:
        return []
    if setup.is_ddp:
        hook = {"bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}.get(setup.precision.reduce)
        has_hook = hook is not None and setup.precision.reduce != setup.precision.store
        where = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
        return [f"from {where} import {hook}", _DDP] if has_hook else [_DDP]
    if setup.api is Api.FSDP2:
        names = ["fully_shard"]
        names += ["MixedPrecisionPolicy"] if is_mixed(setup) or setup.fp32_head else []
        names += ["CPUOffloadPolicy"] if setup.offload is Offload.PARAMS else []
        return [_MESH, f"from torch.distributed.fsdp import {', '.join(sorted(names))}"]
    names = ["FullyShardedDataParallel", "ShardingStrategy"]
    names += ["MixedPrecision"] if is_mixed(setup) else []
    names += ["CPUOffload"] if setup.offload is Offload.PARAMS else []
    names += ["BackwardPrefetch"] if setup.backward_prefetch is not BackwardPrefetch.NONE else []
    found = [_MESH] if setup.strategy.is_hybrid else []
    found.append(f"from torch.distributed.fsdp import {', '.join(sorted(names))}")
    if setup.wrap is Wrap.SIZE:
        found += [
            "from functools import partial",
            "from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy",
        ]
    elif setup.wrap is not Wrap.NONE:
        found.append("from torch.distributed.fsdp.wrap import CustomPolicy")
    return found


_MESH = "from torch.distributed.device_mesh import init_device_mesh"


def model_text(chosen: Chosen) -> str:
    """Return the function ``build(device)`` that returns the sharded model.

    Raises:
        SpecError: for units that are not exported.
    """
    setup, modules = chosen.setup, chosen.modules
    made = f"model = AutoModelForCausalLM.from_config(config, dtype={base_dtype(setup, chosen.lora)})"
    on_host = is_built_on_host(chosen)
    is_quantized = _is_quantized(chosen) and not is_filled_in_4_bits(setup, chosen.lora)
    where = "device" if setup.is_ddp and not is_quantized else '"cpu"' if on_host else '"meta"'
    why = {
        '"meta"': "without data: each rank allocates its shards alone" if not is_quantized else "without data",
        '"cpu"': "FSDP1 would part the head from the embedding on meta: each rank needs host memory for all of it",
        "device": "the whole model" if setup.is_bare else "the same on every rank",
    }[where]
    text = f'''
def build(device):
    """Build the model{" and shard it" if not setup.is_ddp else ""}."""
    config = AutoConfig.for_model(**CONFIG)
    config.use_cache = False
    torch.manual_seed({setup.seed})
    with torch.device({where}):  # {why}
        {made}
{_adapters(chosen)}    blocks = model.{modules.blocks}
'''
    exported = (Wrap.BLOCK, Wrap.BLOCK_AND_ENDS, Wrap.NONE, Wrap.SIZE)
    if setup.wrap not in (exported if chosen.lora is None else (*exported, Wrap.BLOCK_AND_ADAPTERS)):
        raise SpecError(f"export: wrap {setup.wrap.value} is not exported; use block")
    text += blocks_text(setup)
    if setup.is_ddp:
        text += _ddp(setup)
    else:
        text += _fsdp2(chosen) if setup.api is Api.FSDP2 else _fsdp1(chosen, on_host)
    if not (around := around_text(setup)):
        return text
    end, wrapped = "    return model\n", "FullyShardedDataParallel("
    return text.replace(f"return {wrapped}", f"model = {wrapped}").removesuffix(end) + around + end


def _adapters(chosen: Chosen) -> str:
    """Return the lines that put adapters in, below those that build the model; empty without adapters."""
    if chosen.lora is None:
        return ""
    put, inputs = adapters_text(chosen.setup), "".join(f"    {line}\n" for line in inputs_text(chosen.setup))
    if is_filled_in_4_bits(chosen.setup, chosen.lora):
        return f"        model = quantize(model)\n        {put}\n{inputs}"
    if not chosen.lora.is_quantized:
        return f"        {put}\n{inputs}"
    return f"    model = quantize(model, device)\n    {put}\n{inputs}"


def _ddp(setup: TrainSetup) -> str:
    precision = setup.precision
    text = "".join(f"    {line}\n" for line in autocast_text(setup, "device.type"))
    if setup.is_bare:
        return text + "    return model\n"
    text += (
        "    model = DistributedDataParallel(model, device_ids=[device] if device.type == 'cuda' else None)\n".replace(
            "'", '"'
        )
    )
    if precision.reduce != precision.store:
        text += f"    model.register_comm_hook(None, {precision.reduce}_compress_hook)\n"
    return text + "    return model\n"


def autocast_text(setup: TrainSetup, device_type: str) -> list[str]:
    """Return the statement that runs a model without FSDP under autocast, if its precision is mixed."""
    precision = setup.precision
    if precision.compute == precision.store:
        return []
    return [f"model.forward = torch.autocast({device_type}, dtype={DTYPES[precision.compute]})(model.forward)"]


def _mesh(setup: TrainSetup) -> str:
    if not setup.strategy.is_hybrid:
        return "init_device_mesh(device.type, (dist.get_world_size(),))"
    shard = setup.shard_group_size
    return (
        f"init_device_mesh(device.type, (dist.get_world_size() // {shard}, {shard}),"
        ' mesh_dim_names=("replicate", "shard"))'
    )


def _policy(compute: str, reduce: str) -> str:
    return f"MixedPrecisionPolicy(param_dtype={DTYPES[compute]}, reduce_dtype={DTYPES[reduce]})"


def _fsdp2(chosen: Chosen) -> str:
    setup, precision = chosen.setup, chosen.setup.precision
    if setup.wrap is Wrap.SIZE:
        raise SpecError("export: wrap size under fsdp2 is not exported; use block, or --api fsdp1")
    lines = [f"mesh = {_mesh(setup)}", 'options = {"mesh": mesh}']
    if is_mixed(setup):
        lines.append(f'options["mp_policy"] = {_policy(precision.compute, precision.reduce)}')
    if setup.offload is Offload.PARAMS:
        lines.append('options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")')
    reshard = str(setup.reshard_after_forward or setup.strategy.reshards_after_forward)
    before, after = _ends(chosen)
    if before:
        lines.append(f"fully_shard({before}, reshard_after_forward={reshard}, **options)")
    if setup.wrap is not Wrap.NONE:
        each = reshard if setup.reshard_last_block else f"{reshard} if block is not blocks[-1] else False"
        lines += ["for block in blocks:", f"    fully_shard(block, reshard_after_forward={each}, **options)"]
    if after:
        own = "options"
        if setup.fp32_head:
            head, own = setup.head_precision, "in_fp32"
            lines.append(f'in_fp32 = {{**options, "mp_policy": {_policy(head.compute, head.reduce)}}}')
        lines.append(f"fully_shard({after}, reshard_after_forward=False, **{own})")
    lines.append("fully_shard(model, **options)" + _root_reshards(setup))
    lines += _prefetch(chosen, before, after)
    lines += _ON_HOST if setup.offload is Offload.PARAMS else ["model.to_empty(device=device)"]
    lines += [f"{_base(chosen)}.initialize_weights()  # random; or load a checkpoint: {_CHECKPOINT}"]
    lines += zeros_text(chosen)
    lines += [f"{_base(chosen)}.tie_weights()"] if chosen.modules.is_tied else []
    lines += ["fill(model, device)"] if _is_quantized(chosen) else []
    return "".join(f"    {line}\n" for line in [*lines, "return model"])


_CHECKPOINT = "torch.distributed.checkpoint.state_dict"


def _base(chosen: Chosen) -> str:
    """Return the expression of transformers' model."""
    return "model" if chosen.lora is None else "model.get_base_model()"


def _root_reshards(setup: TrainSetup) -> str:
    return "  # torch does not reshard the root after forward" if setup.strategy.reshards_after_forward else ""


def _ends(chosen: Chosen) -> tuple[str, str]:
    """Return the expressions of the units around the blocks; empty without such units."""
    if chosen.setup.wrap is not Wrap.BLOCK_AND_ENDS:
        return "", ""
    ends = chosen.modules.ends
    if ends is None:
        raise SpecError(f"export: {NO_ENDS}")
    before, after = ([f"model.{name}" for name in names] for names in ends)
    if chosen.setup.api is Api.FSDP1:
        return before[0], after[-1]
    return before[0] if len(before) == 1 else f"[{', '.join(before)}]", f"[{', '.join(after)}]"


def _prefetch(chosen: Chosen, before: str, after: str) -> list[str]:
    setup = chosen.setup
    ends = chosen.modules.ends
    units = "list(blocks)"
    if before and ends is not None:
        units = f"[model.{ends.before[0]}, *blocks, model.{ends.after[0]}]"
    lines = []
    if setup.backward_prefetch is BackwardPrefetch.NONE:
        lines += [f"for unit in {units}:", "    unit.set_modules_to_backward_prefetch([unit])  # none but itself"]
    if setup.forward_prefetch:
        lines += [f"units = {units}", "for unit, following in zip(units, units[1:]):"]
        lines.append("    unit.set_modules_to_forward_prefetch([following])")
    return lines


def _fsdp1_units(chosen: Chosen) -> list[str]:
    """Return the statements that name what each unit is wrapped with."""
    setup = chosen.setup
    before, after = _ends(chosen)
    lines = []
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS:
        lines += ["units = {*blocks, *filter(is_trained, model.modules())}", *autocast_text(setup, "device.type")]
    elif setup.wrap.has_blocks:
        units = f"{{*blocks, {before}, {after}}}" if before else "set(blocks)"
        lines.append(f"units = {units}")
    return lines + (_fp32_head(setup, after) if setup.fp32_head else [])


def _fsdp1(chosen: Chosen, on_host: bool) -> str:
    setup, precision = chosen.setup, chosen.setup.precision
    lines = _fsdp1_units(chosen)
    is_on_meta = not on_host and not _is_quantized(chosen)
    if is_on_meta:
        lines += ["", *_initialize(chosen), ""]
    if setup.strategy.is_hybrid:
        lines.append(f"mesh = {_mesh(setup)}")
    lines += ["return FullyShardedDataParallel(", "    model,"]
    lines.append(f"    sharding_strategy=ShardingStrategy.{setup.strategy.value},")
    if setup.strategy.is_hybrid:
        lines.append("    device_mesh=mesh,")
    if setup.wrap is Wrap.SIZE:
        lines.append(
            f"    auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params={setup.min_num_params}),"
        )
    elif setup.wrap is not Wrap.NONE:
        chosen_by = "own.get(module, module in units)" if setup.fp32_head else "module in units"
        lines.append(f"    auto_wrap_policy=CustomPolicy(lambda module: {chosen_by}),")
    if is_mixed(setup):
        dtypes = f"param_dtype={DTYPES[precision.compute]}, reduce_dtype={DTYPES[precision.reduce]}"
        lines.append(f"    mixed_precision=MixedPrecision({dtypes}),")
    if setup.offload is Offload.PARAMS:
        lines.append("    cpu_offload=CPUOffload(offload_params=True),")
    prefetch = setup.backward_prefetch
    which = "None" if prefetch is BackwardPrefetch.NONE else f"BackwardPrefetch.{prefetch.value}"
    lines.append(f"    backward_prefetch={which},")
    lines.append(f"    forward_prefetch={setup.forward_prefetch},")
    lines.append(f"    limit_all_gathers={setup.limit_all_gathers},")
    lines.append(f"    use_orig_params={setup.use_orig_params},")
    lines += ["    device_id=device,"] + (["    param_init_fn=initialize,"] if is_on_meta else []) + [")"]
    return "".join(f"    {line}".rstrip() + "\n" for line in lines)


def _fp32_head(setup: TrainSetup, head: str) -> list[str]:
    """Return the statements that name what each unit is wrapped with, for a head with a policy of its own."""
    reduce = DTYPES[setup.head_precision.reduce]
    own = f"MixedPrecision(param_dtype=torch.float32, reduce_dtype={reduce}, cast_forward_inputs=True)"
    return [f"in_fp32 = {own}", f'own = {{{head}: {{"mixed_precision": in_fp32}}}}']


_ON_HOST = (
    'model.to_empty(device="cpu")',
    "for module in model.modules():  # CPUOffloadPolicy keeps parameters there, and no buffers",
    "    for name, buffer in module.named_buffers(recurse=False):",
    "        setattr(module, name, buffer.to(device))",
)


def _initialize(chosen: Chosen) -> list[str]:
    """Return the function that FSDP1 calls with each module on the meta device."""
    adapters = [
        "        if module in seconds:  # of adapters, which change nothing at first",
        "            module.weight.zero_()",
    ]
    named = 'seconds = {module for name, module in model.named_modules() if ".lora_B." in name}'
    return [
        *([] if chosen.lora is None else [named, ""]),
        "def initialize(module):  # random; the same on every rank",
        "    module.to_empty(device=device, recurse=False)",
        "    with torch.no_grad():",
        f"        {_base(chosen)}._init_weights(module)",
        *([] if chosen.lora is None else adapters),
    ]
