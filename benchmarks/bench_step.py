"""Training steps, plain and with lookahead, beside torch's and FBGEMM's: ``speedswap bench step``.

python benchmarks/bench_step.py [--device cpu|cuda] [--quick] [--compute 1,2,4] [--json FILE] [--plot FILE]
"""

import sys

from speedswap.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "step", *sys.argv[1:]]))
