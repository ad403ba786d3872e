"""Training steps over ten large tables in host memory, beside the bus's floor and FBGEMM: ``speedswap bench tables``.

python benchmarks/bench_tables.py [--device cpu|cuda] [--quick] [--engine auto] [--profile FOLDER] [--json FILE]
"""

import sys

from speedswap.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "tables", *sys.argv[1:]]))
