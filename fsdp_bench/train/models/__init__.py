"""The benchmark models in PyTorch with their data, losses and optimizers; and a user's own module.

Read in this order:
    transformer.py         llama and gpt2
    loss.py                cross-entropy: plain, chunked, compiled, other packages'
    optimizer.py           AdamW and SGD
    dtypes.py              torch's dtypes by name
    flash_attn_package.py  attention of the flash-attn package: what its operators allocate and save
    user_module.py         a user's own model: calls its function, and the model
    huggingface.py         builds a Hugging Face model and its batch from a config.json
    torchtitan.py          builds torchtitan's model, its batch and its loss from a config.json
    lora.py                PEFT's adapters in it
    quantized.py           its linear layers in 4 bits, as bitsandbytes keeps them
    model_code.py          builds a trial's model from these two, with data, and its loss
    describe.py            says what such code builds
"""
