"""A training loop with PEFT's LoRA: ``peft_loop.py lora|qlora fsdp1|fsdp2|none [checkpointing] [inside|around]``.

The base is stored in bf16, as most checkpoints are; of qlora in 4 bits, in bf16 elements, so that FSDP can shard it.
``inside`` and ``around`` are reentrant checkpointing, in transformers' way of today and in that of 2024.
"""

import functools
import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

kind, api, *more = sys.argv[1:]
dist.init_process_group("nccl")
torch.cuda.set_device(0)
config = LlamaConfig(
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=2000,
    use_cache=False,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
if kind == "qlora":
    weights = model.state_dict()
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    model = replace_with_bnb_linear(model, ["lm_head"], quantization)
    model.load_state_dict(weights, assign=True)
    for module in model.modules():  # a state_dict's tensors are no Params4bit
        if type(module).__name__ == "Linear4bit":
            from bitsandbytes.nn import Params4bit

            module.weight = Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4", quant_storage=torch.bfloat16, module=module
            )
    del weights
    model = model.to("cuda")
    model.is_loaded_in_4bit = True
model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
if "checkpointing" in more and "around" not in more:
    model.gradient_checkpointing_enable({"use_reentrant": "inside" in more})
if api == "fsdp1":
    model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)  # as accelerate does
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=fsdp_auto_wrap_policy(model),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=0,
        use_orig_params="flat" not in more,
    )
elif api == "fsdp2":
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
else:
    model = model.to("cuda")
    model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)
if "around" in more:  # as LlamaModel.forward did: checkpoint(decoder_layer.__call__, ...)
    model.enable_input_require_grads()
    layers = model.get_base_model().model.layers
    for index, layer in enumerate(list(layers)):
        layers[index] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.REENTRANT)
optimizer = torch.optim.AdamW((parameter for parameter in model.parameters() if parameter.requires_grad), foreach=True)
tokens = functools.partial(torch.randint, 0, 2000, (1, 2048))
for _ in range(4):
    ids = tokens().cuda()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
