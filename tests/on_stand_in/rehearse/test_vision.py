"""Models with convolutions, rehearsed unmodified on FSDP2: images, speech, diffusion, images and text."""

import pytest

from tests.on_stand_in.rehearsing import SCRIPTS, rehearse

MODELS = {
    "vit_large": "transformers",
    "resnet50": "torchvision",
    "resnet50_channels_last": "torchvision",
    "whisper_large_v3": "transformers",
    "sdxl": "diffusers",
    "qwen_vl": "transformers",
}
"""Models of scripts/vision.py, and the package that each needs."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_convolutions_takes_the_same_memory_twice(name: str) -> None:
    pytest.importorskip(MODELS[name])
    words = ("--server", "p5.48xlarge", "--nodes", "1", "--", "--nproc-per-node", "8", str(SCRIPTS / "vision.py"), name)
    first, second = (rehearse(*words, command="torchrun").document for _ in range(2))
    assert first["memory"] == second["memory"]
    assert first["unsupported"] == {}
    assert first["num_steps"] == 3
    assert first["fits"] is True
