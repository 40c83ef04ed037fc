"""Hypothesis profiles: `ci` (small, the same every time) and `thorough`; HYPOTHESIS_PROFILE picks one.

Also the model folder and the prompt file that tests of the command line share.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings


def pytest_runtest_setup() -> None:
    """pytest captures what does not propagate, and Dynamo formats its structured trace for whoever captures it."""
    logging.getLogger("torch.__trace").propagate = True


pytest_runtest_setup()  # pytest begins to capture before the first test

settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=500, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

SENTENCES = "The committee met on Monday. It read the report, and it agreed. Nobody spoke against the plan; all voted. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights and a word tokenizer, as `save_pretrained` leaves them."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")

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
