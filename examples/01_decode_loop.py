"""A decode loop written by hand: `torch.compile(model, backend="sfi")` on a static cache, and what its steps were.

    python examples/01_decode_loop.py

Needs transformers; the model is tiny and has random weights, so nothing is downloaded.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import sfi_compile
from sfi_compile.lab.models import cache_keyword

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(config.vocab_size, (1, 300))
cache = {cache_keyword(model): StaticCache(config=config, max_cache_len=512)}

# Small budgets, so that a small model has something to leave out; tokens 0 to 127 end a sentence here.
options: dict[str, Any] = {
    "k_head": 32,
    "recent": 32,
    "refresh_interval": 32,
    "min_context": 0,
    "boundary_token_ids": range(128),
}
step = torch.compile(model, backend="sfi", options=options)

with torch.no_grad():
    # The prompt goes through the model itself; only steps of one token are worth compiling.
    logits = model(prompt, **cache).logits
    tokens = []
    for _ in range(100):
        token = logits[:, -1:].argmax(-1)
        tokens.append(int(token))
        logits = step(token, **cache).logits

print("tokens:", *tokens[:20], "…")
stats = sfi_compile.stats()
print(
    f"{stats.sites} sites, {stats.slow_steps} slow and {stats.fast_steps} fast steps, slow because of {stats.triggers}"
)
print(f"a fast step attended to {stats.support:.0f} tokens per KV head, {stats.retention:.0%} of the context")
