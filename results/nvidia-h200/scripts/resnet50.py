"""ResNet-50 of torchvision, channels last, fp16 autocast, 256 images. One GPU."""

import torch
import torch.nn.functional as F
from torchvision.models import resnet50

torch.manual_seed(0)
model = resnet50().cuda().to(memory_format=torch.channels_last).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for _ in range(10):
    images = torch.randn(256, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (256,), device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
