"""A plain FSDP2 training loop of one of several models that are no language models: ``vision.py NAME``."""

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

Step = Callable[[], torch.Tensor]


def vit_large() -> tuple[nn.Module, list[nn.Module], Step]:
    """64 images of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    model = ViTForImageClassification(config).cuda()

    def step() -> torch.Tensor:
        images, labels = torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(2, (64,), device="cuda")
        return model(pixel_values=images, labels=labels).loss

    return model, [module for module in model.modules() if type(module).__name__ == "ViTLayer"], step


def resnet50(layout: torch.memory_format = torch.contiguous_format) -> tuple[nn.Module, list[nn.Module], Step]:
    """128 images of 224 x 224, under autocast."""
    import torchvision

    model = torchvision.models.resnet50().cuda()

    def step() -> torch.Tensor:
        images = torch.randn(128, 3, 224, 224, device="cuda").to(memory_format=layout)
        with torch.autocast("cuda", torch.bfloat16):
            return nn.functional.cross_entropy(model(images), torch.randint(1000, (128,), device="cuda"))

    return model, [model.layer1, model.layer2, model.layer3, model.layer4], step


def whisper_large_v3() -> tuple[nn.Module, list[nn.Module], Step]:
    """8 clips of 30 s, 200 tokens each."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
             (("layers", 32), ("attention_heads", 20), ("ffn_dim", 5120))}  # fmt: skip
    config = WhisperConfig(vocab_size=51866, num_mel_bins=128, d_model=1280, **sizes)
    model = WhisperForConditionalGeneration(config).cuda()

    def step() -> torch.Tensor:
        features, labels = torch.randn(8, 128, 3000, device="cuda"), torch.randint(51865, (8, 200), device="cuda")
        return model(input_features=features, labels=labels).loss

    return model, [*model.model.encoder.layers, *model.model.decoder.layers], step


def sdxl() -> tuple[nn.Module, list[nn.Module], Step]:
    """4 images of 1024 x 1024: the U-Net of stabilityai/stable-diffusion-xl-base-1.0 on latents and text embeddings."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    ).cuda()

    def step() -> torch.Tensor:
        latents, text = torch.randn(4, 4, 128, 128, device="cuda"), torch.randn(4, 77, 2048, device="cuda")
        more = {"text_embeds": torch.randn(4, 1280, device="cuda"), "time_ids": torch.zeros(4, 6, device="cuda")}
        times = torch.randint(1000, (4,), device="cuda")
        found = model(latents, times, encoder_hidden_states=text, added_cond_kwargs=more).sample
        return nn.functional.mse_loss(found.float(), latents)

    return model, [*model.down_blocks, model.mid_block, *model.up_blocks], step


def qwen_vl() -> tuple[nn.Module, list[nn.Module], Step]:
    """1,024 tokens, 256 of them an image of 448 x 448: Qwen/Qwen2.5-VL-7B-Instruct, checkpointed."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    text |= {"num_attention_heads": 28, "num_key_value_heads": 4}
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
    config = Qwen2_5_VLConfig(text_config={**text, "rope_scaling": rope}, vision_config=vision)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.gradient_checkpointing_enable()

    def step() -> torch.Tensor:
        tokens = torch.randint(1000, 100000, (1, 1024))
        tokens[0, 10:266] = config.image_token_id
        types, tokens = (tokens == config.image_token_id).int().cuda(), tokens.cuda()
        grid = torch.tensor([[1, 32, 32]], device="cuda")
        pixels = {"pixel_values": torch.randn(32 * 32, 3 * 2 * 14 * 14, device="cuda"), "image_grid_thw": grid}
        return model(input_ids=tokens, labels=tokens, mm_token_type_ids=types, **pixels).loss

    return model, [*model.model.visual.blocks, *model.model.language_model.layers], step


def main(name: str) -> None:
    """Train three steps."""
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())
    models = {"vit_large": vit_large, "resnet50": resnet50, "whisper_large_v3": whisper_large_v3, "sdxl": sdxl}
    models |= {"qwen_vl": qwen_vl, "resnet50_channels_last": lambda: resnet50(torch.channels_last)}
    model, units, step = models[name]()
    is_autocast = name.startswith("resnet50")
    policy = MixedPrecisionPolicy() if is_autocast else MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in (*units, model):
        fully_shard(unit, mp_policy=policy)
    if next(model.parameters()).is_meta:
        model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        step().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
