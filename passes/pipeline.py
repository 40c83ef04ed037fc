"""The compiler as a table of contents: ordered tuples are the run order and the cache key.

SURVEY looks whether there is anything to rewrite and leaves symbolic sizes symbolic; then ANALYSIS and REWRITE run.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from sfi_compile import compat, kernels, ops
from sfi_compile.passes.base import Pass, Work, dump
from sfi_compile.passes.canonicalise import Canonicalise
from sfi_compile.passes.commute_gather import CommuteGather
from sfi_compile.passes.insert_guards import InsertGuards
from sfi_compile.passes.lower import Lower
from sfi_compile.passes.match_attention import MatchAttention
from sfi_compile.passes.specialise import Specialise
from sfi_compile.passes.unswitch import Unswitch
from sfi_compile.passes.verify import Verify

SURVEY: tuple[Pass, ...] = (Specialise(pin=False), Canonicalise(), MatchAttention())
ANALYSIS: tuple[Pass, ...] = (Specialise(), Canonicalise(), MatchAttention())
REWRITE: tuple[Pass, ...] = (InsertGuards(), CommuteGather(), Unswitch(), Verify(), Lower())


def run(passes: tuple[Pass, ...], work: Work, first_stage: int = 0) -> Work:
    """Apply passes in order; with the `dump` option, write every stage."""
    for stage, one in enumerate(passes, start=first_stage):
        work = one(work)
        if work.config.dump is not None:
            dump(work, Path(work.config.dump), stage, one.name)
    return work


def cache_key() -> str:
    """A digest of what a compiled graph depends on beside its nodes: the passes in their order, with their options, and
    everything in the rooms of passes, operators, kernels and private torch APIs."""
    return hashlib.sha256("\n".join((*map(repr, (*ANALYSIS, *REWRITE)), _rooms())).encode()).hexdigest()


@functools.cache
def _rooms() -> str:
    folders = (Path(__file__).parent, *(Path(str(room.__file__)).parent for room in (kernels, ops, compat)))
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".jinja"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)
