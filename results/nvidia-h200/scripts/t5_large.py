"""T5-large of transformers in fp32 with TF32 products and Adafactor: encoder, decoder, attention with biases."""

import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.optimization import Adafactor

torch.backends.cuda.matmul.allow_tf32 = True
config = T5Config(
    vocab_size=32128,
    d_model=1024,
    d_kv=64,
    d_ff=4096,
    num_layers=24,
    num_heads=16,
    dropout_rate=0.1,
    decoder_start_token_id=0,
)
torch.manual_seed(0)
with torch.device("cuda"):
    model = T5ForConditionalGeneration(config)
model.train()
optimizer = Adafactor(model.parameters(), scale_parameter=False, relative_step=False, lr=1e-4)
for _ in range(10):
    tokens = torch.randint(config.vocab_size, (8, 512), device="cuda")
    loss = model(input_ids=tokens, labels=tokens[:, :128].contiguous()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
