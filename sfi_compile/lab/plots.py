"""Figures of the lab, by matplotlib (an extra). Imports `lab.errors`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfi_compile.lab.errors import LabError

WAYS = {
    "dense": "dense, as transformers compiles it",
    "flash": "dense, flash attention",
    "kernel": "dense, our kernel",
    "slow": "sfi, slow step",
    "fast": "sfi, fast step",
    "mean": "sfi, mean",
}


def import_pyplot() -> Any:
    """matplotlib's pyplot, drawing into files. Raises LabError if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise LabError("figures need matplotlib: pip install 'sfi-compile[lab]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_bench(result: Mapping[str, Any], path: Path) -> None:
    """Throughput (tokens/s) and speed-up over dense against context, a line for each way, shape and batch.

    Raises:
        LabError: matplotlib is missing.
    """
    pyplot = import_pyplot()
    figure, (speed, gain) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    lines: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        lines.setdefault((row["shape"], row["batch"]), []).append(row)
    for (shape, batch), rows in lines.items():
        for way, label in WAYS.items():
            timed = [(r["context"], r[f"{way}_ms"], r["dense_ms"]) for r in rows if r.get(f"{way}_ms")]
            if not timed:
                continue
            name = label if len(lines) == 1 else f"{shape}, batch {batch}: {label}"
            style = {"label": name, "marker": "o", "linestyle": "-" if way == "mean" else "--"}
            tokens = [1e3 * batch / ms for _, ms, _ in timed]
            [line] = speed.plot([context for context, _, _ in timed], tokens, **style)
            compared = [(context, dense / ms) for context, ms, dense in timed if dense and way != "dense"]
            if compared:
                gain.plot(*zip(*compared, strict=True), color=line.get_color(), **style)
    contexts = sorted({row["context"] for row in result["rows"]})
    title = ", ".join(f"{shape}, batch {batch}" for shape, batch in lines)
    for axes, what in ((speed, "tokens a second"), (gain, "times faster than dense")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [_thousands(n) for n in contexts])
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize="x-small")
        axes.set_xlabel("context, tokens")
        axes.set_ylabel(what)
        axes.grid(True, which="both", alpha=0.3)
    speed.legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_eval(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss over dense against the share kept: a column for each task, a row for each context, a line for each policy.

    `fresh`, the ceiling, and `random`, the floor, are dotted.

    Raises:
        LabError: matplotlib is missing.
    """
    pyplot = import_pyplot()
    tasks, contexts = (sorted({row[key] for row in rows}) for key in ("task", "context"))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    size = 1.5 + 4 * len(tasks), 0.5 + 4 * len(contexts)
    figure, axes = pyplot.subplots(len(contexts), len(tasks), figsize=size, squeeze=False)
    for (context, task), panel in zip(itertools.product(contexts, tasks), axes.flat, strict=True):
        for i, policy in enumerate(policies):
            own = [r for r in rows if (r["task"], r["context"], r["policy"]) == (task, context, policy)]
            found = sorted((r["keep"], r["delta"], r["delta_spread"] or 0.0, r["passages"]) for r in own)
            if found:
                keeps, means, spreads, counts = zip(*found, strict=True)
                errors = [spread / count**0.5 for spread, count in zip(spreads, counts, strict=True)]
                dotted = policy.partition("(")[0] in ("fresh", "random")
                style = {"label": policy, "marker": "o", "linestyle": ":" if dotted else "-", "color": f"C{i}"}
                panel.errorbar([100 * keep for keep in keeps], means, errors, capsize=2, **style)
        shares = sorted({100 * row["keep"] for row in rows})
        panel.set_xscale("log")
        panel.set_xticks(shares, [f"{share:g}" for share in shares])
        panel.set_xticks([], minor=True)
        panel.set_title(f"{task}, {_thousands(context)}")
        panel.set_xlabel("kept, % of the context")
        panel.grid(True, alpha=0.3)
        panel.axhline(0.0, color="black", linewidth=0.8)
    for row in axes:
        row[0].set_ylabel("NLL over dense, nats a token")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_stability(result: Mapping[str, Any], path: Path) -> None:
    """Left, overlap and captured mass against distance; right, where supports lie in time, with sentence ends marked.

    Raises:
        LabError: matplotlib is missing.
    """
    pyplot = import_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), width_ratios=(1, 1.2))
    colours = {"within": "tab:blue", "across": "tab:orange"}
    names = {"within": "in a sentence", "across": "across an end"}
    whole, far = result["supports"]["all"], result["supports"]["far"]
    drawn = (
        (whole, "overlap", "overlap", "o-"),
        (far, "overlap", "overlap, far positions", ".:"),
        (whole, "captured", "mass captured", "s--"),
    )
    for relation, colour in colours.items():
        for found, key, label, style in drawn:
            points = [
                (row["distance"], row[key]["mean"])
                for row in found["rows"]
                if row["relation"] == relation and row["pairs"]
            ]
            if points:
                left.plot(*zip(*points, strict=True), style, color=colour, label=f"{label}, {names[relation]}")
    every = [row for row in whole["rows"] if row["relation"] == "all" and row["pairs"]]
    distances = [row["distance"] for row in every]
    left.plot(distances, [row["own"]["mean"] for row in every], color="black", alpha=0.5, label="mass of its own best")
    left.axhline(whole["chance"], color="grey", linewidth=0.8, label="overlap by chance")
    left.set_xscale("log", base=2)
    left.set_xticks(distances, [str(distance) for distance in distances])
    left.set_ylim(0, 1)
    left.set_xlabel("tokens apart")
    left.set_ylabel("overlap; share of the mass")
    left.grid(True, alpha=0.3)
    left.legend(fontsize="small")
    shown = result["support_map"]
    share = [list(row) for row in zip(*shown["share"], strict=True)]
    scale = pyplot.matplotlib.colors.PowerNorm(0.5, 0, 1)
    steps = [step - 0.5 for step in range(result["tokens"] + 1)]
    image = right.pcolormesh(steps, shown["bin_edges"], share, norm=scale, rasterized=True)
    for step in result["sentence_ends"]:
        right.axvline(step, color="red", linewidth=0.8, alpha=0.6)
    right.set_xlabel("token after the context (red: ends a sentence)")
    right.set_ylabel("position in the context")
    figure.colorbar(image, ax=right, label="share of heads that hold a position, mean of the bin")
    count, heads = len(result["layers"]), sum(result["kv_heads"])
    left.set_title(f"supports of {whole['k']} of {whole['positions']} positions")
    right.set_title(f"supports of {heads} KV heads in {count} layers")
    figure.suptitle(f"{Path(result['model']).name}, {result['context']} + {result['tokens']} tokens")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _thousands(count: int) -> str:
    """8192 as 8K."""
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)
