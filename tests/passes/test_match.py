"""match: analysis only; every field of a Site; the input that holds the tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from sfi_compile.config import Config
from sfi_compile.passes import pipeline
from sfi_compile.passes.base import Work
from sfi_compile.site import CacheWrite, Guard
from tests.decoders import CACHE
from tests.passes.toys import SDPA, Recorded, matched, minimal, operands, record, tensor, written

N = 8


def grouped(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """Repeated heads by expand and reshape (keys) and by repeat_interleave (values)."""
    mask = written(k, v, keys, values, pos)
    batch, heads, size, dim = keys.shape
    group = q.shape[1] // heads
    repeated = keys[:, :, None].expand(batch, heads, group, size, dim).reshape(batch, heads * group, size, dim)
    return SDPA(q, repeated, values.repeat_interleave(group, dim=1), attn_mask=mask, scale=0.25)


def test_every_field_of_a_site() -> None:
    q, k, _, keys, _, pos = operands(batch=2, query_heads=4, kv_heads=2, dim=4)
    v, values = tensor(2, 2, 1, 3), tensor(2, 2, N, 3)
    recorded = record(grouped, q, k, v, keys, values, pos)
    work = pipeline.run(pipeline.ANALYSIS, Work(Config(), recorded.module))
    found, nodes = work.matched, {n.name: n for n in work.graph.graph.nodes}
    assert not found.rejections
    (site,) = found.sites
    expected = {
        "query": nodes["l_q_"],
        "key": nodes["l_keys_"],
        "value": nodes["l_values_"],
        "mask": nodes["mask"],
        "scale": 0.25,
        "softcap": 0.0,
        "sinks": None,
        "fill": None,
        "writes": (
            CacheWrite(nodes["index_copy_"], nodes["l_keys_"], 2, 0, nodes["l_pos_"], 1, nodes["l_k_"]),
            CacheWrite(nodes["index_copy__1"], nodes["l_values_"], 2, 0, nodes["l_pos_"], 1, nodes["l_v_"]),
        ),
        "batch": 2,
        "query_heads": 4,
        "kv_heads": 2,
        "query_len": 1,
        "key_dim": 4,
        "value_dim": 3,
        "context": N,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "constants": (),
        "context_sources": (nodes["l_keys_"], nodes["l_values_"], nodes["arange"]),
        "kept": (),
    }
    assert {name: getattr(site, name) for name in expected} == expected
    assert {f.name for f in dataclasses.fields(site)} == {*expected, "module", "form"}
    form = site.form
    assert (form.name, form.original, form.repeats_heads) == ("sdpa", nodes["scaled_dot_product_attention"], True)
    assert form.node is form.result
    assert form.node.target is torch.ops.sfi.attention.default
    assert site.group == 2
    assert found.guard == Guard((nodes["l_pos_"],), None, site.writes[0], telling=False)


def test_defaults_and_a_transposed_cache_of_one_row() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys[:, pos] = k
        values[:, pos] = v
        mask = (torch.arange(N) <= pos).expand(1, 1, 1, N)
        return SDPA(q, keys.transpose(1, 2), values.transpose(1, 2), mask)

    q, k, v, keys, values, pos = operands(query_heads=2, kv_heads=2, dim=4)
    turned = (t.transpose(1, 2).contiguous() for t in (k, v, keys, values))
    (site,) = matched(record(function, q, *turned, pos).module).sites
    assert (site.scale, site.form.repeats_heads) == (0.5, False)
    assert [(w.axis, w.batch_axis) for w in site.writes] == [(1, 0)] * 2


def test_a_position_may_move_on_where_nobody_reads_it_again() -> None:
    """Computed from a counter that is then advanced, as in StaticCache; or advanced after attention."""

    def counter(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
        pos = torch.arange(1) + length
        mask = (torch.arange(N) <= pos)[None, None, None]
        length.add_(1)
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        return SDPA(q, keys, values, attn_mask=mask)

    def after(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        pos = pos + 1
        out = minimal(q, k, v, keys, values, pos)
        pos += 1
        return out

    for function in (counter, after):
        found = matched(record(function, *operands()).module)
        assert (len(found.sites), found.rejections) == (1, ())


class TestFingerprint:
    """Whether the keys watched depend on the text before them."""

    @staticmethod
    def telling(function: Callable[..., Any], *more: Tensor) -> tuple[bool, str]:
        guard = matched(record(function, *operands(), *more).module).guard
        assert guard is not None
        return guard.telling, guard.write.root.name

    def test_one_layer(self) -> None:
        assert self.telling(minimal) == (False, "l_keys_")

    def test_the_last_layer_that_depends_on_another(self) -> None:
        def two(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, *other: Tensor) -> Tensor:
            x = minimal(q, k, v, keys, values, pos)
            return minimal(x, x, v, *other, pos)

        assert self.telling(two, tensor(1, 1, 8, 2), tensor(1, 1, 8, 2, seed=1)) == (True, "l_other_0_")

    def test_a_cache_shared_by_two_layers(self) -> None:
        def shared(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
            mask = written(k, v, keys, values, pos)
            return SDPA(SDPA(q, keys, values, attn_mask=mask), keys, values, attn_mask=mask)

        assert self.telling(shared) == (False, "l_keys_")


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda m, n: m & torch.full(size=(1, 1, 1, n), fill_value=True),
        lambda m, n: m.transpose(2, 3).permute(dims=(0, 1, 3, 2)),
    ],
)
def test_keywords_in_a_mask_are_no_reason_to_fail(mask_of: Callable[[Tensor, int], Tensor]) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        return SDPA(q, keys, values, attn_mask=mask_of(written(k, v, keys, values, pos), N))

    found = matched(record(function, *operands(size=N)).module)
    assert len(found.sites) + len(found.rejections) == 1


def test_atens_own_attention() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        mask = written(k, v, keys, values, pos)
        return torch.ops.aten.scaled_dot_product_attention(q, keys, values, mask, 0.0, False, scale=0.3)

    (site,) = matched(record(function, *operands()).module).sites
    assert site.scale == 0.3


class TestTokens:
    """The input that holds the token ids fed."""

    @staticmethod
    def tokens(function: Callable[..., Any], *inputs: Any) -> str | None:
        guard = matched(record(function, *inputs).module).guard
        assert guard is not None
        return None if guard.tokens is None else guard.tokens.name

    @pytest.mark.parametrize(
        ("ids_of", "expected"), [(lambda i: i, "l_ids_"), (lambda i: i.view(-1, 1), "l_ids_"), (lambda i: i + 1, None)]
    )
    def test_through_a_view_but_not_computed(self, ids_of: Callable[[Tensor], Tensor], expected: str | None) -> None:
        def function(ids: Tensor, table: Tensor, *rest: Tensor) -> Tensor:
            return minimal(torch.nn.functional.embedding(ids_of(ids), table)[:, None], *rest)

        assert self.tokens(function, torch.tensor([[3]]), tensor(9, 2), *operands()[1:]) == expected

    @pytest.mark.parametrize("first", ["ids", "places"])
    def test_the_larger_table_when_positions_are_looked_up_too(self, first: str) -> None:
        def function(ids: Tensor, places: Tensor, words: Tensor, positions: Tensor, *rest: Tensor) -> Tensor:
            pairs = [(ids, words), (places, positions)]
            x, y = (torch.nn.functional.embedding(*pair) for pair in (pairs if first == "ids" else pairs[::-1]))
            return minimal((x + y)[:, None], *rest)

        one = torch.tensor([[1]])
        assert self.tokens(function, one, one + 1, tensor(9, 2), tensor(4, 2), *operands()[1:]) == "l_ids_"

    def test_the_table_as_long_as_the_logits_are_wide(self) -> None:
        """A byte-level model has more positions than tokens."""

        def function(ids: Tensor, places: Tensor, words: Tensor, positions: Tensor, *rest: Tensor) -> Tensor:
            f = torch.nn.functional.embedding
            x = f(places, positions) + f(ids, weight=words)
            return minimal(x[:, None], *rest) @ words.T

        one = torch.tensor([[1]])
        assert self.tokens(function, one, one + 1, tensor(3, 2), tensor(9, 2), *operands()[1:]) == "l_ids_"

    def test_none_when_embeddings_are_fed(self) -> None:
        assert self.tokens(minimal, *operands()) is None

    @pytest.mark.parametrize("family", ["Llama", "GPT2"])
    def test_models(self, family: str) -> None:
        """GPT-2 looks up positions as well, given here as an input of the same shape as the ids."""
        sizes = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1}
        if family == "Llama":
            config: Any = transformers.LlamaConfig(
                hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **sizes
            )
            model: Any = transformers.LlamaForCausalLM(config).eval()
        else:
            config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, **sizes)
            model = transformers.GPT2LMHeadModel(config).eval()
        cache = transformers.StaticCache(config=config, max_cache_len=16)
        with torch.no_grad():
            model(torch.zeros(2, 3, dtype=torch.int64), use_cache=True, **{CACHE: cache})

        def step(ids: Tensor, positions: Tensor) -> Tensor:
            logits: Tensor = model(ids, position_ids=positions, use_cache=True, **{CACHE: cache}).logits
            return logits

        ids, positions = torch.tensor([[4], [5]]), torch.tensor([[3], [3]])
        recorded: Recorded = record(step, ids, positions)
        found = matched(recorded.module)
        assert found.guard is not None
        assert found.guard.tokens is not None
        assert found.guard.tokens.name == "l_ids_"
        assert len(found.sites) == 1
