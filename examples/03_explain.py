"""What the compiler would do with a model, before anything is compiled: sites, rejections, break-even context.

    python examples/03_explain.py

Needs transformers; the model has the shape of Qwen3-0.6B cut to four layers, with random weights.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

import sfi_compile
from sfi_compile.lab.models import cache_keyword

config = Qwen3Config(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)
model = Qwen3ForCausalLM(config).eval()
cache = {cache_keyword(model): StaticCache(config=config, max_cache_len=32768)}
prompt = torch.arange(8)[None]

with torch.no_grad():
    model(prompt, **cache)  # a decode step needs a cache that has been filled
    report = sfi_compile.explain(model, prompt[:, -1:], **cache)

print(report)
print(f"\nslow and fast steps together beat dense ones from {report.break_even_context} tokens of context on")
