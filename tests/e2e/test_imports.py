"""Processes started in the repository root, where folders named `kernels` and `passes` lie."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: str) -> str:
    """Run a script in a fresh process in the root, with the root first on its path; its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(not installed("kernels"), reason="Hugging Face's package `kernels` is not installed")
def test_the_bare_name_kernels_is_hugging_faces_package() -> None:
    out = run(
        """
        import kernels, sfi_compile.kernels
        from kernels import get_kernel
        assert kernels is not sfi_compile.kernels
        print(kernels.__file__, get_kernel.__module__)
        """
    )
    path, module = out.split()
    assert not Path(path).is_relative_to(ROOT / "kernels")
    assert module.startswith("kernels")


def test_without_their_package_transformers_still_works(tmp_path: Path) -> None:
    """transformers finds this folder when it looks for theirs, and must conclude that theirs is not there."""
    site = Path(sysconfig.get_path("purelib"))
    for entry in site.iterdir():
        if not entry.name.startswith(("kernels", "__pycache__")) and entry.suffix != ".pth":
            (tmp_path / entry.name).symlink_to(entry)
    script = f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
        import kernels
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils import is_kernels_available
        assert not hasattr(kernels, "get_kernel"), kernels
        assert not is_kernels_available()
        size = dict(hidden_size=8, intermediate_size=8, num_attention_heads=1, vocab_size=8)
        print(sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **size)).parameters()))
        """
    done = subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_a_transformers_model_is_built_compiled_and_run() -> None:
    out = run(
        """
        import torch, transformers
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16,
            bos_token_id=1, eos_token_id=2,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        import sfi_compile, sfi_compile.kernels.reference, sfi_compile.passes.pipeline
        sfi_compile.accelerate(model)
        print(type(model).__module__)
        """
    )
    assert out.strip() == "transformers.models.llama.modeling_llama"


def test_the_public_names_are_importable() -> None:
    out = run(
        """
        import sfi_compile
        print(*(name for name in sorted(sfi_compile.__all__) if hasattr(sfi_compile, name)))
        """
    )
    assert out.split() == sorted(
        "PRESETS Config OptionError RejectedSitesError Rejection Report Stats accelerate explain reset "
        "sentence_boundaries stats".split()
    )
