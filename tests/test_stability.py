"""`sfi stability`: overlap and captured mass against a literal oracle, then the whole command on a tiny model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sfi_compile
from sfi_compile import cli
from sfi_compile.lab import models, overlap, plots, probabilities, stability, texts
from sfi_compile.lab.errors import LabError
from sfi_compile.lab.overlap import DISTANCES, RELATIONS, Track
from sfi_compile.lab.probabilities import probabilities_of

CONTEXT, TOKENS = 100, 40


def best(row: list[float], k: int) -> set[int]:
    """The k largest, the lower position first where two are equal."""
    return set(sorted(range(len(row)), key=lambda position: (-row[position], position))[:k])


def oracle(probabilities: torch.Tensor, k: int, distance: int) -> list[list[tuple[float, float, float]]]:
    """(overlap, captured, own) for each pair of tokens and head; [tokens, heads, positions] in float64."""
    rows, found = probabilities.double().tolist(), []
    for t in range(len(rows) - distance):
        heads = []
        for head in range(len(rows[0])):
            later = rows[t + distance][head]
            support, own = best(rows[t][head], k), best(later, k)
            total = sum(later) or 1.0
            captured, most = (sum(later[i] for i in chosen) / total for chosen in (support, own))
            heads.append((len(support & own) / k, captured, most))
        found.append(heads)
    return found


def relation_oracle(ends: list[bool], t: int, later: int) -> set[str]:
    found = {"all"}
    if ends[t]:
        found.add("from_end")
    if ends[later]:
        found.add("into_end")
    if not ends[t] and not ends[later]:
        found.add("across" if any(ends[t : later + 1]) else "within")
    return found


def fed(probabilities: torch.Tensor, k: int, chunks: list[int], distances: tuple[int, ...], bins: int = 0) -> Track:
    track, start = Track(k, distances, bins), 0
    while start < len(probabilities):
        size = chunks[start % len(chunks)]
        track.add(probabilities[start : start + size])
        start += size
    return track


class TestTrack:
    @given(st.data())
    def test_it_equals_the_oracle_however_it_is_fed(self, data: st.DataObject) -> None:
        tokens, heads, positions = (data.draw(st.integers(1, most)) for most in (14, 3, 12))
        k = data.draw(st.integers(1, positions))
        # Few different values, 0 among them: ties everywhere, and rows without any mass.
        values = st.lists(st.sampled_from([0.0, 0.125, 0.25, 1.0]), min_size=positions, max_size=positions)
        rows = data.draw(st.lists(values, min_size=tokens * heads, max_size=tokens * heads))
        probabilities = torch.tensor(rows, dtype=torch.float64).view(tokens, heads, positions)
        distances = (1, 2, 3, 7, 20)
        chunks = data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=4))
        track = fed(probabilities, k, chunks, distances)
        for distance in distances:
            pairs = max(tokens - distance, 0)
            expected = torch.tensor(oracle(probabilities, k, distance), dtype=torch.float64).view(pairs, heads, 3)
            got = torch.stack([track.overlap(distance), track.captured(distance), track.own(distance)], -1)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(track.mass(), probabilities.sum(-1))
        assert torch.equal(track.unfilled(), (probabilities > 0).sum(-1) < k)

    @given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 30))
    def test_bins_count_the_positions_of_supports(self, seed: int, bins: int, k: int) -> None:
        positions = 30
        drawn = torch.rand(5, 2, positions, generator=torch.Generator().manual_seed(seed))
        counts = fed(drawn, k, [2], DISTANCES, bins).counts()
        edges = overlap.bin_edges(positions, bins)
        assert (edges[0], edges[-1], len(edges)) == (0, positions, bins + 1)
        for t in range(5):
            held = [position for head in range(2) for position in best(drawn[t, head].tolist(), k)]
            for index, (low, high) in enumerate(itertools.pairwise(edges)):
                assert counts[t, index] == sum(low <= position < high for position in held)

    def test_by_hand(self) -> None:
        rows = [[0.5, 0.3, 0.1, 0.1], [0.4, 0.0, 0.6, 0.0], [0.0, 0.1, 0.1, 0.2]]
        track = fed(torch.tensor(rows, dtype=torch.float64)[:, None], 2, [3], (1, 2, 3))
        assert track.overlap(1).flatten().tolist() == [0.5, 0.0]  # {0, 1}, {0, 2}, {1, 3}: of equal ones the lower
        assert track.captured(1).flatten().tolist() == pytest.approx([0.4, 0.25])
        assert track.own(1).flatten().tolist() == pytest.approx([1.0, 0.75])
        assert track.overlap(2).flatten().tolist() == [0.5]
        assert track.overlap(3).shape == (0, 1)

    def test_it_forgets_supports_that_are_too_old(self) -> None:
        track = fed(torch.rand(50, 2, 20), 3, [4], (1, 5))
        assert track._past is not None
        assert track._past.shape == (5, 2, 3)


@given(st.lists(st.booleans(), max_size=20), st.integers(1, 25))
def test_relations_equal_the_oracle(ends: list[bool], distance: int) -> None:
    found = overlap.relations(ends, distance)
    assert set(found) == {"all", *RELATIONS}
    pairs = range(max(len(ends) - distance, 0))
    for which in found.values():
        assert which.shape == (len(pairs),)
    for t in pairs:
        assert {name for name, which in found.items() if which[t]} == relation_oracle(ends, t, t + distance)


def test_a_summary_is_over_pairs_layers_and_heads() -> None:
    ends = [False, False, True, False, False, True]
    drawn = [torch.rand(6, heads, 10, dtype=torch.float64) for heads in (2, 1)]
    rows = overlap.summarise([fed(probabilities, 3, [4], (1, 9)) for probabilities in drawn], ends)
    assert [(row["distance"], row["relation"]) for row in rows] == [
        (distance, relation) for distance in (1, 9) for relation in ("all", *RELATIONS)
    ]
    for row in rows:
        values = [
            numbers
            for probabilities in drawn
            for t, heads in enumerate(oracle(probabilities, 3, row["distance"]))
            if row["relation"] in relation_oracle(ends, t, t + row["distance"])
            for numbers in heads
        ]
        assert row["pairs"] == len(values) // 3
        for index, name in enumerate(("overlap", "captured", "own")):
            if not values:
                assert row[name] is None
                continue
            mean = sum(numbers[index] for numbers in values) / len(values)
            variance = sum((numbers[index] - mean) ** 2 for numbers in values) / len(values)
            assert row[name] == pytest.approx({"mean": mean, "std": variance**0.5}, abs=2e-6)
    assert {row["relation"]: row["pairs"] for row in rows[:5]} == {
        "all": 5, "within": 2, "across": 0, "from_end": 1, "into_end": 2,
    }  # fmt: skip


def run(folder: Path, prompt: Path, out: Path, *more: str) -> dict[str, Any]:
    arguments = ["--context", str(CONTEXT), "--tokens", str(TOKENS), "--device", "cpu", "--json", str(out), *more]
    assert cli.main(["stability", "--model", str(folder), "--prompt-file", str(prompt), *arguments]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def with_queries(folder: Path, tmp_path: Path, factor: float) -> Path:
    """The tiny model with queries so many times as large: at 0, every token attends to all before it alike."""
    model, tokenizer = models.load(str(folder), torch.float32)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= factor
    place = tmp_path / "changed"
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def means(row: dict[str, Any]) -> list[float] | None:
    return [row[key]["mean"] for key in ("overlap", "captured", "own")] if row["overlap"] else None


def mean_of(numbers: list[tuple[float, float, float]]) -> Any:
    # Two ways to compute the same softmax: of two positions that are nearly equal, either may be chosen.
    return (
        pytest.approx([sum(column) / len(numbers) for column in zip(*numbers, strict=True)], abs=2e-3)
        if numbers
        else None
    )


def test_the_command_equals_a_whole_forward(
    folder: Path, prompt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probabilities, "CHUNK", 7)
    place = with_queries(folder, tmp_path, 40)
    found = run(place, prompt, tmp_path / "out.json", "--keep", "0.2")
    model, tokenizer = models.load(str(place), torch.float32)
    model.set_attn_implementation("eager")
    ids = texts.prompt_ids(tokenizer, prompt.read_text(), CONTEXT + TOKENS)
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    boundaries = sfi_compile.sentence_boundaries(tokenizer)
    ends = [token in boundaries for token in ids[0, CONTEXT:].tolist()]
    assert found["sentence_ends"] == [t for t, end in enumerate(ends) if end]
    assert len(found["sentence_ends"]) > 2
    assert (found["layers"], found["kv_heads"]) == ([0, 1], [2, 2])

    for name, first, end, k in (("all", 0, CONTEXT, 20), ("far", 4, CONTEXT - 64, 6)):
        got = found["supports"][name]
        assert (got["first"], got["positions"], got["k"], got["unfilled"]) == (first, end - first, k, 0)
        # [1, 4 heads, tokens, positions]: heads 0 and 1 share keys, and 2 and 3.
        layers = [
            torch.stack([weights[0, 2 * head : 2 * head + 2, CONTEXT:, first:end].mean(0) for head in (0, 1)], 1)
            for weights in attentions
        ]
        mass = torch.cat(layers, 1).sum(-1)
        expected = {"mean": mass.mean().item(), "std": mass.std(correction=0).item()}
        assert got["mass"] == pytest.approx(expected, abs=1e-4)
        assert len(got["rows"]) == 5 * len(DISTANCES)
        pairs = {distance: [oracle(layer, k, distance) for layer in layers] for distance in DISTANCES}
        for row in got["rows"]:
            chosen = [
                numbers
                for layer in pairs[row["distance"]]
                for t, heads in enumerate(layer)
                if row["relation"] in relation_oracle(ends, t, t + row["distance"])
                for numbers in heads
            ]
            assert row["pairs"] == len(chosen) // 4
            assert means(row) == mean_of(chosen)
        assert [(row["layer"], row["distance"]) for row in got["by_layer"]] == [
            (layer, distance) for layer in (0, 1) for distance in DISTANCES
        ]
        for row in got["by_layer"]:
            assert means(row) == mean_of([one for heads in pairs[row["distance"]][row["layer"]] for one in heads])
    shown = capsys.readouterr().out
    assert "supports of 20 of positions 0 to 99" in shown
    row = next(row for row in found["supports"]["far"]["rows"] if (row["distance"], row["relation"]) == (1, "within"))
    percent = row["captured"]["mean"] / row["own"]["mean"]
    assert f"{row['overlap']['mean']:.2f} {percent:.0%} ({row['pairs']})" in shown


def test_attention_that_never_changes_overlaps_in_full(
    folder: Path, prompt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyplot = pytest.importorskip("matplotlib") and plots.import_pyplot()
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    image = tmp_path / "x.png"
    place = with_queries(folder, tmp_path, 0)
    found = run(place, prompt, tmp_path / "out.json", "--keep", "0.1", "--layers", "1", "--plot", str(image))
    assert found["layers"] == [1]
    for name, k, positions in (("all", 10, 100), ("far", 3, 32)):
        got = found["supports"][name]
        assert (got["k"], got["positions"], got["chance"]) == (k, positions, k / positions)
        for row in got["rows"]:
            if not row["pairs"]:
                assert row["overlap"] is row["captured"] is row["own"] is None
                continue
            assert row["overlap"] == {"mean": 1.0, "std": 0.0}
            for key in ("captured", "own"):
                assert row[key] == pytest.approx({"mean": k / positions, "std": 0.0}, abs=2e-6)
        assert any(row["pairs"] for row in got["rows"] if row["relation"] == "across")
        assert not any(row["pairs"] for row in got["rows"] if row["distance"] == 64)
    mean = sum(positions / (CONTEXT + t + 1) for t in range(TOKENS)) / TOKENS
    assert found["supports"]["far"]["mass"]["mean"] == pytest.approx(mean, abs=1e-5)
    # Of equal positions the lower: every token's support is the first ten.
    edges, share = found["support_map"]["bin_edges"], found["support_map"]["share"]
    assert (edges[0], edges[-1], len(share)) == (0, CONTEXT, TOKENS)
    for row in share:
        assert row == [pytest.approx(min(max(10 - low, 0), high - low) / (high - low), abs=1e-4)
                       for low, high in itertools.pairwise(edges)]  # fmt: skip

    assert image.read_bytes()[:4] == b"\x89PNG"
    left, right = drawn[0].axes[:2]
    lines = {line.get_label(): list(line.get_ydata()) for line in left.lines}
    assert set(lines["overlap, across an end"]) == {1.0}
    assert lines["mass captured, in a sentence"] == pytest.approx([0.1] * len(lines["overlap, in a sentence"]))
    assert [line.get_xdata()[0] for line in right.lines] == found["sentence_ends"]


def test_all_of_the_context_is_kept(folder: Path, prompt: Path, tmp_path: Path) -> None:
    found = run(folder, prompt, tmp_path / "out.json", "--keep", "1")
    for row in found["supports"]["all"]["rows"]:
        assert not row["pairs"] or (row["overlap"]["mean"], row["own"]["mean"]) == (1, pytest.approx(1))


def test_layers_with_a_window_are_left_out(folder: Path, prompt: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    _, tokenizer = models.load(str(folder))
    config = transformers.Qwen2Config(
        vocab_size=400, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=16, max_position_embeddings=512,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    place = tmp_path / "window"
    transformers.Qwen2ForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    assert run(place, prompt, tmp_path / "out.json")["layers"] == [1]
    settings = stability.StabilitySettings(
        str(place), str(prompt), "sotu", CONTEXT, TOKENS, 0.1, (0, 1), 0, torch.float32, "cpu"
    )
    with pytest.raises(LabError, match=r"layer 0 of .*; allowed: layers with full attention"):
        stability.run_stability(settings)


def test_the_model_is_left_as_it_was(folder: Path) -> None:
    model, _ = models.load(str(folder), torch.float32)
    seen: list[tuple[int, tuple[int, ...]]] = []
    with probabilities_of(model, None, 9, lambda layer, found: seen.append((layer, tuple(found.shape)))):
        model(torch.arange(9)[None])
    assert seen == [(0, (1, 9, 2, 9)), (1, (1, 9, 2, 9))]
    assert model.config._attn_implementation == "sdpa"
    model(torch.arange(9)[None])
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--keep", "0"], ["--keep is 0;", "> 0 and <= 1"]),
        (["--keep", "1.5"], ["--keep is 1.5;"]),
        (["--keep", "nan"], ["--keep is nan;"]),
        (["--keep", "0.01"], ["--keep is 0.01, less than one of 32 positions"]),
        (["--context", "68"], ["--context is 68", "> 68"]),
        (["--tokens", "1"], ["--tokens", "a whole number >= 2"]),
        (["--text", "bible"], ["unknown text 'bible'; allowed: sotu"]),
        (["--layers", "1,x"], ["--layers is '1,x'; allowed: all, or whole numbers >= 0"]),
        (["--layers", "0,2"], ["--layers has 2; allowed: 0 to 1"]),
        (["--prompt-file", "short"], ["the text has ", "--context 100 and --tokens 128 need 228"]),
        (["--prompt-file", "long", "--tokens", "450"], ["100 context and 450 more tokens", "512 positions"]),
        (["--plot", "no-such-folder/x.png"], ["--plot", "does not exist"]),
    ],
)
def test_a_bad_request_is_one_line(
    arguments: list[str], parts: list[str], folder: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = prompt.read_text()
    for name, content in (("long", words * 3), ("short", words[: len(words) // 7])):
        (prompt.parent / name).write_text(content)
    text = ["--prompt-file", str(prompt)] if "--text" not in arguments else []
    arguments = [str(prompt.parent / part) if part in ("long", "short") else part for part in arguments]
    assert cli.main(["stability", "--model", str(folder), "--context", "100", *text, *arguments]) == 2
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sfi: error: ")]
    assert len(shown) == 1
    assert all(part in shown[0] for part in parts), shown[0]


def test_supports_filled_with_zeros_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    from sfi_compile.lab import report

    one_hot = torch.eye(8)[None].repeat(6, 1, 1)[:, :2]
    track = fed(one_hot, 4, [3], DISTANCES)
    result = {
        "context": 8, "tokens": 6, "sentence_ends": [], "layers": [0], "kv_heads": [2],
        "supports": {"all": stability._range((0, 8, 4), [track], [0], [False] * 6)},
    }  # fmt: skip
    assert result["supports"]["all"]["unfilled"] == 1
    report.show_stability(report.Screen(), result)
    assert "100.0 % of these supports had to take positions of probability 0" in capsys.readouterr().out
