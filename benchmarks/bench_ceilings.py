"""What the machine can do, and the engines beside it: ``speedswap bench ceilings``.

python benchmarks/bench_ceilings.py [--device cpu|cuda] [--quick] [--json FILE]
"""

import sys

from speedswap.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "ceilings", *sys.argv[1:]]))
