"""What the ranks of a job check together, for torchrun: every scenario of some modules, one after the other.

    ranks_job.py DIRECTORY SCENARIOS.py …

Scenarios are the modules' functions whose names begin with "check_", called with this rank and the number of ranks.
Each rank writes ``MODULE.NAME.RANK``: "ok", or what went wrong. A scenario that hangs ends the job after seconds. After
one whose name begins with "check_last" there may be no other rank left.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 30  # for one scenario; the slowest takes two or three on a machine with nothing else to do


def too_long(*_):
    raise TimeoutError(f"more than {SECONDS} s: the ranks wait for each other")


def run(name, scenario, rank, world_size, directory):
    faulthandler.dump_traceback_later(SECONDS + 5, exit=True)  # where Python's own alarm does not get through
    signal.alarm(SECONDS)
    try:
        torch.manual_seed(0)
        scenario(rank, world_size)
        if "check_last" not in name:
            dist.barrier()
        result = "ok"
    except BaseException:
        result = traceback.format_exc()
    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()
    (directory / f"{name}.{rank}").write_text(result)
    if result != "ok":
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    sys.path.insert(0, str(Path(__file__).parent))
    directory, *modules = map(Path, sys.argv[1:])
    for module in modules:
        for name, scenario in runpy.run_path(str(module)).items():
            if name.startswith("check_"):
                run(f"{module.stem}.{name}", scenario, dist.get_rank(), dist.get_world_size(), directory)
    os._exit(0)  # without a word to ranks that are gone
