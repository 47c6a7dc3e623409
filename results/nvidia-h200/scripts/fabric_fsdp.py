"""A GPT of nn.TransformerEncoderLayer by Lightning Fabric's FSDP strategy, bf16-mixed, activation checkpointing."""

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from torch import nn

DIM, HEADS, LAYERS, VOCAB, LENGTH, BATCH = 2048, 16, 18, 32000, 2048, 2


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                DIM, HEADS, 4 * DIM, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


strategy = FSDPStrategy(
    auto_wrap_policy={nn.TransformerEncoderLayer}, activation_checkpointing_policy={nn.TransformerEncoderLayer}
)
fabric = Fabric(accelerator="cuda", devices=1, strategy=strategy, precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(0)
with fabric.init_module(empty_init=False):
    model = Decoder()
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-4))
for _ in range(10):
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), device=fabric.device)
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
