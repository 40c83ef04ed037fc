"""The command line `sfi`: reads arguments, calls the lab, shows tables, writes JSON.

Imports typer and the lab. torch and transformers are imported inside the commands, so that `--help` answers at once.
Every problem with a request is one line, `sfi: error: …`, on stderr and exit code 2.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_compile.config import Config, OptionError
from sfi_compile.lab.arguments import parse_counts, parse_layers, parse_policies, parse_shares
from sfi_compile.lab.errors import LabError

app = typer.Typer(
    name="sfi",
    help="Cheap long-context decoding as a torch.compile backend: try it, explain it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _whole(low: int, high: int | None = None) -> dict[str, Any]:
    """Settings of a typer option that is a whole number >= `low`, and <= `high` if given."""
    allowed = f"a whole number >= {low}" + ("" if high is None else f" and <= {high}")

    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if number < low or (high is not None and number > high):
            raise typer.BadParameter(f"{value!r}; allowed: {allowed}")
        return number

    return {"parser": parse, "metavar": "INTEGER"}


Model = Annotated[str, typer.Option(help="smollm2, a folder that holds config.json, or a .gguf file.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file as JSON.")]
Options = Annotated[
    list[str] | None, typer.Option("--option", help="Backend option as key=value, e.g. k_head=512; may be repeated.")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
BenchDtype = Annotated[str, typer.Option(help="auto (bfloat16 on CUDA, else float32), float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Shapes = Annotated[
    str,
    typer.Option(
        "--shape",
        help="tiny-cpu, smollm2-135m, qwen3-0.6b, qwen3-4b, qwen3-30b-a3b or llama3-8b; comma-separated.",
    ),
]
Batches = Annotated[str, typer.Option(help="Rows per batch; comma-separated.")]
Contexts = Annotated[str, typer.Option(help="Cached tokens before the first step; comma-separated.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; torch's own choice if left out.", **_whole(1))]


@app.command(epilog="Example: sfi generate --model smollm2 --context 3072 --new-tokens 200 --json out.json")
def generate(
    model: Model = "smollm2",
    prompt_file: Annotated[str | None, typer.Option(help="UTF-8 text file to read the prompt from.")] = None,
    text: Annotated[str, typer.Option(help="Named text, used without --prompt-file: sotu.")] = "sotu",
    context: Annotated[int, typer.Option(help="Prompt tokens to keep.", **_whole(2))] = 3072,
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode.", **_whole(1))] = 200,
    seed: Annotated[int, typer.Option(help="Which speech the text begins with.", **_whole(0))] = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    option: Options = None,
    max_cache_len: Annotated[int | None, typer.Option(help="Positions of the KV cache.", **_whole(1))] = None,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Decode a long text twice in one run, dense and with SFI, and show what happened."""
    options = parse_options(option)
    from sfi_compile.lab import report

    report.check_path(json)
    from sfi_compile.lab import models
    from sfi_compile.lab.generate import GenerateSettings, Observer, run_generate

    _set_threads(threads)
    screen = report.Screen()
    settings = GenerateSettings(
        model=model,
        prompt_file=prompt_file,
        text=text,
        context=context,
        new_tokens=new_tokens,
        seed=seed,
        dtype=models.parse_dtype(dtype),
        device=models.parse_device(device),
        options=options,
        max_cache_len=max_cache_len,
    )
    result = run_generate(settings, Observer(screen.busy, screen.bar, screen.stream))
    screen.end_stream()
    report.show_generate(screen, result)
    report.write_json(json, result)


@app.command(epilog="Example: sfi explain --model smollm2 --max-cache-len 8192")
def explain(
    model: Model = "smollm2",
    families: Annotated[
        bool, typer.Option("--families", help="Instead of one model, a tiny decoder of every family in the sample.")
    ] = False,
    max_cache_len: Annotated[int, typer.Option(help="Positions of the KV cache.", **_whole(16))] = 4096,
    dtype: Dtype = "float32",
    device: Device = "auto",
    option: Options = None,
    json: Json = None,
) -> None:
    """Show which attention sites of one decode step SFI would rewrite, which not and why; nothing is compiled."""
    options = parse_options(option)
    from sfi_compile.lab import report

    report.check_path(json)
    screen = report.Screen()
    if families:
        from sfi_compile.lab.survey import run_survey

        with screen.busy("families"):
            result = run_survey(options, screen.describe)
        report.show_families(screen, result)
        report.write_json(json, result)
        return
    import sfi_compile
    from sfi_compile.lab import models
    from sfi_compile.lab.decode import prefill

    numeric, place = models.parse_dtype(dtype), models.parse_device(device)
    with screen.busy(f"loading {model}"):
        decoder, tokenizer = models.load(model, numeric, place)
    import torch

    ids = torch.arange(8, device=place)[None] % len(tokenizer)
    cache = models.static_cache(decoder, max_cache_len)
    prefill(decoder, ids, cache)
    with screen.busy("tracing one decode step"):
        keywords = {models.cache_keyword(decoder): cache, "use_cache": True}
        found = sfi_compile.explain(decoder, ids[:, -1:], options=options, **keywords)
    screen.out.print(str(found), markup=False, soft_wrap=True)
    report.write_json(json, found.as_dict())


