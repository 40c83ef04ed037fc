"""`sfi stability`: how far the tokens that dense attention uses stay the same, on a model and a text of the user's.

Imports the package's public names and the lab.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import sfi_compile
from sfi_compile.lab.bench import versions
from sfi_compile.lab.decode import prefill
from sfi_compile.lab.errors import LabError
from sfi_compile.lab.models import check_positions, load, static_cache
from sfi_compile.lab.overlap import Track, bin_edges, spread, summarise
from sfi_compile.lab.probabilities import probabilities_of, tokens_at_once
from sfi_compile.lab.progress import Progress
from sfi_compile.lab.texts import given_text, prompt_ids

SINK, RECENT = 4, 64
"""Positions at either end of the context that "far" leaves out."""
BINS = 64
"""Parts of the context in `support_map`."""


@dataclasses.dataclass(frozen=True)
class StabilitySettings:
    """What to measure: `tokens` tokens after `context` others. `layers` None: all that can be measured."""

    model: str
    prompt_file: str | None
    text: str
    context: int
    tokens: int
    keep: float
    layers: tuple[int, ...] | None
    seed: int
    dtype: torch.dtype
    device: str

    def ranges(self) -> dict[str, tuple[int, int, int]]:
        """Name → first position, position after the last one, and size of a support among them.

        "all" is the whole prefilled context, which every measured token has behind it; positions of measured tokens
        are left out, since none of these sees those after it. "far" is the same without the first `SINK` and the last
        `RECENT` positions: sinks and recent tokens are what supports most likely share.

        Raises:
            LabError: a number out of range, or so few positions that a support would be empty.
        """
        if not 0 < self.keep <= 1:
            raise LabError(f"--keep is {self.keep:g}; allowed: a share of the context > 0 and <= 1")
        if self.tokens < 2:
            raise LabError(f"--tokens is {self.tokens}; allowed: a whole number >= 2")
        if self.context <= SINK + RECENT:
            raise LabError(f"--context is {self.context}; allowed: a whole number > {SINK + RECENT}")
        found = {}
        for name, first, end in (("all", 0, self.context), ("far", SINK, self.context - RECENT)):
            k = round(self.keep * (end - first))
            if not k:
                raise LabError(f"--keep is {self.keep:g}, less than one of {end - first} positions; raise it")
            found[name] = first, end, k
        return found


def run_stability(settings: StabilitySettings, progress: Progress | None = None) -> dict[str, Any]:
    """Feed real text to the dense model and compare the supports of its tokens; keys as in docs/cli.md.

    The first `context` tokens of the text are prefilled; the `tokens` after them are fed as they stand in it, whatever
    the model would have said. The support of a token, per layer and KV head, is the `k` positions (of "all" or "far",
    see `StabilitySettings.ranges`) with the most probability, averaged over the query heads of the group. No sink or
    recent token is in it unless its probability puts it there.

    Raises:
        LabError: what cannot be loaded, does not fit, or does not give its attention probabilities.
    """
    show, ranges = progress or Progress(), settings.ranges()
    # Read the prompt before the weights: a wrong path should fail at once.
    needed = settings.context + settings.tokens
    text = given_text(settings.prompt_file, settings.text, needed, settings.seed)
    with show.busy(f"loading {settings.model}"):
        model, tokenizer = load(settings.model, settings.dtype, settings.device)
        ids = prompt_ids(tokenizer, text, needed).to(settings.device)
    _check(settings, model, ids.shape[1])
    boundaries = set(sfi_compile.sentence_boundaries(tokenizer))
    ends = [token in boundaries for token in ids[0, settings.context :].tolist()]

    cache = static_cache(model, needed)
    with show.bar(settings.context, "prefilling") as advance:
        prefill(model, ids[:, : settings.context], cache, advance)
    tracks: dict[str, dict[int, Track]] = {name: {} for name in ranges}
    bins = min(BINS, settings.context)

    def compare(layer: int, probabilities: Tensor) -> None:
        for name, (first, end, k) in ranges.items():
            track = tracks[name].setdefault(layer, Track(k, bins=bins if name == "all" else 0))
            track.add(probabilities[0, ..., first:end])

    with show.bar(settings.tokens, "measuring") as advance, probabilities_of(model, settings.layers, needed, compare):
        for chunk in torch.split(ids[:, settings.context :], tokens_at_once(model, 1, needed), dim=1):
            prefill(model, chunk, cache, advance)
    layers = _measured(settings, tracks["all"])
    heads = [tracks["all"][layer].mass().shape[1] for layer in layers]
    edges = bin_edges(settings.context, bins)
    sizes = torch.tensor(edges).diff() * sum(heads)
    held = torch.stack([tracks["all"][layer].counts() for layer in layers]).sum(0) / sizes
    return {
        "model": settings.model,
        "text": settings.prompt_file or settings.text,
        "seed": settings.seed,
        "context": settings.context,
        "tokens": settings.tokens,
        "keep": settings.keep,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "device": settings.device,
        "layers": layers,
        "kv_heads": heads,
        "sentence_ends": [index for index, end in enumerate(ends) if end],
        "supports": {
            name: _range(ranges[name], [tracks[name][layer] for layer in layers], layers, ends) for name in ranges
        },
        "support_map": {
            "bin_edges": edges,
            "share": [[round(share, 4) for share in row] for row in held.tolist()],
        },
        "versions": versions(),
    }


def _check(settings: StabilitySettings, model: Any, available: int) -> None:
    needed = settings.context + settings.tokens
    if available < needed:
        raise LabError(
            f"the text has {available} tokens; --context {settings.context} and --tokens {settings.tokens} "
            f"need {needed}"
        )
    check_positions(model, settings.context, settings.tokens, "--tokens")
    count = model.config.get_text_config().num_hidden_layers
    wrong = [layer for layer in settings.layers or () if layer >= count]
    if wrong:
        raise LabError(f"--layers has {wrong[0]}; allowed: 0 to {count - 1}")


def _measured(settings: StabilitySettings, tracks: dict[int, Track]) -> list[int]:
    """The layers that gave probabilities once for each token, ascending."""
    # A block that several layers share (Zamba) gives them more often; whose they are cannot be told.
    found = sorted(layer for layer, track in tracks.items() if len(track.mass()) == settings.tokens)
    missing = [layer for layer in settings.layers or () if layer not in found]
    if missing or not found:
        which = f"layer {missing[0]} of {settings.model!r}" if missing else f"model {settings.model!r}"
        raise LabError(
            f"{which} gives no attention probabilities over the whole context; allowed: layers with full attention"
        )
    return found


def _range(
    chosen: tuple[int, int, int], tracks: Sequence[Track], layers: Sequence[int], ends: Sequence[bool]
) -> dict[str, Any]:
    """The part of the result for one range of positions; `tracks` are those of `layers`."""
    first, end, k = chosen
    by_layer = [
        {"layer": layer, **{key: row[key] for key in ("distance", "overlap", "captured", "own")}}
        for layer, track in zip(layers, tracks, strict=True)
        for row in summarise([track], ends)
        if row["relation"] == "all"
    ]
    return {
        "first": first,
        "positions": end - first,
        "k": k,
        "chance": round(k / (end - first), 6),
        "mass": spread(torch.cat([track.mass() for track in tracks], 1)),
        "unfilled": round(torch.cat([track.unfilled() for track in tracks], 1).double().mean().item(), 6),
        "rows": summarise(tracks, ends),
        "by_layer": by_layer,
    }
