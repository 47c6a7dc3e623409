"""Six blocks of Llama-3.1-8B of its own code, all in bf16, each block compiled; RECIPE says which float8, if any."""

import torch
import torch.nn.functional as F
from torch import nn

RECIPE = globals().get("RECIPE", "")
DIM, HEADS, KV_HEADS, HIDDEN, LAYERS, VOCAB, LENGTH, BATCH = 4096, 32, 8, 14336, 6, 32000, 4096, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
        self.head = DIM // HEADS
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, KV_HEADS * self.head, bias=False)
        self.v = nn.Linear(DIM, KV_HEADS * self.head, bias=False)
        self.o = nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def rotate(self, x, cos, sin):
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        y = self.attention_norm(x)
        q = self.q(y).view(b, s, HEADS, self.head).transpose(1, 2)
        k = self.k(y).view(b, s, KV_HEADS, self.head).transpose(1, 2)
        v = self.v(y).view(b, s, KV_HEADS, self.head).transpose(1, 2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, DIM))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, cos, sin):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = Llama()
torch.set_default_dtype(torch.float32)
if RECIPE:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model, config=Float8LinearConfig.from_recipe_name(RECIPE), module_filter_fn=lambda module, name: name != "head"
    )
for block in model.blocks:
    block.compile()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
angles = torch.outer(
    torch.arange(LENGTH, device="cuda").float(), 500000.0 ** -(torch.arange(0, 128, 2, device="cuda") / 128.0)
)
cos, sin = angles.cos(), angles.sin()
for _ in range(10):
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), device="cuda")
    logits = model(tokens, cos, sin)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
