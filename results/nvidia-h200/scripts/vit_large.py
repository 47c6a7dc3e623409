"""ViT-L/16 of timm in bf16 autocast, 64 images: its patches are a convolution. One GPU."""

import timm
import torch
import torch.nn.functional as F

torch.manual_seed(0)
with torch.device("cuda"):
    model = timm.create_model("vit_large_patch16_224").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for _ in range(10):
    images, labels = torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(1000, (64,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
