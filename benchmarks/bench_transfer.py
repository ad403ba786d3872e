"""Rows to the compute device and back, storage by storage, beside every peer: ``speedswap bench transfer``.

python benchmarks/bench_transfer.py [--device cpu|cuda] [--quick] [--json FILE] [--plot FILE]
"""

import sys

from speedswap.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "transfer", *sys.argv[1:]]))
