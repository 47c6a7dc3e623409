"""``python -m fsdp_bench.train.models.describe [PARENT]``: say what models' code builds.

Standard input: a list of CodeToBuild, as JSON. Standard output: a list of DescriptionAnswer, in the same order.
"""

import sys
from importlib.metadata import version
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import CodeToBuild, UserModule
from fsdp_bench.spec.subprocesses.model_code import DescriptionAnswer
from fsdp_bench.train.models.huggingface import batch_of, build, learned_positions
from fsdp_bench.train.models.lora import adapted, stored_apart
from fsdp_bench.train.models.model_code import block_of
from fsdp_bench.train.models.user_module import UserModel, block_lists, call_users_function, sizes_of
from fsdp_bench.train.processes.child import answered, answers_only

_LENGTH = 16
"""The sequence length for which a user's function is called."""


def describe(spec: CodeToBuild) -> ModelCode:
    """Build the model without data; say what it is. Raises MachineError without transformers, SpecError if it fails."""
    if spec.config is not None:
        with torch.device("meta"):
            model, name = build(spec.config) if spec.lora is None else adapted(spec.config, spec.lora)
            has_tokens = "input_ids" in batch_of(model, 1, 1)
        config: Any = model.config
        text, block = config.get_text_config(), block_of(model)
        packages = ("transformers", *(spec.lora.packages if spec.lora is not None else ()))
        code: dict[str, Any] = {"code": "huggingface", "config": spec.config, "lora": spec.lora}
        code["versions"] = {package: version(package) for package in packages}
    else:
        assert spec.module is not None
        arguments, user, text = sizes_of(spec.module), _users_model(spec.module), None
        model, name = user.model, type(user.model).__name__
        has_tokens, block = "sequence_length" in arguments, user.block or block_of(model)
        code = {"code": "module", "function": spec.module.function, "transformer_block": spec.module.block}
        code |= {"folder": spec.module.folder, "arguments": arguments}
    sizes = ((size, getattr(text, size, None)) for size in ("hidden_size", "vocab_size"))
    code |= {size: value for size, value in sizes if isinstance(value, int)}
    return ModelCode(
        name=name,
        architecture=name,
        num_parameters=sum(parameter.numel() * stored_apart(parameter)[1] for parameter in model.parameters()),
        num_hidden_layers=None if block is None else max(block_lists(model, block).values(), default=None),
        max_position_embeddings=learned_positions(model) if has_tokens else None,
        has_tokens=has_tokens,
        **code,
    )


def _users_model(module: UserModule) -> UserModel:
    """Call the user's function without data, or with data if it needs some."""
    setup = TrainSetup(sequence_length=_LENGTH)
    try:
        with FakeTensorMode():
            return call_users_function(module, setup, torch.float32)
    except SpecError:
        return call_users_function(module, setup, torch.float32)


def answer(spec: CodeToBuild) -> DescriptionAnswer:
    """Describe; return the description or the error."""
    return answered(DescriptionAnswer, lambda: DescriptionAnswer(described=describe(spec)))


def main() -> None:
    """Answer standard input."""
    out = answers_only()
    specs = from_json(sys.stdin.buffer.read(), tuple[CodeToBuild, ...])
    out.buffer.write(msgspec.json.encode([answer(spec) for spec in specs]))
    out.flush()


if __name__ == "__main__":
    main()
