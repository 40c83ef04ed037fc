"""What the command line shows and writes: spinners and bars, tables, JSON files. Imports `lab.errors` only."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sfi_compile.lab.errors import LabError

BUSY_SHARE = 0.8
"""Processors that a CPU run keeps busy on an idle machine, at the very least."""


class Screen:
    """Results on stdout, progress on stderr, so that a redirected stdout holds results alone."""

    def __init__(self) -> None:
        self.out = Console(file=sys.stdout, highlight=False)
        self.err = Console(file=sys.stderr, highlight=False)
        self._streaming = False
        self._held: list[str] | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """A spinner with the elapsed time; one plain line where stderr is no terminal."""
        if not self.err.is_terminal:
            self.err.print(f"{text} …", markup=False)
            yield
            return
        self._held = []
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        try:
            with Progress(*columns, console=self.err, transient=True) as progress:
                self._progress, self._task = progress, progress.add_task(text, total=None)
                yield
        finally:
            self._progress = None
            held, self._held = self._held, None
            for piece in held or ():
                self.stream(piece)

    def describe(self, text: str) -> None:
        """Change the text of the running spinner (or print a line where there is none)."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)
        else:
            self.err.print(f"{text} …", markup=False)

    @contextlib.contextmanager
    def bar(self, total: int, text: str = "prefilling") -> Iterator[Callable[[int], None]]:
        """A bar over `total` tokens; yields the function that advances it."""
        if not self.err.is_terminal:
            self.err.print(f"{text} {total} tokens …", markup=False)
            yield lambda done: None
            return
        columns = (TextColumn("{task.description}, tokens", markup=False), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self.err, transient=True) as progress:
            task = progress.add_task(text, total=total)
            yield lambda done: progress.advance(task, done)

    def stream(self, piece: str) -> None:
        """A piece of decoded text on stdout; held back while a spinner runs."""
        if self._held is not None:
            self._held.append(piece)
            return
        if not self._streaming:
            self.out.rule("text decoded with SFI")
            self._streaming = True
        self.out.file.write(piece)
        self.out.file.flush()

    def end_stream(self) -> None:
        """Finish the streamed text."""
        if self._streaming:
            self.out.print()
            self.out.rule()
            self._streaming = False


def check_path(path: Path | None, option: str = "--json") -> None:
    """Refuse a file that cannot be written, before anything long runs. Raises LabError."""
    if path is None:
        return
    if path.is_dir():
        raise LabError(f"{option} {str(path)!r} is a folder; give a file name")
    if not path.absolute().parent.is_dir():
        raise LabError(f"{option} {str(path)!r}: the folder {str(path.absolute().parent)!r} does not exist")


def write_json(path: Path | None, data: Mapping[str, Any]) -> None:
    """Write a result as indented JSON; None: nothing. Raises LabError if the file cannot be written."""
    if path is None:
        return
    text, partial = json.dumps(data, indent=2, ensure_ascii=False) + "\n", path.with_name(f".{path.name}.partial")
    try:
        # Whole or not at all: an interrupted run keeps what it had.
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise LabError(f"--json {str(path)!r} cannot be written: {error.strerror}") from None


