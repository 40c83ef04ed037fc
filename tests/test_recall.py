"""How much of dense attention memories catch: against memories read after every step, and where it cannot be told."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sfi_compile
from sfi_compile.lab import decode, evaluate, probabilities, recall, tasks
from sfi_compile.lab.decode import Decoder
from sfi_compile.lab.errors import LabError
from sfi_compile.lab.models import load, static_cache
from sfi_compile.lab.recall import NoRecallError, Recorder, recalls
from sfi_compile.lab.records import Records
from sfi_compile.lab.reference import Reference
from tests.harness import eager_lowering
from tests.test_evaluate import encode, settings_of


@pytest.mark.parametrize("at_once", [1, 32])
def test_recall_is_the_dense_attention_on_what_memories_hold(
    at_once: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against memories read after every step, and attention of the whole text at once."""
    monkeypatch.setattr(probabilities, "CHUNK", at_once)
    model, _ = load(str(folder), torch.float32)
    ids = torch.randint(3, model.config.vocab_size, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = tasks.passages("natural", ids, encode, 60, 40, 2, 0)
    own = 40, 25  # what the second is fed after these is not of its passage
    rows[1] = tasks.Passage(rows[1].context, rows[1].targets[:25], rows[1].scored[:25])
    cache = static_cache(model, 103)
    reference = Reference.of(model, cache, rows, lambda done: None)
    options = {
        "policy": "topk", "k_head": 8, "recent": 3, "refresh_interval": 6, "min_refresh_gap": 4, "min_context": 0,
    }  # fmt: skip
    # So that rows do not refresh at once.
    boundary = next(t for t in reference.tokens[0, 10:].tolist() if t not in reference.tokens[1])
    steps: list[int] = []
    with eager_lowering():
        decoder = Decoder(model, cache, "sfi", {"boundary_token_ids": (boundary,), **options})
        _, recorder = evaluate._measure(decoder, cache, reference, lambda done: None)
        assert recorder is not None
        found = recalls(model, cache, reference, recorder, decoder.sites(), steps.append)
        reference.restore(cache)
        sfi_compile.reset()
        held, made = [], []
        for i in range(40):
            decoder.step(reference.tokens[:, i : i + 1])
            supports = decoder.supports()
            assert supports is not None
            at, sites = supports
            made.append(at)
            held.append([site.clone() for site in sites])
    assert sum(steps) == 40
    assert len({tuple(x) for x in zip(*made, strict=True)}) == 2
    model.set_attn_implementation("eager")
    whole = torch.cat([torch.tensor([row.context for row in rows])[:, :-1], reference.tokens], 1)
    with torch.no_grad():
        attentions = model(whole, output_attentions=True).attentions
    assert found is not None
    for b, length in enumerate(own):
        of_age: dict[int, list[float]] = {}
        for i in range(length):
            shares = []
            for layer, site in zip(attentions, held[i], strict=True):
                for head in range(layer.shape[1]):
                    kept = {int(t) for t in site[b, head // (layer.shape[1] // site.shape[1])] if t >= 0}
                    shares.append(math.fsum(float(layer[b, head, 59 + i, t]) for t in kept))
            of_age.setdefault(59 + i - int(made[i][b]), []).append(math.fsum(shares) / len(shares))
        expected = [math.fsum(of_age[age]) / len(of_age[age]) for age in range(len(of_age))]
        assert found[b] == pytest.approx(expected, abs=2e-6)
    assert 0.1 < float(found[0][0] or 0) < 1.0


def test_steps_that_are_not_of_the_passage_and_rows_without_memory_do_not_count() -> None:
    recorder = Recorder()
    held = [torch.tensor([[[0, 1, -1]], [[0, 2, -1]]])]
    for made in ([3, None], [3, None], [5, 5], [5, 5]):
        recorder.add(made, held)
    attention = torch.zeros(2, 4, 1, 8)
    attention[..., 1], attention[..., 2] = 0.75, 0.25
    caught = recorder.caught(attention, 0, 0)
    assert caught[0].tolist() == [0.75] * 4
    assert caught[1, :2].isnan().all()
    assert caught[1, 2:].tolist() == [0.25] * 2
    assert recorder.by_age(caught, 3, (4, 4)) == [[0.75, 0.75], [0.25, 0.25]]
    assert recorder.by_age(caught, 3, (1, 3)) == [[0.75], [0.25]]
    assert recorder.by_age(caught, 4, (4, 2)) == [[None, 0.75, 0.75], []]


@pytest.mark.parametrize("shape", [(2, 4, 2, 8), (2, 4, 1, 2)])
def test_memories_that_are_not_the_layers_are_told(shape: tuple[int, ...]) -> None:
    recorder = Recorder()
    recorder.add([3, 3], [torch.tensor([[[0, 1]], [[0, 2]]])])
    with pytest.raises(NoRecallError, match="other heads or positions"):
        recorder.caught(torch.ones(shape), 0, 0)


@pytest.mark.parametrize(
    ("batch", "positions", "expected"), [(1, 1000, 32), (8, 4096, 32), (8, 131072, 3), (64, 2**20, 1)]
)
def test_probabilities_of_a_call_are_bounded(batch: int, positions: int, expected: int) -> None:
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_attention_heads=9)))
    found = probabilities.tokens_at_once(model, batch, positions)
    assert found == expected
    assert found == 1 or 4 * 9 * batch * positions * found <= probabilities.CHUNK_BYTES


Lacks = Callable[[pytest.MonkeyPatch], None]


def _one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = recall.probabilities_of
    monkeypatch.setattr(recall, "probabilities_of", lambda model, layers, *rest: real(model, (0,), *rest))


def _too_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "sites", lambda self: 1)


def _no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*given: Any) -> Any:
        raise LabError("cannot be set to eager attention")

    monkeypatch.setattr(recall, "probabilities_of", refuses)


def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Recorder, attention: Tensor, site: int, first: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Recorder, "caught", fails)


def _pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "runners", _With(decode.runners, SimpleNamespace(next_position=1)))


class _With:
    """The graphs that there are, and another."""

    def __init__(self, real: Any, other: Any) -> None:
        self.real, self.other = real, other

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.real, self.other])


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        (_one_layer, "1 layers give their attention, and there are 2 sites"),
        (_too_many_layers, "more layers than the 1 sites"),
        (_no_layer, "cannot be set to eager"),
        (_no_memory, "out of memory"),
        (_pieces, "no graph, or several"),
    ],
)
def test_what_cannot_be_recalled_is_null(
    lacks: Lacks,
    why: str,
    folder: Path,
    prompt: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the rest of the line is there."""
    lacks(monkeypatch)
    records = Records(None)
    settings = settings_of(folder, prompt, keeps=(0.3,), tasks=("natural",))
    with eager_lowering(), caplog.at_level(logging.WARNING, "sfi_compile"):
        evaluate.run_eval(settings, records)
    rows = evaluate.found_of(settings, records)
    assert [row["recall"] for row in rows] == [None, None]
    assert rows[0]["kl"] > 0
    assert evaluate.summarise(rows)[0]["recall"] is None
    assert [why in record.getMessage() for record in caplog.records if "no recall" in record.getMessage()] == [True]
