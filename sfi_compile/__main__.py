"""`python -m sfi_compile` is the command line `sfi`."""

from __future__ import annotations

import sys

from sfi_compile.cli import main

if __name__ == "__main__":
    sys.exit(main())
