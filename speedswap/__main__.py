"""``python -m speedswap``: the command line."""

from __future__ import annotations

import sys

from speedswap.cli import main

if __name__ == "__main__":
    sys.exit(main())
