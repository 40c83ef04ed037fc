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
from sfi_compile.lab import shapes, survey
from sfi_compile.lab.families import Family, build
from sfi_compile.lab.family_list import FAMILIES

SMALL = ("min_context=0", "k_head=16", "sink=2", "recent=16", "refresh_interval=8", "min_refresh_gap=2")
SMALL_OPTIONS = [part for option in SMALL for part in ("--option", option)]


def read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("command", ["generate", "explain", "bench", "stability", "doctor"])
def test_help_shows_an_example_and_the_json_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Example: sfi {command}" in shown
    assert "--json" in shown


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("generate", "explain", "bench", "stability", "doctor"))


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
        (["explain", "--option", "mode=nope"], ["'mode'", "'nope'", "'reduce-overhead'"]),
        (["generate", "--option", "policy=nope"], ["'policy'", "'nope'", "'topk'"]),
        (["generate", "--dtype", "int8"], ["--dtype", "'int8'", "float32, bfloat16"]),
        (["generate", "--device", "tpu"], ["--device", "'tpu'", "auto, cpu, cuda"]),
        (["generate", "--model", "no-such-model"], ["'no-such-model'", "'smollm2'", ".gguf"]),
        (["explain", "--model", "no-such-model"], ["'no-such-model'", "'smollm2'", ".gguf"]),
        (["generate", "--prompt-file", "no-such-file"], ["'no-such-file'", "does not exist"]),
        (["bench", "--shape", "tiny-cpi"], ["'tiny-cpi'", "did you mean 'tiny-cpu'?", "qwen3-4b"]),
        (["bench", "--context", "2048,x"], ["--context", "'2048,x'", "whole numbers >= 1"]),
        (["bench", "--kernel", "--context", "64"], ["--kernel", "no CUDA device"]),
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


def test_explain_families_has_a_row_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cannot_prefill(model: Any, batch: int, length: int) -> Any:
        raise ValueError("no cache\nof this kind")

    known = {family.name: family for family in FAMILIES}
    chosen = (*(known[name] for name in ("gpt-fast", "latent", "nanogpt", "qwen2-window")),
              Family("unheard", build("Unheard")), Family("unfilled", build("Llama"), cannot_prefill))  # fmt: skip
    monkeypatch.setattr(survey, "FAMILIES", chosen)
    out = tmp_path / "families.json"
    assert cli.main(["explain", "--families", "--json", str(out)]) == 0
    rows = {row.pop("family"): row for row in read(out)["families"]}
    assert list(rows) == [family.name for family in chosen]
    assert rows["gpt-fast"] == {"sites": 2, "dense": 0, "codes": [], "rejections": [], "error": None}
    assert (rows["qwen2-window"]["sites"], rows["qwen2-window"]["dense"]) == (1, 1)
    assert rows["nanogpt"]["codes"] == ["query-length"]
    for row in rows.values():
        assert row["codes"] == list(dict.fromkeys(rejection["code"] for rejection in row["rejections"]))
        assert row["sites"] or row["codes"] or row["error"]
    assert "has no UnheardConfig" in rows["unheard"]["error"]
    assert rows["unfilled"]["error"] == "the prompt fails: no cache"
    shown = capsys.readouterr().out
    assert all(name in shown for name in rows)
    assert "6 decoders: 2 rewritten in full, 1 in part, 3 dense" in shown


@pytest.mark.parametrize("names", [["no-such-option=1"], ["k_head=0"]])
def test_explain_families_checks_the_options_first(names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--families", *(part for name in names for part in ("--option", name))]) == 2
    assert "sfi: error: " in capsys.readouterr().err


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