def show_generate(screen: Screen, result: Mapping[str, Any]) -> None:
    """Tables of `sfi generate`."""
    steps, triggers, agree = result["steps"], result["triggers"], result["agreement"]
    first = agree["first_difference"]
    facts = _table(None, "", "value")
    facts.add_row("prompt tokens", str(result["prompt_tokens"]))
    facts.add_row("new tokens", str(result["new_tokens"]))
    facts.add_row("slow steps", f"{steps['slow']} ({steps['short']} below the minimum context)")
    facts.add_row("fast steps", str(steps["fast"]))
    facts.add_row("triggers", ", ".join(f"{reason} {count}" for reason, count in triggers.items()))
    share = _share(result["retention"])
    facts.add_row("support per KV head", f"{number(result['support'], '.0f')} tokens, {share} of the context")
    facts.add_row("sites rewritten / rejected", f"{result['sites']} / {len(result['rejections'])}")
    facts.add_row("memory", f"{result['memory_bytes'] / 2**20:.1f} MiB")
    facts.add_row(
        "same token as dense",
        f"{agree['matching']} of {agree['of']}" + ("" if first is None else f", first difference at {first}"),
    )
    screen.out.print(facts)
    speed, step = result["tokens_per_second"], result["step_ms"]
    times = _table("speed (compilation left out)", "", "tokens/s", "slow step ms", "fast step ms", "compile s")
    for name, kind in (("dense", "dense"), ("sfi", "slow")):
        fast = step["fast"] if name == "sfi" else None
        compiling = f"{result['compile_s'][name]:.1f}"
        times.add_row(name, number(speed[name], ".1f"), number(step[kind]), number(fast), compiling)
    screen.out.print(times)
    _warn_if_busy(screen, result["processor_share"].values())
    if not steps["fast"]:
        screen.out.print("hint: no fast step ran; try a longer --context, more --new-tokens, or --option min_context=0")
    show_rejections(screen, result["rejections"])


def show_bench(screen: Screen, result: Mapping[str, Any]) -> None:
    """Tables of `sfi bench`."""
    if any("profile" in row for row in result["rows"]):
        _show_bench_on_gpu(screen, result)
        return
    kinds = ("dense", "slow", "fast")
    times = _table("step time, ms (median ±interquartile range)", "decoder", *kinds, "mean", "floor", "gain")
    costs = _table(
        "costs", "decoder", "compile dense s", "compile sfi s", "memory MiB", "KV cache MiB", "steps slow/fast"
    )
    for row in result["rows"]:
        name = f"{row['shape']} {row['batch']}×{row['context']}"
        timed = [f"{number(row[f'{k}_ms'], '.3g')} ±{number(row['spread'][k], '.2g')}" for k in kinds]
        gain = row["dense_ms"] / row["mean_ms"] if row["dense_ms"] and row["mean_ms"] else None
        others = [number(row[key], ".3g") for key in ("mean_ms", "floor_ms")]
        times.add_row(name, *timed, *others, "–" if gain is None else f"{gain:.1f}×")
        compiling = [f"{row['compile_s'][run]:.0f}" for run in ("dense", "sfi")]
        sizes = [f"{row[key] / 2**20:.1f}" for key in ("memory_bytes", "cache_bytes")]
        costs.add_row(name, *compiling, *sizes, f"{row['steps']['slow']}/{row['steps']['fast']}")
    screen.out.print(times)
    screen.out.print(costs)
    _warn_if_busy(screen, [share for row in result["rows"] for share in row["processor_share"].values()])
    for row in result["rows"]:
        show_rejections(screen, row["rejections"])


def _show_bench_on_gpu(screen: Screen, result: Mapping[str, Any]) -> None:
    ways, kinds = ("dense", "flash", "kernel"), ("slow", "fast", "mean")
    columns = [*ways, *kinds, "floor", "gain", "over best"]
    times = _table("step time, ms (median; CUDA graphs)", "decoder", *columns)
    groups = ("matrix products", "attention", "selector", "rest")
    shares = _table("GPU time of a step, ms", "decoder", "step", "kernels", *groups)
    costs = _table("costs", "decoder", *(f"compile {way} s" for way in (*ways, "sfi")), "memory MiB", "KV cache MiB")
    for row in result["rows"]:
        name = f"{row['shape']} {row['batch']}×{row['context']}"
        best = min((row[f"{way}_ms"] for way in ways[1:] if row[f"{way}_ms"]), default=None)
        gains = [_gain(row["dense_ms"], row["mean_ms"]), _gain(best, row["mean_ms"])]
        times.add_row(name, *(number(row[f"{key}_ms"], ".4g") for key in (*ways, *kinds, "floor")), *gains)
        for way, steps in row["profile"].items():
            for kind, found in steps.items():
                label = kind if way == "sfi" else way
                shares.add_row(name, label, str(found["kernels"]), *(number(found["ms"][g], ".3f") for g in groups))
        compiling = [number(row["compile_s"].get(way), ".0f") for way in (*ways, "sfi")]
        cache = max(row["cache_bytes"].values(), default=0)
        costs.add_row(name, *compiling, *(f"{(size or 0) / 2**20:.0f}" for size in (row["memory_bytes"], cache)))
    for table in (times, shares, costs):
        screen.out.print(table)
    for row in result["rows"]:
        show_rejections(screen, row["rejections"] or ())


