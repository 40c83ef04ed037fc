"""Hypothesis profiles: `ci` (small, the same every time) and `thorough`; HYPOTHESIS_PROFILE picks one."""

from __future__ import annotations

import logging
import os

import torch  # noqa: F401 (sets up its loggers)
from hypothesis import settings

# pytest would format every one of Dynamo's structured trace records.
logging.getLogger("torch.__trace").propagate = False

settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=500, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
