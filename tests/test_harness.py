"""lm-evaluation-harness through slow and fast steps: numbers against the harness's own dense model."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sfi_compile
from sfi_compile.lab.errors import LabError
from sfi_compile.lab.families import build
from tests.harness import FULL, SMALL, dynamo_graphs, eager_lowering

# Read when the packages are imported.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from sfi_compile.lab.harness import SfiLM, _batches

TEXT = "The committee met on Monday. It read the report, and it agreed. Nobody spoke against the plan; all voted. "
ROOM = 160
"""`max_length` of all tests."""


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    import transformers

    found = transformers.AutoTokenizer.from_pretrained(folder)
    found.eos_token = found.pad_token = "<unk>"
    return found


@pytest.fixture(autouse=True)
def _plain_graphs() -> Iterator[None]:
    with eager_lowering():
        yield


def llama(tokenizer: Any) -> Any:
    return build("Llama", vocab_size=len(tokenizer), max_position_embeddings=256)()


def sparse(tokenizer: Any, batch_size: int = 1, **options: Any) -> SfiLM:
    model = SfiLM(llama(tokenizer), max_length=ROOM, options=options, batch_size=batch_size, tokenizer=tokenizer)
    sfi_compile.reset()
    return model


def dense(tokenizer: Any, batch_size: int = 1) -> HFLM:
    return HFLM(llama(tokenizer), max_length=ROOM, batch_size=batch_size, tokenizer=tokenizer)


def requests(*pairs: Any) -> list[Any]:
    return [SimpleNamespace(args=pair, task_name="local") for pair in pairs]


PAIRS = requests(
    (TEXT * 2, "It agreed."),
    (TEXT, " Nobody met on Monday, and all spoke against it."),
    (TEXT * 3, "The plan."),
    ("The", " committee voted; it agreed."),
    ("", "Nobody read the report."),
)
ASKED = {"until": ["zzz"], "max_gen_toks": 24, "do_sample": False}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_memory_of_everything_is_dense(tokenizer: Any, batch_size: int) -> None:
    sfi, hf = sparse(tokenizer, batch_size, **FULL), dense(tokenizer, batch_size)
    graphs = dynamo_graphs()
    for got, wanted in zip(sfi.loglikelihood(PAIRS, True), hf.loglikelihood(PAIRS, True), strict=True):
        assert got[0] == pytest.approx(wanted[0], abs=1e-4)
        assert got[1] == wanted[1]
    prompts = requests(*((text, ASKED) for text in (TEXT * 2, "It agreed.", TEXT)))
    assert sfi.generate_until(prompts, True) == hf.generate_until(prompts, True)
    assert sfi.steps["loglikelihood"]["fast_steps"] > sfi.steps["loglikelihood"]["slow_steps"] > 0
    assert sfi.steps["generate_until"]["fast_steps"] > sfi.steps["generate_until"]["slow_steps"] > 0
    texts = requests((TEXT,), (TEXT * 3,))
    assert sfi.loglikelihood_rolling(texts, True) == pytest.approx(hf.loglikelihood_rolling(texts, True), abs=1e-3)
    assert dynamo_graphs() == graphs + 1


def test_a_small_memory_is_not_dense_and_forgets(tokenizer: Any) -> None:
    sfi, hf = sparse(tokenizer, **SMALL), dense(tokenizer)
    got, wanted = sfi.loglikelihood(PAIRS, True), hf.loglikelihood(PAIRS, True)
    assert any(abs(a[0] - b[0]) > 1e-3 for a, b in zip(got, wanted, strict=True))
    assert sfi.steps["loglikelihood"]["fast_steps"] > 0
    prompts = requests(*((text, ASKED) for text in (TEXT * 2, TEXT, "It agreed.")))
    texts = sfi.generate_until(prompts, True)
    # Alone, after others, in another order: the same.
    for i in (3, 0, 1):
        assert sfi.loglikelihood(PAIRS[i : i + 1], True) == got[i : i + 1]
    assert sfi.loglikelihood(PAIRS[::-1], True) == got[::-1]
    for i in (2, 0):
        assert sfi.generate_until(prompts[i : i + 1], True) == texts[i : i + 1]
    sfi_compile.reset()
    assert sfi.loglikelihood(PAIRS[1:2], True) == got[1:2]


def test_scores_are_those_of_a_loop_of_steps(tokenizer: Any) -> None:
    """Against a decode loop by hand: what is scored are the logits that fast steps give."""
    from transformers import StaticCache

    from sfi_compile.lab.models import cache_keyword

    sfi = sparse(tokenizer, **SMALL)
    model = sfi_compile.accelerate(llama(tokenizer), tokenizer, **SMALL)
    for request, (got, greedy) in zip(PAIRS[:2], sfi.loglikelihood(PAIRS[:2], True), strict=True):
        context, continuation = (torch.tensor([ids]) for ids in sfi._encode_pair(*request.args))
        cache = {cache_keyword(model): StaticCache(config=model.config, max_cache_len=ROOM)}
        before = sfi_compile.stats()
        with torch.no_grad():
            logits = [model(context, **cache).logits[:, -1]]
            logits += [model(token, **cache).logits[:, -1] for token in continuation[:, :-1].split(1, dim=1)]
        assert sfi_compile.stats().fast_steps > before.fast_steps
        found = torch.cat(logits).log_softmax(-1)
        assert got == pytest.approx(float(found.gather(1, continuation.T).sum()), abs=1e-4)
        assert greedy == bool((found.argmax(1) == continuation[0]).all())


def test_batch_mates_do_not_count(tokenizer: Any) -> None:
    alone, together = sparse(tokenizer, **SMALL), sparse(tokenizer, 3, **SMALL)
    wanted = alone.loglikelihood(PAIRS, True)
    for got, expected in zip(together.loglikelihood(PAIRS, True), wanted, strict=True):
        assert got == (pytest.approx(expected[0], abs=1e-3), expected[1])


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=12), st.integers(1, 4))
def test_batches_hold_all_and_fit(lengths: list[tuple[int, int]], size: int) -> None:
    batches = list(_batches([([1] * before, [2] * scored) for before, scored in lengths], size, 60))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= size
        assert max(lengths[i][0] for i in batch) + max(lengths[i][1] for i in batch) <= 60


def test_settings_of_the_model_do_not_change_scores(tokenizer: Any) -> None:
    sfi = sparse(tokenizer, **FULL)
    wanted = sfi.loglikelihood(PAIRS[:2], True)
    own = sfi.model.generation_config
    own.repetition_penalty, own.eos_token_id = 3.0, tokenizer.encode(".")[0]  # ends in the midst of the second
    assert sfi.loglikelihood(PAIRS[:2], True) == wanted
    assert sfi.model.generation_config is own


def test_a_length_of_the_model_s_own_does_not_count(tokenizer: Any) -> None:
    sfi = sparse(tokenizer, **FULL)
    (wanted,) = sfi.generate_until(requests((TEXT, ASKED)), True)
    sfi.model.generation_config.max_new_tokens = ROOM
    assert sfi.generate_until(requests((TEXT, ASKED)), True) == [wanted]


class TestWarnings:
    def test_requests_without_a_fast_step(self, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
        sfi = sparse(tokenizer, **SMALL | {"min_context": ROOM - 1})
        sfi.loglikelihood(PAIRS, True)
        sfi.generate_until(requests((TEXT, ASKED)), True)
        first, second = (r.getMessage() for r in caplog.records if r.name == "sfi_compile")
        assert "no fast step in 5 loglikelihood requests" in first
        assert "no fast step in 1 generate_until requests" in second
        assert "(23 slow steps, 23 of them below min_context; sites left dense: none)" in second

    def test_requests_of_one_token(self, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
        sfi = sparse(tokenizer, **SMALL)
        sfi.loglikelihood([*PAIRS, *requests((TEXT, " it"))], True)
        (line,) = (r.getMessage() for r in caplog.records if r.name == "sfi_compile")
        assert "1 of 6 loglikelihood requests score one or two tokens" in line
        assert sfi.steps["loglikelihood"]["dense_requests"] == 1

    def test_sites_that_stay_dense(self, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
        model = build("Mistral", vocab_size=len(tokenizer), max_position_embeddings=256, sliding_window=8)()
        SfiLM(model, max_length=ROOM, tokenizer=tokenizer).loglikelihood(PAIRS, True)
        (line,) = (r.getMessage() for r in caplog.records if "requests" in r.getMessage())
        assert "(0 slow steps, 0 of them below min_context; sites left dense: model.layers.0.self_attn: " in line


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"max_length": None}, "max_length is None; allowed: a whole number >= 2"),
            ({"max_length": 1}, "max_length is 1; allowed: a whole number >= 2"),
            ({"max_length": 4096}, "max_length is 4096; allowed: 2 to the model's 256 positions"),
            ({"batch_size": "auto"}, "batch_size is 'auto'; allowed: a whole number >= 1"),
            ({"batch_size": 0}, "batch_size is 0; allowed: a whole number >= 1"),
            ({"options": "k_head=5"}, "options is 'k_head=5'; allowed: a mapping"),
            ({"options": {"k_heads": 5}}, "k_heads"),
        ],
    )
    def test_a_bad_argument(self, given: Any, message: str, tokenizer: Any) -> None:
        with pytest.raises((LabError, sfi_compile.OptionError), match=message):
            SfiLM(llama(tokenizer), **{"max_length": ROOM, "tokenizer": tokenizer} | given)

    def test_an_encoder_decoder(self, tokenizer: Any) -> None:
        model = build("T5", head="ForConditionalGeneration", vocab_size=len(tokenizer))()
        with pytest.raises(LabError, match="T5ForConditionalGeneration is an encoder-decoder; allowed: causal"):
            SfiLM(model, max_length=ROOM, tokenizer=tokenizer)

    def test_a_request_that_does_not_fit(self, tokenizer: Any) -> None:
        sfi = sparse(tokenizer)
        room = f"together, by max_length {ROOM}"
        with pytest.raises(LabError, match=f"a loglikelihood request has .* tokens and .* more; allowed: 161 {room}"):
            sfi.loglikelihood(requests((TEXT * 9, "It agreed.")), True)
        with pytest.raises(LabError, match=f"a generate_until request has .* tokens and 24 more; allowed: 160 {room}"):
            sfi.generate_until(requests((TEXT * 9, ASKED)), True)
        with pytest.raises(LabError, match="max_gen_toks is 160; allowed: below max_length, which is 160"):
            sfi.generate_until(requests((TEXT, ASKED | {"max_gen_toks": 160})), True)
        with pytest.raises(LabError, match="0 to score; allowed: one at least"):
            sfi.loglikelihood(requests((TEXT.strip(), "")), True)

    def test_truncation_cuts_as_hf_does(self, tokenizer: Any) -> None:
        both = []
        for kind, more in ((SfiLM, {"options": FULL}), (HFLM, {})):
            model = kind(llama(tokenizer), max_length=ROOM, tokenizer=tokenizer, truncation=True, **more)
            ((score, _),) = model.loglikelihood(requests((TEXT * 9, "It agreed.")), True)
            both.append((pytest.approx(score, abs=1e-4), model.generate_until(requests((TEXT * 9, ASKED)), True)))
        assert both[0] == both[1]


CHOICE = """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}]
"""
CONTINUE = """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["zzz"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with tasks `choice`, `continue` and `rolling` over one local file."""
    data, cache = tmp_path / "data.json", tmp_path / "cache"
    rows = [
        {"text": TEXT * (1 + i % 2), "choices": ["The plan met nobody.", "It agreed to the report."], "label": i % 2}
        for i in range(3)
    ]
    data.write_text(json.dumps(rows))
    for name, text in {"choice": CHOICE, "continue": CONTINUE, "rolling": ROLLING}.items():
        source = {"data_files": str(data), "cache_dir": str(cache)}
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {json.dumps(source)}\ntest_split: train"
        (tmp_path / f"{name}.yaml").write_text(head + text)
    return tmp_path


def test_tasks_of_a_file(tokenizer: Any, tasks: Path) -> None:
    def evaluate(model: Any) -> Any:
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        names = ["choice", "continue", "rolling"]
        return lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0)

    found, wanted = evaluate(sparse(tokenizer, 2, **FULL)), evaluate(dense(tokenizer, 2))
    for name, task in wanted["samples"].items():
        if name == "continue":
            assert [sample["resps"] for sample in found["samples"][name]] == [sample["resps"] for sample in task]
        numbers = ({k: v for k, v in r["results"][name].items() if isinstance(v, float)} for r in (found, wanted))
        assert next(numbers) == pytest.approx(next(numbers), rel=1e-4)
    config = found["config"]
    assert set(config["sfi_steps"]) == {"loglikelihood", "generate_until", "loglikelihood_rolling"}
    assert all(counts["fast_steps"] > 0 for counts in config["sfi_steps"].values())
    assert config["sfi_stats"]["fast_steps"] == sum(c["fast_steps"] for c in config["sfi_steps"].values())
    assert config["sfi_options"] == FULL
    json.dumps(config["sfi_stats"])


class TestDocuments:
    """What docs/cli.md shows runs, with a smaller model and other tasks."""

    SECTION = (Path(__file__).parent.parent / "docs/cli.md").read_text().partition("## lm-evaluation-harness")[2]

    def shown(self, start: str, **names: str) -> str:
        text = self.SECTION.partition(start)[2].partition("```")[0]
        for old, new in {"4096": str(ROOM), "512": "16", **names}.items():
            assert old in text
            text = text.replace(old, new)
        return text

    def test_the_command(self, tokenizer: Any, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from lm_eval.__main__ import cli_evaluate

        llama(tokenizer).save_pretrained(tasks / "my-model")
        tokenizer.save_pretrained(tasks / "my-model")
        names = {"gsm8k,hellaswag": "continue,choice", "./my-model": str(tasks / "my-model")}
        command = shlex.split(self.shown("```\npython -m sfi_compile.lab.harness", **names).replace("\\\n", ""))
        # Without the harness's own tasks, which take ten seconds to find.
        monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
        monkeypatch.chdir(tasks)
        monkeypatch.setattr(sys, "argv", ["lm-eval", *command, "--include_path", str(tasks)])
        cli_evaluate()
        (found,) = (tasks / "out").rglob("results*.json")
        config = json.loads(found.read_text())["config"]
        assert config["sfi_options"] == {"min_context": 0, "k_head": 16}
        assert set(config["sfi_steps"]) == {"generate_until", "loglikelihood"}
        assert all(counts["slow_steps"] > 0 for counts in config["sfi_steps"].values())

    def test_the_script(self, tokenizer: Any, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = self.shown("```python\n", **{'"gsm8k", "hellaswag"': '"continue", "choice"'})
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        simple = functools.partial(lm_eval.simple_evaluate, task_manager=manager)
        monkeypatch.setattr(lm_eval, "simple_evaluate", simple)
        given = {"model": llama(tokenizer), "tokenizer": tokenizer}
        exec(script, given)
        assert set(given["results"]["results"]) == {"continue", "choice"}
        assert set(given["sfi"].steps) == {"generate_until", "loglikelihood"}