def _gain(slower: float | None, faster: float | None) -> str:
    return f"{slower / faster:.1f}×" if slower and faster else "–"


def show_kernels(screen: Screen, result: Mapping[str, Any]) -> None:
    """Table of `sfi bench --kernel`."""
    columns = "batch", "context", "kept", "slots", "memory µs", "flash µs", "gain"
    table = _table("attention over the memory, against flash attention over the context", *columns)
    for row in result["rows"]:
        kept, gain = f"{row['kept_percent']:g} %", f"{row['speedup']:.2f}×"
        times = [f"{row[key]:.1f}" for key in ("kernel_us", "flash_us")]
        table.add_row(str(row["batch"]), str(row["context"]), kept, str(row["slots"]), *times, gain)
    screen.out.print(table)


RECALL_AGES = 0, 1, 2, 4, 8, 16, 24, 31
"""Tokens since a memory was made at which `sfi eval` shows what it catches, as far as they occur; and the most."""


def show_eval(screen: Screen, rows: Sequence[Mapping[str, Any]]) -> None:
    """Tables of `sfi eval`, from the lines of `lab.evaluate.summarise`."""
    rows = sorted(rows, key=lambda r: (r["task"], r["context"]))
    columns = "task", "policy", "kept", "Δ NLL", "dense", "KL", "top 1", "right", "slow", "tokens/s"
    title = (
        "NLL over dense, nats a token (mean ±standard deviation over passages); same first choice; right, and of dense"
    )
    table = _table(title, *columns)
    for row in rows:
        delta = f"{row['delta']:+.3f}" + ("" if row["delta_spread"] is None else f" ±{row['delta_spread']:.2f}")
        right = f"{100 * row['score']:.0f}/{100 * row['score_dense']:.0f} %"
        shares = [f"{100 * row[key]:.0f} %" for key in ("keep", "top1")]
        slow, speed = f"{100 * row['slow_share']:.1f} %", number(row["tokens_per_second"], ".1f")
        name = f"{row['task']} {row['context']}"
        dense, kl = (f"{row[key]:.3f}" for key in ("nll_dense", "kl"))
        table.add_row(name, row["policy"], shares[0], delta, dense, kl, shares[1], right, slow, speed)
    screen.out.print(table)
    recalls = {i: row["recall"] for i, row in enumerate(rows) if row.get("recall")}
    if recalls:
        most = max(map(len, recalls.values())) - 1
        ages = [age for age in RECALL_AGES if age < most] + [most]
        title = "share of dense attention that lies on what the memory holds, by tokens since it was made"
        table = _table(title, "task", "policy", "kept", *map(str, ages))
        for i, recall in recalls.items():
            row, shown = rows[i], [recall[age] if age < len(recall) else None for age in ages]
            kept = f"{100 * row['keep']:.0f} %"
            table.add_row(f"{row['task']} {row['context']}", row["policy"], kept, *(number(x, ".3f") for x in shown))
        screen.out.print(table)


