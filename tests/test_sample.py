"""The sample of decoders is right in itself: what decodes step by step is what a whole forward computes."""

from __future__ import annotations

import pytest
import torch

from sfi_compile.lab import families
from sfi_compile.lab.families import MissingFamilyError
from sfi_compile.lab.family_list import FAMILIES
from tests.decoders import BY_NAME, EXPECTED, EXPLAINED, TWINS, Decoder, whole
from tests.harness import decode, prompt

PROMPT, CACHE = 19, 96


@pytest.mark.parametrize("decoder", [d for d in BY_NAME.values() if d.name != "training"], ids=lambda d: d.name)
def test_steps_give_what_a_whole_forward_gives(decoder: Decoder) -> None:
    model, _ = decoder.build()
    ids = prompt(2, PROMPT + 4)
    with torch.no_grad():
        steps = decode(decoder, model, model.forward, ids[:, :PROMPT], 4, CACHE, ids[:, PROMPT:])
        expected = whole(decoder, model, ids)[:, PROMPT - 1 :]
    torch.testing.assert_close(steps.logits, expected, rtol=1e-4, atol=1e-4)
    assert expected.std(0).max() > 0.1, "rows do not depend on their text"
    assert not any(p.requires_grad for p in model.parameters())


def test_every_name_is_expected_once() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 35
    assert set(EXPECTED) == set(BY_NAME)
    assert all(BY_NAME[name].codes != (code,) for name, code in EXPLAINED.items())
    assert set(BY_NAME) > TWINS


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (families.build("Unheard"), "has no UnheardConfig"),
        (families.build("Llama", "ForTea"), "has no LlamaForTea"),
        (families.build("Mpt"), "MptForCausalLM of transformers .* has no attention 'sdpa'"),
    ],
)
def test_a_family_that_transformers_does_not_have_says_so(builder: families.Builder, message: str) -> None:
    with pytest.raises(MissingFamilyError, match=message):
        builder()
