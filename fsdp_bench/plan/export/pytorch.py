"""train_fsdp.py: a training script with torch and transformers alone, for torchrun."""

from __future__ import annotations

from fsdp_bench.plan.export.adapters import TRAINED, adapters_config, adapters_functions, adapters_imports
from fsdp_bench.plan.export.blocks import blocks_imports, policy_text
from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import File
from fsdp_bench.plan.export.header import header
from fsdp_bench.plan.export.launch import environment, torchrun
from fsdp_bench.plan.export.pieces import (
    TOKENS,
    config_text,
    forward_text,
    loss_imports,
    loss_text,
    optimizer_imports,
    optimizer_text,
    sizes_text,
)
from fsdp_bench.plan.export.plugin import host_note
from fsdp_bench.plan.export.sharding import is_built_on_host, model_text, sharding_imports
from fsdp_bench.spec.setup import Api, TrainSetup

KIND = "pytorch"
NAME = "train_fsdp.py"


def script(chosen: Chosen, notes: tuple[str, ...]) -> list[File]:
    """Return the script.

    Raises:
        SpecError: for what is not exported.
    """
    setup = chosen.setup
    loss = loss_text(setup, chosen.architecture, chosen.config)
    optimizer = optimizer_text(setup, "model.parameters()" if chosen.lora is None else TRAINED)
    on_host = (host_note(chosen, KIND),) if is_built_on_host(chosen) else ()
    notes = (*notes, *on_host, *environment(chosen))
    text = (
        header("Training with PyTorch", chosen, notes)
        + _imports(setup, adapters_imports(setup, chosen.lora))
        + "\n"
        + config_text(chosen.config)
        + adapters_config(chosen.lora)
        + sizes_text(chosen)
        + 'STEPS = int(os.environ.get("STEPS", "20"))\n'
        + policy_text(setup)
        + _spaced(TOKENS, loss, *_model(chosen), _step(setup), _main(chosen, optimizer))
    )
    return [File(KIND, NAME, text, torchrun(chosen, NAME), notes)]


def _model(chosen: Chosen) -> tuple[str, str]:
    return adapters_functions(chosen.setup, chosen.lora), model_text(chosen)


def _spaced(*functions: str) -> str:
    return "".join(f"\n{function}" for function in functions if function)


def _imports(setup: TrainSetup, of_adapters: list[str]) -> str:
    found = [
        *of_adapters,
        "import torch.distributed as dist",
        *sharding_imports(setup),
        *blocks_imports(setup),
        *loss_imports(setup),
        *optimizer_imports(setup),
        "from transformers import AutoConfig, AutoModelForCausalLM",
    ]
    if setup.precision.needs_grad_scaler and setup.api is Api.FSDP1:
        found.append("from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler")
    standard = ["import os", "import time"]
    standard += ["from functools import partial"] if "from functools import partial" in found else []
    keeps_local = _keeps_gradients(setup) and not setup.uses_fully_shard
    standard += ["from contextlib import nullcontext"] if keeps_local else []
    others = [line for line in dict.fromkeys(found) if line not in standard]
    plain = sorted(line for line in others if line.startswith("import "))
    named = sorted(line for line in others if line.startswith("from "))
    first = sorted(standard, key=lambda line: (line.startswith("from"), line))
    return "\n".join([*first, "", "import torch", *plain, *named]) + "\n"


def _keeps_gradients(setup: TrainSetup) -> bool:
    """Whether gradients are kept unreduced in all micro-batches but the last."""
    return setup.gradient_accumulation_steps > 1 and not setup.sync_every_micro_batch and not setup.is_bare


def _step(setup: TrainSetup) -> str:
    scaler = setup.precision.needs_grad_scaler
    body = [f"loss = {forward_text(setup)} / MICRO_BATCHES"]
    body.append("scaler.scale(loss).backward()" if scaler else "loss.backward()")
    if _keeps_gradients(setup):
        last = "is_last = index == MICRO_BATCHES - 1"
        if setup.uses_fully_shard:
            body = [last, "model.set_requires_gradient_sync(is_last)", "batch = next(data)", *body]
        else:
            body = [last, "batch = next(data)", "with nullcontext() if is_last else model.no_sync():"] + [
                f"    {line}" for line in body
            ]
    else:
        body.insert(0, "batch = next(data)")
    after = ["scaler.unscale_(optimizer)"] if scaler else []
    if setup.max_grad_norm is not None:
        norm = f"{setup.max_grad_norm!r}"
        is_fsdp1 = setup.api is Api.FSDP1
        after.append(
            f"model.clip_grad_norm_({norm})"
            if is_fsdp1
            else f"torch.nn.utils.clip_grad_norm_(model.parameters(), {norm})"
        )
    after += ["scaler.step(optimizer)", "scaler.update()"] if scaler else ["optimizer.step()"]
    after.append("optimizer.zero_grad()")
    given = "model, optimizer, data" + (", scaler" if scaler else "")
    index = "index" if _keeps_gradients(setup) else "_"
    lines = [
        f"def step({given}):",
        '    """Run one optimizer step; return the loss of the last micro-batch."""',
        f"    for {index} in range(MICRO_BATCHES):",
        *(f"        {line}" for line in body),
        *(f"    {line}" for line in after),
        "    return loss * MICRO_BATCHES",
    ]
    return "\n" + "\n".join(lines) + "\n"


def _main(chosen: Chosen, optimizer: str) -> str:
    setup = chosen.setup
    is_whole_first = chosen.lora is not None and chosen.lora.is_quantized
    emptied = "    torch.cuda.empty_cache()  # what was whole before it was sharded\n" if is_whole_first else ""
    scaler, given = "", "model, optimizer, data"
    if setup.precision.needs_grad_scaler:
        kind = "ShardedGradScaler" if setup.api is Api.FSDP1 else "torch.amp.GradScaler"
        scaler, given = f"    scaler = {kind}(device=device.type)\n", f"{given}, scaler"
    return f"""
def main():
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    model = build(device)
{emptied}    optimizer = {optimizer}
{scaler}    torch.manual_seed({setup.seed} + dist.get_rank())
    data = batches(VOCABULARY, device)
    for number in range(1, STEPS + 1):
        start = time.perf_counter()
        loss = step({given}).item()
        rate = BATCH * LENGTH * MICRO_BATCHES / (time.perf_counter() - start)
        if dist.get_rank() == 0:
            line = f"step {{number}}: loss {{loss:.3f}}, {{rate:,.0f}} tokens/s per GPU"
            if on_gpu:
                line += f", {{torch.cuda.max_memory_reserved() / 2**30:.1f}} GiB reserved at most"
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
