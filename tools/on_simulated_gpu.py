"""Run a script or a module of Python on the simulated GPU of the tests: ``on_simulated_gpu.py [-m] NAME WORDS…``.

For rehearsals of what a machine with a GPU will be asked to do; no time that it takes means anything.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import simulated_gpu

    simulated_gpu.switch_on("eager")
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[1 + is_module :]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