@app.command(epilog="Example: sfi bench --shape tiny-cpu --context 2048,8192,32768 --new-tokens 64 --json bench.json")
def bench(
    shape: Shapes = "tiny-cpu",
    batch: Batches = "1",
    context: Contexts = "2048,8192,32768",
    new_tokens: Annotated[int, typer.Option(help="Decode steps of the measured run.", **_whole(8))] = 64,
    step_tokens: Annotated[int, typer.Option(help="New tokens a row in one step, 1 to 8.", **_whole(1, 8))] = 1,
    kernel: Annotated[
        bool, typer.Option("--kernel", help="Instead, attention over a memory against flash attention, on a GPU.")
    ] = False,
    layers: Annotated[int | None, typer.Option(help="Only so many layers, for a quick look.", **_whole(1))] = None,
    against: Annotated[
        str, typer.Option(help="On a GPU, what to compare with: dense, flash, kernel, by commas; or none.")
    ] = "dense,flash,kernel",
    profile: Annotated[
        bool, typer.Option("--profile", help="On a GPU, profile the others, too; what comes after is slower then.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="PNG of throughput and speed-up against context.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, cache and tokens.", **_whole(0))] = 0,
    dtype: BenchDtype = "auto",
    device: Device = "auto",
    option: Options = None,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Time dense, slow and fast steps of a decoder with random weights on a cache filled at random."""
    options = parse_options(option)
    batches, contexts = parse_counts("--batch", batch), parse_counts("--context", context)
    from sfi_compile.lab import report

    report.check_path(json)
    _check_figure(plot)
    screen = report.Screen()
    if kernel:
        from sfi_compile.lab.kernel_bench import KernelBenchSettings, run_kernel_bench

        with screen.busy("starting"):
            result = run_kernel_bench(KernelBenchSettings(batches, contexts, seed), screen.describe)
        report.show_kernels(screen, result)
        report.write_json(json, result)
        return
    from sfi_compile.lab import models
    from sfi_compile.lab.bench import run_bench
    from sfi_compile.lab.bench_settings import BenchSettings, parse_ways

    _set_threads(threads)
    shapes = tuple(name.strip() for name in shape.split(","))
    place = models.parse_device(device)
    numeric = models.parse_dtype({"cuda": "bfloat16", "cpu": "float32"}[place] if dtype == "auto" else dtype)
    more = seed, step_tokens, layers, parse_ways(against), profile
    settings = BenchSettings(shapes, batches, contexts, new_tokens, numeric, place, options, *more)
    with screen.busy("starting"):
        result = run_bench(settings, screen.describe, functools.partial(report.write_json, json))
    report.show_bench(screen, result)
    if plot is not None:
        from sfi_compile.lab.plots import plot_bench

        plot_bench(result, plot)


@app.command(
    name="eval",
    epilog="Example: sfi eval --policy balanced,topk --keep 0.1,0.2 --task natural,copy --json eval.jsonl",
)
def evaluate(
    model: Model = "smollm2",
    policy: Annotated[str, typer.Option(help="Policies or presets to compare; comma-separated.")] = "balanced",
    keep: Annotated[str, typer.Option(help="Shares of the context that a memory holds; comma-separated.")] = "0.1,0.2",
    context: Annotated[str, typer.Option(help="Tokens before the first step; comma-separated.")] = "2048",
    task: Annotated[str, typer.Option(help="natural, copy, lookup, needle; comma-separated.")] = "natural,copy,lookup",
    passages: Annotated[int, typer.Option(help="Passages of each task.", **_whole(1))] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode of each, at most.", **_whole(8))] = 256,
    prompt_file: Annotated[str | None, typer.Option(help="UTF-8 text file to take passages from.")] = None,
    text: Annotated[str, typer.Option(help="Named text, used without --prompt-file: sotu.")] = "sotu",
    seed: Annotated[int, typer.Option(help="Which speech the text begins with, and what is drawn.", **_whole(0))] = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    option: Options = None,
    threads: Threads = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="JSON lines: a result each; what is there already is not run again.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of the loss over dense against the share kept.")] = None,
) -> None:
    """Decode known text with slow and fast steps, and say how far from dense attention they are."""
    options = parse_options(option)
    contexts, keeps = parse_counts("--context", context), parse_shares("--keep", keep)
    from sfi_compile.lab import report

    report.check_path(json)
    _check_figure(plot)
    from sfi_compile.lab import models
    from sfi_compile.lab.evaluate import EvalSettings, found_of, run_eval, summarise
    from sfi_compile.lab.progress import Progress
    from sfi_compile.lab.records import Records

    records = Records(json)
    _set_threads(threads)
    screen = report.Screen()
    settings = EvalSettings(
        model=model,
        prompt_file=prompt_file,
        text=text,
        policies=tuple(dict.fromkeys(parse_policies(policy))),
        keeps=tuple(dict.fromkeys(keeps)),
        contexts=tuple(dict.fromkeys(contexts)),
        tasks=tuple(dict.fromkeys(name.strip() for name in task.split(","))),
        passages=passages,
        new_tokens=new_tokens,
        seed=seed,
        dtype=models.parse_dtype(dtype),
        device=models.parse_device(device),
        options=options,
    )
    run_eval(settings, records, Progress(screen.busy, screen.bar))
    rows = summarise(found_of(settings, records))
    report.show_eval(screen, rows)
    if plot is not None:
        from sfi_compile.lab.plots import plot_eval

        plot_eval(rows, plot)


@app.command(epilog="Example: sfi stability --model smollm2 --context 2048 --tokens 128 --plot stability.png")
def stability(
    model: Model = "smollm2",
    prompt_file: Annotated[str | None, typer.Option(help="UTF-8 text file to read.")] = None,
    text: Annotated[str, typer.Option(help="Named text, used without --prompt-file: sotu.")] = "sotu",
    context: Annotated[int, typer.Option(help="Tokens to prefill; supports are among them.", **_whole(1))] = 2048,
    tokens: Annotated[int, typer.Option(help="Tokens after them whose attention is measured.", **_whole(2))] = 128,
    keep: Annotated[float, typer.Option(help="Size of a support, as a share of the context: > 0 and <= 1.")] = 0.1,
    layers: Annotated[str, typer.Option(help="Layers to measure, from 0; comma-separated, or all.")] = "all",
    plot: Annotated[Path | None, typer.Option(help="PNG of overlap against distance, and of supports in time.")] = None,
    seed: Annotated[int, typer.Option(help="Which speech the text begins with.", **_whole(0))] = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Measure how little (or how much) the tokens that a model attends to move from token to token of a real text."""
    from sfi_compile.lab import report

    report.check_path(json)
    _check_figure(plot)
    from sfi_compile.lab import models
    from sfi_compile.lab.progress import Progress
    from sfi_compile.lab.stability import StabilitySettings, run_stability

    _set_threads(threads)
    screen = report.Screen()
    settings = StabilitySettings(
        model=model,
        prompt_file=prompt_file,
        text=text,
        context=context,
        tokens=tokens,
        keep=keep,
        layers=parse_layers(layers),
        seed=seed,
        dtype=models.parse_dtype(dtype),
        device=models.parse_device(device),
    )
    result = run_stability(settings, Progress(screen.busy, screen.bar))
    report.show_stability(screen, result)
    report.write_json(json, result)
    if plot is not None:
        from sfi_compile.lab.plots import plot_stability

        plot_stability(result, plot)


@app.command(epilog="Example: sfi doctor")
def doctor(device: Device = "auto", json: Json = None) -> None:
    """Check the installation: versions, compiler, backend, and a small decoder. Exit code 1 if something is wrong."""
    from sfi_compile.lab import report

    report.check_path(json)
    from sfi_compile.lab import models
    from sfi_compile.lab.doctor import run_doctor

    screen = report.Screen()
    with screen.busy("checking"):
        result = run_doctor(models.parse_device(device))
    report.show_checks(screen, result)
    report.write_json(json, result)
    if not result["ok"]:
        raise typer.Exit(1)


def parse_options(items: Sequence[str] | None) -> dict[str, Any]:
    """`["k_head=512", …]` as backend options: values are Python literals, anything else is a string.

    Raises:
        LabError: an item without "=".
        OptionError: an unknown key or a value that the option cannot take.
    """
    options: dict[str, Any] = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise LabError(f"--option is {item!r}; allowed: key=value, e.g. k_head=512")
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            options[key.strip()] = value.strip()
    Config.from_options(options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`argv` without the program's name; default `sys.argv[1:]`); returns the exit code."""
    # typer.BadParameter < UsageError < ClickException; typer exports only the first by name.
    usage_error: Any = typer.BadParameter.__mro__[2]
    try:
        code = app(args=None if argv is None else list(argv), prog_name="sfi", standalone_mode=False)
    except (LabError, OptionError) as error:
        return _fail(str(error).removeprefix("sfi: "))
    except usage_error as error:
        return _fail(error.format_message())
    except typer.Exit as stop:
        return stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = 2) -> int:
    if message:
        print(f"sfi: error: {message}", file=sys.stderr)
    return code


def _check_figure(plot: Path | None) -> None:
    """Refuse a figure that cannot be drawn, before anything long runs. Raises LabError."""
    if plot is not None:
        from sfi_compile.lab import plots, report

        report.check_path(plot, "--plot")
        plots.import_pyplot()


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