def show_stability(screen: Screen, result: Mapping[str, Any]) -> None:
    """Tables of `sfi stability`: one for each range of positions."""
    facts = _table(None, "", "value")
    facts.add_row("text", f"{result['context']} tokens prefilled, the next {result['tokens']} measured")
    facts.add_row("sentence ends among these", str(len(result["sentence_ends"])))
    heads = sum(result["kv_heads"])
    facts.add_row("layers measured", f"{len(result['layers'])}, with {heads} KV heads together")
    screen.out.print(facts)
    columns = {"within": "in a sentence", "across": "across an end", "from_end": "from an end"}
    columns["into_end"] = "into an end"
    for found in result["supports"].values():
        first, last = found["first"], found["first"] + found["positions"] - 1
        title = f"supports of {found['k']} of positions {first} to {last}: overlap, mass of the best (pairs)"
        table = _table(title, "apart", *columns.values())
        rows = {(row["distance"], row["relation"]): row for row in found["rows"]}
        for distance in sorted({distance for distance, _ in rows}):
            table.add_row(str(distance), *(_stability(rows[distance, relation]) for relation in columns))
        screen.out.print(table)
        share = _share(found["mass"]["mean"])
        screen.out.print(f"overlap by chance {found['chance']:.2f}; these positions get {share} of the attention")
        if found["unfilled"]:
            screen.out.print(
                f"warning: {_share(found['unfilled'])} of these supports had to take positions of probability 0, the "
                "lowest ones, which overlap for no reason; try a smaller --keep, or --dtype float32"
            )


def _stability(row: Mapping[str, Any]) -> str:
    if not row["pairs"]:
        return "–"
    overlap, captured, own = (row[key]["mean"] for key in ("overlap", "captured", "own"))
    return f"{overlap:.2f} {number(captured / own if own else None, '.0%')} ({row['pairs']})"


def show_families(screen: Screen, result: Mapping[str, Any]) -> None:
    """Table of `sfi explain --families`."""
    table = _table("attention sites of one decode step", "decoder", "rewritten", "left dense", "why")
    rows = result["families"]
    for row in rows:
        why = row["error"] or ", ".join(row["codes"])
        table.add_row(row["family"], str(row["sites"]), str(row["dense"]), Text(why))
    screen.out.print(table)
    whole = sum(bool(row["sites"]) and not row["dense"] for row in rows)
    partly = sum(bool(row["sites"]) for row in rows) - whole
    dense = len(rows) - whole - partly
    screen.out.print(f"{len(rows)} decoders: {whole} rewritten in full, {partly} in part, {dense} dense")


def show_checks(screen: Screen, result: Mapping[str, Any]) -> None:
    """Tables of `sfi doctor`."""
    found = _table("versions", "", "version")
    for name, number in result["versions"].items():
        found.add_row(name, number or "not installed")
    screen.out.print(found)
    checks = _table("checks", "", "", "found")
    for check in result["checks"]:
        checks.add_row(check["name"], "ok" if check["ok"] else "WRONG", Text(check["detail"]))
    screen.out.print(checks)
    for check in result["checks"]:
        if not check["ok"]:
            screen.out.print(f"hint: {check['hint']}", markup=False)


def show_rejections(screen: Screen, rejections: Iterable[Mapping[str, str]]) -> None:
    """Why sites stayed dense; nothing if none did."""
    rows = [(r["where"], r["code"], r["explanation"], r["hint"]) for r in rejections]
    if rows:
        table = _table("rejected sites", "where", "code", "found", "hint")
        for row in rows:
            table.add_row(*map(Text, row))
        screen.out.print(table)


def _warn_if_busy(screen: Screen, shares: Iterable[float | None]) -> None:
    least = min((share for share in shares if share is not None), default=1.0)
    if least < BUSY_SHARE:
        screen.out.print(
            f"warning: the machine was busy (this process got {least:.0%} of one processor while timing), so the times "
            "say little; stop other work, or try --threads 1"
        )


def _table(title: str | None, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)
    return table


def number(value: float | None, form: str = ".2f") -> str:
    """A number as shown; a dash for what was not measured."""
    return "–" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
