"""`sfi eval`: its passages, its numbers against literal formulas, its records, and runs through compiled graphs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sfi_compile import cli
from sfi_compile.lab import arguments, evaluate, plots, tasks
from sfi_compile.lab.errors import LabError
from sfi_compile.lab.records import Records
from sfi_compile.lab.reference import Reference
from tests.harness import eager_lowering


def encode(text: str) -> list[int]:
    """A token for each character, so that tokens can be read."""
    return [ord(c) for c in text]


def decode(ids: Any) -> str:
    return "".join(map(chr, ids))


TEXT = encode("".join(f"Sentence {i} of a long text says nothing. " for i in range(4000)))


class TestTasks:
    @given(st.sampled_from(tasks.TASKS), st.integers(0, 5), st.integers(1, 3))
    def test_every_passage_fills_its_context(self, task: str, seed: int, count: int) -> None:
        found = tasks.passages(task, TEXT, encode, 900, 120, count, seed)
        assert found == tasks.passages(task, TEXT, encode, 900, 120, count, seed)
        assert len(found) == count
        for passage in found:
            assert len(passage.context) == 900
            assert 0 < len(passage.targets) <= 120
            assert len(passage.scored) == len(passage.targets)
            assert any(passage.scored)

    def test_natural_goes_on_and_takes_disjoint_parts(self) -> None:
        first, second = tasks.passages("natural", TEXT, encode, 300, 50, 2, 0)
        assert [*first.context, *first.targets, *second.context, *second.targets] == TEXT[:700]
        assert all(first.scored)

    def test_a_copy_repeats_what_followed_its_cue(self) -> None:
        numbers = list(range(5000))
        for passage in tasks.passages("copy", numbers, encode, 400, 64, 3, 1):
            cue = passage.context[-tasks.CUE :]
            at = passage.context.index(cue[0])
            assert at + tasks.CUE + 64 <= 400 - tasks.CUE
            assert passage.context[at : at + tasks.CUE] == cue
            assert passage.context[at + tasks.CUE : at + tasks.CUE + 64] == passage.targets
            assert all(passage.scored)

    def test_what_is_looked_up_stands_in_the_context(self) -> None:
        for passage in tasks.passages("lookup", TEXT, encode, 4000, 300, 2, 3):
            context, asked = decode(passage.context), decode(passage.targets)
            answers = decode([t for t, s in zip(passage.targets, passage.scored, strict=True) if s])
            facts = [fact for fact in asked.split("\n") if fact.endswith(".")]
            assert len(facts) >= 5
            assert all(context.count(fact) == 1 for fact in facts)
            assert set(answers) <= set(" 0123456789")
            assert answers.startswith(facts[0].partition(" is")[2].rstrip("."))
            assert decode(passage.context).count("The code of") == min(tasks.FACTS, 4000 // tasks.PER_FACT)

    def test_a_needle_is_one_fact_and_its_question_is_not_scored(self) -> None:
        (passage,) = tasks.passages("needle", TEXT, encode, 900, 120, 1, 3)
        asked = decode(passage.targets)
        assert decode(passage.context).count(asked) == 1
        assert decode([t for t, s in zip(passage.targets, passage.scored, strict=True) if s]) == asked[-6:]
        assert asked[-6:].strip().isdecimal()

    @pytest.mark.parametrize(
        ("task", "context", "new_tokens", "count", "message"),
        [
            ("sing", 300, 50, 1, "--task 'sing'; allowed: natural, copy, lookup, needle"),
            ("natural", 300, 50, 10_000, "the text has .* tokens; 10000 passages of 300 . 50 need 3500000"),
            ("copy", 90, 50, 1, "--context 90: task copy needs 98 tokens for 50 new ones"),
            ("needle", 60, 50, 1, "--context 60: too short to strew 1 facts over it"),
            ("needle", 900, 20, 1, "--new-tokens 20: the first answer begins after 39 tokens"),
        ],
    )
    def test_what_cannot_be_made_is_named(
        self, task: str, context: int, new_tokens: int, count: int, message: str
    ) -> None:
        with pytest.raises(LabError, match=message):
            tasks.passages(task, TEXT, encode, context, new_tokens, count, 0)


class TestOptions:
    @given(st.sampled_from([0.05, 0.1, 0.2, 0.5, 1.0]), st.integers(200, 9000))
    def test_a_memory_holds_the_share_that_is_kept(self, keep: float, context: int) -> None:
        found = evaluate.options_of("topk", keep, context, {"sink": 2})
        assert found["k_head"] >= 1
        assert 2 + found["recent"] + found["k_head"] == round(keep * context)
        assert found["recent"] <= max(round(keep * context) // 2, 1)
        assert found["min_context"] == 0

    def test_presets_are_policies_and_options_win(self) -> None:
        found = evaluate.options_of("paper-quality", 0.5, 1000, {"recent": 100, "refresh_interval": 8})
        assert found["preset"] == "paper-quality"
        assert (found["recent"], found["k_head"], found["refresh_interval"]) == (100, 396, 8)
        fresh = evaluate.options_of("fresh", 0.5, 1000, {"refresh_interval": 8, "sink": 2})
        assert "refresh_interval" not in fresh
        assert fresh["sink"] == 2

    @pytest.mark.parametrize(
        ("policy", "keep", "options", "message"),
        [
            ("topk", 0.01, {"recent": 20}, "--keep 0.01 of 1000 tokens is 10; sinks and recent tokens take 24"),
            ("topk", 0.1, {"k_head": 4}, "--option k_head: given by --keep"),
            ("topk", 0.1, {"preset": "paper-speed"}, "--option preset: given by --policy"),
            ("topk", 0.1, {"min_context": 50}, "--option min_context: given by --keep"),
            ("tops", 0.1, {}, "there is no policy 'tops'"),
        ],
    )
    def test_what_contradicts_is_named(self, policy: str, keep: float, options: Any, message: str) -> None:
        with pytest.raises((LabError, ValueError), match=message):
            evaluate.options_of(policy, keep, 1000, options)


def test_numbers_against_literal_formulas() -> None:
    torch.manual_seed(0)
    got, dense = (torch.randn(7, 11).log_softmax(-1) for _ in range(2))
    targets = torch.randint(11, (7,))
    found = evaluate._compare(got, dense, targets)
    rows = range(7)
    assert found["nll"] == pytest.approx(-math.fsum(float(got[i, targets[i]]) for i in rows) / 7)
    assert found["nll_dense"] == pytest.approx(-math.fsum(float(dense[i, targets[i]]) for i in rows) / 7)
    kl = math.fsum(math.exp(float(dense[i, v])) * float(dense[i, v] - got[i, v]) for i in rows for v in range(11)) / 7
    assert found["kl"] == pytest.approx(kl)
    assert found["top1"] == sum(int(got[i].argmax() == dense[i].argmax()) for i in rows) / 7
    assert found["score"] == pytest.approx(sum(int(got[i].argmax() == targets[i]) for i in rows) / 7)
    same = evaluate._compare(dense, dense, targets)
    assert (same["kl"], same["top1"], same["nll"]) == (0.0, 1.0, same["nll_dense"])


class TestRecords:
    KEY: ClassVar[dict[str, Any]] = {"policy": "topk", "options": {"boundary_token_ids": (1, 2)}, "passages": 2}

    def test_what_was_written_is_read_again(self, tmp_path: Path) -> None:
        path = tmp_path / "e.jsonl"
        records = Records(path)
        assert not records.holds(self.KEY)
        records.add([self.KEY | {"passage": 0, "nll": 1.0}, self.KEY | {"passage": 1, "nll": 2.0}])
        for again in (records, Records(path)):
            assert again.holds(self.KEY)
            assert [row["nll"] for row in again.matching(self.KEY)] == [1.0, 2.0]
            assert not again.holds(self.KEY | {"policy": "sfi"})
            assert not again.holds(self.KEY | {"passages": 3})

    def test_half_a_line_and_half_a_task_are_done_again(self, tmp_path: Path) -> None:
        path = tmp_path / "e.jsonl"
        Records(path).add([self.KEY | {"passage": i, "nll": 1.0} for i in range(2)])
        whole = path.read_text()
        path.write_text(whole[:-1])  # a line that reads well, but for its end
        assert Records(path).holds(self.KEY)
        assert path.read_text() == whole
        path.write_text(whole[:-9])
        records = Records(path)
        assert not records.holds(self.KEY)
        records.add([self.KEY | {"passage": i, "nll": 5.0} for i in range(2)])
        assert [row["nll"] for row in Records(path).matching(self.KEY)] == [5.0, 5.0]
        assert len(path.read_text().splitlines()) == 3

    @pytest.mark.parametrize("text", ["{]\n{}\n", "[1]\n", '{"rows": []}\n', '{"my": "config"}', "one\ntwo", "x"])
    def test_another_file_is_left_alone(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "other.json"
        path.write_text(text)
        with pytest.raises(LabError, match="line 1: no record"):
            Records(path)
        assert path.read_text() == text


def settings_of(folder: Path, prompt: Path, **changes: Any) -> evaluate.EvalSettings:
    given = {
        "model": str(folder), "prompt_file": str(prompt), "text": "", "policies": ("topk",), "keeps": (1.0,),
        "contexts": (100,), "tasks": ("natural", "copy"), "passages": 2, "new_tokens": 24, "seed": 0,
        "dtype": torch.float32, "device": "cpu", "options": {"refresh_interval": 24, "min_refresh_gap": 24},
    }  # fmt: skip
    return evaluate.EvalSettings(**(given | changes))


def test_a_memory_of_everything_is_dense_and_a_small_one_is_not(
    folder: Path, prompt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "e.jsonl"
    full = settings_of(folder, prompt)
    with eager_lowering():
        evaluate.run_eval(full, Records(path))
        small = settings_of(folder, prompt, keeps=(0.12,), tasks=("natural",))
        evaluate.run_eval(small, Records(path))
    rows = evaluate.found_of(full, Records(path))
    assert [(row["task"], row["passage"]) for row in rows] == [(t, i) for t in ("natural", "copy") for i in (0, 1)]
    for row in rows:
        assert row["kl"] == pytest.approx(0.0, abs=1e-6)
        assert row["nll"] == pytest.approx(row["nll_dense"], abs=1e-5)
        assert row["top1"] == 1.0
        assert row["recall"] == pytest.approx([1.0] * 24, abs=1e-5)
        assert row["slow_share"] == pytest.approx(1 / 24)  # the first step alone: later, more than 100 tokens are there
    (row, _) = evaluate.found_of(small, Records(path))
    assert row["kl"] > 1e-6
    # All of it is there: nothing is loaded, nothing runs.
    monkeypatch.setattr(evaluate, "Decoder", None)
    evaluate.run_eval(full, Records(path))
    with pytest.raises(TypeError):
        evaluate.run_eval(settings_of(folder, prompt, passages=1), Records(path))
    prompt.write_text(prompt.read_text().replace("plan", "idea"))  # another text under the same name
    assert not evaluate.found_of(full, Records(path))


def test_the_reference_is_the_model_token_by_token(folder: Path, prompt: Path) -> None:
    from sfi_compile.lab.models import load, static_cache

    model, tokenizer = load(str(folder), torch.float32)
    ids = tokenizer(prompt.read_text())["input_ids"]
    rows = tasks.passages("natural", ids, lambda text: tokenizer(text)["input_ids"], 60, 40, 2, 0)
    cache = static_cache(model, 100)
    reference = Reference.of(model, cache, rows, lambda done: None)
    whole = torch.tensor([[*row.context, *row.targets] for row in rows])
    with torch.no_grad():
        logits = model(whole[:, :-1]).logits[:, 59:].log_softmax(-1)
    assert torch.equal(reference.targets, whole[:, 60:])
    assert torch.allclose(reference.log_probabilities, logits.flatten(0, 1), atol=1e-5)
    kept = [layer.keys.clone() for layer in cache.layers]
    for layer in cache.layers:
        layer.keys.fill_(torch.nan)
    reference.restore(cache)
    for layer, keys in zip(cache.layers, kept, strict=True):
        assert torch.equal(layer.keys[:, :, :59], keys[:, :, :59])
        assert int(layer.cumulative_length) == 59


def test_summaries_are_means_and_deviations() -> None:
    about = {"context": 100, "policy": "topk", "keep": 0.1, "task": "copy"}
    rest = {"kl": 0.0, "top1": 1.0, "score": 1.0, "score_dense": 1.0}
    shared = {"slow_share": 0.1, "support": 10.0, "tokens_per_second": 5.0}
    rows = [about | rest | shared | {"nll": nll, "nll_dense": 1.0} for nll in (1.5, 2.5)]
    (found,) = evaluate.summarise(rows)
    assert found["passages"] == 2
    assert found["recall"] is None  # of records that an earlier version wrote
    recalls: list[list[float | None]] = [[0.5, 0.25, None], [1.0, None, None, 0.125]]
    (caught,) = evaluate.summarise([row | {"recall": r} for row, r in zip(rows, recalls, strict=True)])
    assert caught["recall"] == [0.75, 0.25, None, 0.125]
    assert found["delta"] == pytest.approx(1.0)
    assert found["delta_spread"] == pytest.approx(math.sqrt(0.5))
    assert evaluate.summarise(rows[:1])[0]["delta_spread"] is None


def test_the_command_shows_draws_and_goes_on(
    folder: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, figure = tmp_path / "e.jsonl", tmp_path / "e.png"
    arguments = ["eval", "--model", str(folder), "--prompt-file", str(prompt), "--context", "100", "--passages", "2"]
    arguments += ["--new-tokens", "24", "--task", "natural,copy", "--json", str(out), "--plot", str(figure)]
    with eager_lowering():
        assert cli.main([*arguments, "--policy", "topk,random(seed=2),topk", "--keep", "0.2,0.2"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 8
    assert {line["policy"] for line in lines} == {"topk", "random(seed=2)"}
    assert all(line["kl"] >= 0.0 and line["tokens_per_second"] > 0 for line in lines)
    shown = "".join(capsys.readouterr().out.split())
    assert all(part in shown for part in ("rand", "natural", "copy", "20%", "shareofdenseattention"))
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert cli.main([*arguments, "--policy", "topk", "--keep", "0.2"]) == 0
    assert len(out.read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--keep", "0"], "--keep is '0'; allowed: numbers > 0 and <= 1"),
        (["--keep", "much"], "--keep is 'much'"),
        (["--task", "sing"], "--task 'sing'; allowed: natural, copy, lookup, needle"),
        (["--policy", "tops"], "there is no policy 'tops'"),
        (["--context", "600"], "512 positions"),
    ],
)
def test_bad_requests_are_one_line(
    more: list[str], part: str, folder: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", "--model", str(folder), "--prompt-file", str(prompt), "--passages", "1", "--new-tokens", "8"]
    assert cli.main([*arguments, "--context", "100", *more]) == 2
    shown = capsys.readouterr().err
    assert part in shown, shown


def test_policies_keep_their_commas() -> None:
    assert arguments.parse_policies("sfi, mine(a=1,b=(2,3)),topk") == ("sfi", "mine(a=1,b=(2,3))", "topk")


def test_a_figure_has_a_line_for_each_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pyplot = plots.import_pyplot()
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    rows = [
        {"task": task, "context": n, "policy": policy, "keep": keep, "delta": 1.0, "delta_spread": 0.1, "passages": 4}
        for task in ("natural", "copy") for policy in ("topk", "fresh") for keep in (0.1, 0.2) for n in (200, 100)
    ]  # fmt: skip
    plots.plot_eval(rows, tmp_path / "e.png")
    panels = drawn[0].axes
    assert [panel.get_title() for panel in panels] == ["copy, 100", "natural, 100", "copy, 200", "natural, 200"]
    assert all(len(panel.containers) == 2 for panel in panels)
