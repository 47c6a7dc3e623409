"""``fsdp-bench record``: record a model's code, so that it can be predicted."""

import os
import time
from pathlib import Path
from typing import Any

import click

from fsdp_bench.catalog.hf_config import read_config
from fsdp_bench.catalog.recorded import recorded_model
from fsdp_bench.cli.common.options import FILE, LORA_OPTIONS, SetupOptions
from fsdp_bench.cli.common.printing import Fact, print_facts, print_json
from fsdp_bench.cli.common.setups import read_lora
from fsdp_bench.plan.recording import record, write
from fsdp_bench.report.terminal import print_line
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.subprocesses.dry_run import UserModule
from fsdp_bench.spec.subprocesses.model_code import RecordingSpec


@click.command("record")
@click.option("--hf-config", type=FILE, metavar="FILE", help="A Hugging Face config.json, of any architecture.")
@click.option(
    "--module",
    metavar="PKG.MOD:FUNCTION",
    help="A function of micro_batch_size and sequence_length that returns (nn.Module, batch).",
)
@click.option("--lora", metavar="RANK|FIELDS", help=LORA_OPTIONS["--lora RANK|FIELDS"])
@click.option("--qlora", metavar="RANK|FIELDS", help=LORA_OPTIONS["--qlora RANK|FIELDS"])
@click.option("--transformer-block", "block", metavar="PKG.MOD:CLASS", help="Class of the model's blocks.")
@click.option(
    "--seq",
    "sequence_length",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="For a model with a sliding window: record for sequences on this side of it.",
)
@click.option(
    "--fixed-length",
    is_flag=True,
    help="Record for sequences of --seq tokens alone: for code that loops over the sequence.",
)
@click.option("--activation-offload", is_flag=True, help="Record it for activation offload, too: twice the time.")
@click.option("--output", "-o", type=FILE, metavar="FILE", help="The file to write. Default: NAME.recorded.json.gz")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    hf_config: Path | None,
    module: str | None,
    block: str | None,
    lora: str | None,
    qlora: str | None,
    output: Path | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Record a model's code once, without data and without a GPU, so that it can be predicted.

    Runs the code on tensors without data, unwrapped, and writes down what it allocates, saves for backward, frees and
    computes. ``predict --recorded FILE`` then answers for every strategy, precision, checkpointing, world and depth.
    Needs torch, and transformers for a config.json.

    \b
    fsdp-bench record --hf-config config.json -o qwen.recorded.json.gz
    fsdp-bench predict --recorded qwen.recorded.json.gz --server p5.48xlarge
    """
    adapters = read_lora(SetupOptions(lora=lora, qlora=qlora))
    spec = RecordingSpec(**_subject(hf_config, module, block, adapters is not None), lora=adapters, **how)
    name = _name(hf_config, module)
    path = output or Path(f"{name}.recorded.json.gz")
    if not path.absolute().parent.is_dir():
        raise SpecError(f"output: {str(path.parent)!r} is no folder")
    begin = time.monotonic()
    code = record(spec, lambda what: print_line(f"recording: {what} ...", error=True))
    size = write(code, path)
    model = recorded_model(code, name if adapters is None else f"{name} with {adapters.title}")
    seconds = time.monotonic() - begin
    if as_json:
        print_json({**model.document(), "file": str(path), "missing": code.missing, "seconds": seconds})
    else:
        print_facts([*_facts(model), ("file", f"{path} ({size // 1024} KiB), in {seconds:.0f} s")])


def _subject(hf_config: Path | None, module: str | None, block: str | None, has_adapters: bool) -> dict[str, Any]:
    if (hf_config is None) == (module is None):
        raise SpecError("record: name the code, with --hf-config FILE or with --module PKG.MOD:FUNCTION")
    if hf_config is not None:
        if block is not None:
            raise SpecError("--transformer-block goes with --module; of a config.json transformers knows it")
        return {"config": read_config(hf_config)}
    if has_adapters:
        raise SpecError("lora: goes with --hf-config; the function of --module puts in its adapters itself")
    return {"module": UserModule(function=str(module), block=block, folder=os.getcwd())}


def _name(hf_config: Path | None, module: str | None) -> str:
    if hf_config is not None:
        return hf_config.absolute().parent.name if hf_config.stem == "config" else hf_config.stem
    return str(module).rpartition(":")[2]


def _facts(model: RecordedModel) -> list[Fact]:
    code = model.code
    facts = [
        ("recorded", f"{model.kind}, {model.num_parameters:,} parameters"),
        ("blocks", ", ".join(f"{count} x {code.block} in {name}" for name, count in model.counts)),
        ("versions", ", ".join(f"{name} {version}" for name, version in code.origin.versions.items())),
        ("variants", ", ".join(name for name in code.variants if "one sequence" not in name)),
    ]
    facts += [("not possible", f"{name}: {reason}") for name, reason in code.missing.items()]
    if code.longest is not None and code.shortest == code.longest:
        facts.append(("sequences", f"of {code.longest} tokens alone"))
    elif code.longest is not None:
        facts.append(("sequences", f"up to {code.longest} tokens, the sliding window; --seq records longer ones"))
    elif code.shortest > 1:
        facts.append(("sequences", f"longer than the sliding window of {code.shortest - 1} tokens"))
    return facts
